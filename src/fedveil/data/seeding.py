"""Random generators that depend on a seed and a purpose, and on nothing else."""

from __future__ import annotations

import numpy as np

from fedveil.errors import ConfigError


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A generator of its own for each (seed, purpose); seed: a non-negative integer. ConfigError otherwise."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ConfigError(f"seed is {seed!r}; give a non-negative integer")
    return np.random.default_rng(np.random.SeedSequence(int(seed), spawn_key=tuple(purpose.encode())))
