"""What a person runs: configuration, run directory, statement, report."""
