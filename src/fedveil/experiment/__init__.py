"""One run: its configuration, assembly and directory, and how it is resumed, verified and published."""
