"""Choosing settings without looking at the data that are to be protected."""
