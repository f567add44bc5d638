"""Privacy mathematics: numpy and scipy only."""
