"""One folder a paper: its claim, presets and recipes."""
