"""Choosing settings without leaking the data to be protected."""
