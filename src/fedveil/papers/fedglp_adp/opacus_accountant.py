"""The Renyi accountant of Opacus, which FedGLP-ADP and its baselines used: its default orders, its conversion."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from fedveil.accounting._numbers import non_negative, open_probability, positive
from fedveil.accounting.gaussian import rdp_epsilons
from fedveil.accounting.subsampled import rdp
from fedveil.accounting.types import Adjacency

ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(12, 64)))


def opacus_epsilon(noise_multiplier: float, steps: float, delta: float, *, rate: float = 1.0) -> float:
    """The epsilon of so many Poisson-sampled Gaussian releases.

    Args:
        noise_multiplier: noise std / sensitivity, > 0. steps: releases, >= 0; Opacus takes fractions. delta: in (0, 1).
        rate: sampling probability of a unit in each release.
    """
    total = non_negative("steps", steps) * rdp(
        rate, positive("noise_multiplier", noise_multiplier), ORDERS, adjacency=Adjacency.ZERO_OUT
    )
    return float(np.min(rdp_epsilons(ORDERS, total, open_probability("delta", delta))))


@lru_cache(maxsize=256)
def opacus_noise_multiplier(epsilon: float, steps: float, delta: float, *, rate: float = 1.0) -> float:
    """The smallest noise multiplier whose `opacus_epsilon` is at most epsilon, to a relative 1e-9."""
    positive("epsilon", epsilon)
    low, high = 1e-3, 1.0
    while opacus_epsilon(high, steps, delta, rate=rate) > epsilon:
        low, high = high, 2 * high
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if opacus_epsilon(middle, steps, delta, rate=rate) > epsilon else (low, middle)
    return high
