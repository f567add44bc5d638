"""Data sets and how they are partitioned among clients; numpy only, no torch."""
