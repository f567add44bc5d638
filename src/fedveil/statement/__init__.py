"""The privacy statement of a configuration: claimed and proven epsilon, caveats, advice."""
