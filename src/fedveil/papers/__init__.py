"""One folder per paper: methods, baselines, claim, presets, recipes and notes."""
