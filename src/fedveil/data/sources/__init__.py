"""Readers, one file format each: a directory in, arrays out."""
