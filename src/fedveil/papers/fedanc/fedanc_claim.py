"""FedANC: its claimed epsilon per step, and the true cost of the repaired, once-noised upload."""

from __future__ import annotations

import math

from fedveil.accounting._numbers import at_least, open_probability, positive, probability
from fedveil.accounting.types import Adjacency


def claimed_epsilon(beta: float, gamma: float, dimension: int, delta: float) -> float:
    """sqrt(2 gamma d ln(1.25 / delta)) / beta: the claim for one step; its sensitivity C sqrt(gamma d) is not the sensitivity.

    Args:
        beta: noise std / clip, > 0. gamma: share of coordinates noised, in (0, 1]. dimension: d. delta: in (0, 1).

    Source: FedANC, Theorem 2 and equation (10).
    """
    share = positive("gamma", probability("gamma", gamma)) * at_least("dimension", dimension, 1)
    return math.sqrt(2 * share * math.log(1.25 / open_probability("delta", delta))) / positive("beta", beta)


def release_mu(beta: float, rounds: int = 1, adjacency: Adjacency = Adjacency.REPLACE_ONE, *, aggregated: int = 1) -> float:
    """The true mu of `rounds` uploads noised once with std beta C on a support fixed beforehand: f sqrt(T / n) / beta.

    Sparsity does not enter: the clipped update has norm at most C on any support. It lowers the norm of the noise instead.

    Args:
        beta: noise std / clip, > 0. rounds: T >= 0. adjacency: f = 2 (replace-one) or 1 (zero-out).
        aggregated: number n of uploads that the adversary sees only as a sum (1: the server view).
    """
    share = at_least("rounds", rounds, 0) / at_least("aggregated", aggregated, 1)
    return adjacency.factor * math.sqrt(share) / positive("beta", beta)
