"""The Python API: a federation, its runs, and what may be asked of them."""
