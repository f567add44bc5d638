"""One file per published method: its policy, local objective, aggregation and claim."""
