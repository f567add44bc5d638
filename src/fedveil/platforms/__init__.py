"""Releases for programs that fedveil does not run: dicts of numpy arrays in and out, and adapters of platforms; no torch."""
