"""`fedveil compare`: methods at equal guarantee over seeds."""
