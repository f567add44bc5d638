"""Releases whose noise differs between groups of coordinates (layers): the exact mu of one such release."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting._check import non_negative, numpy_defaults, vector
from fedveil.errors import ConfigError

_Numbers = Sequence[float] | NDArray[np.float64]


def _pair(sensitivities: _Numbers, stds: _Numbers) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    first, second = vector("sensitivities", sensitivities), vector("stds", stds)
    if first.size != second.size:
        raise ConfigError(f"one noise std per group: got {first.size} sensitivities and {second.size} stds")
    return first, second


@numpy_defaults
def mu_groups(sensitivities: _Numbers, stds: _Numbers) -> float:
    """mu of one release whose groups are clipped independently: sqrt(sum (Delta_l / sigma_l)^2).

    Args:
        sensitivities: L2 sensitivity of each group, >= 0.
        stds: noise std of each group, >= 0; a group with sensitivity but no noise makes mu infinite.

    Source: scaling group l by 1/sigma_l turns the release into one isotropic Gaussian with shift (x_l / sigma_l)_l.
    """
    deltas, sigmas = _pair(sensitivities, stds)
    if np.any((sigmas == 0) & (deltas > 0)):
        return math.inf
    used = deltas > 0
    return float(np.linalg.norm(deltas[used] / sigmas[used]))


@numpy_defaults
def mu_groups_joint(sensitivities: _Numbers, stds: _Numbers, joint: float) -> float:
    """mu of one release whose whole shift is bounded by `joint` as well as each group's by its own sensitivity.

    The worst shift maximises sum (x_l / sigma_l)^2 over x_l <= Delta_l and sum x_l^2 <= joint^2: a fractional knapsack in
    x_l^2, filled by the smallest sigma first. For replace-one pass doubled clips, doubled joint: the difference of two
    points of a symmetric convex set lies in twice the set.

    Args:
        sensitivities: L2 sensitivity of each group, >= 0.
        stds: noise std of each group, >= 0.
        joint: L2 sensitivity of the whole release, >= 0.
    """
    deltas, sigmas = _pair(sensitivities, stds)
    left = non_negative("joint", joint) ** 2
    total = 0.0
    for index in np.argsort(sigmas, kind="stable"):
        moved = min(left, float(deltas[index]) ** 2)
        if moved == 0:
            continue
        if sigmas[index] == 0:
            return math.inf
        total += moved / float(sigmas[index]) ** 2
        left -= moved
    return math.sqrt(total)
