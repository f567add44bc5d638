"""`python -m fedveil` is the command-line program."""

from fedveil.cli.app import main

main()
