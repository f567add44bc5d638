"""LaDP-FL: layer-wise adaptive noise."""
