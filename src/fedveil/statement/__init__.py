"""What a configuration promises: claimed and proven epsilon, caveats, advice."""
