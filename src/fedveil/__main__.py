"""`python -m fedveil` is the command-line program."""

from fedveil.cli import main

main()
