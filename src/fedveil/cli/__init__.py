"""The command line: commands, and their output in the terminal."""
