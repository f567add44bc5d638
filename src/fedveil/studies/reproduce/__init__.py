"""Reproductions of the papers' tables and figures."""
