"""One run: its configuration, its assembly, its directory, and how it is resumed, verified and published."""
