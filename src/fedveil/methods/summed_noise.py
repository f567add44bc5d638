"""Noise as papers state it that think of a round's sum: sigma times the clip there, of which each upload carries 1 / sqrt(n).

The uploads are released one by one, so in the server view a release has the noise multiplier sigma / sqrt(n).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from fedveil.accounting.types import Adjacency, Claim, Scope, Unit, View
from fedveil.errors import ConfigError
from fedveil.methods.adaptive import refuse_dp_sgd
from fedveil.methods.base import Setting, sum_noise

SUMS = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
"""What such papers speak of: clients, and the sum of a round."""


def published_noise(s: Setting, name: str, given: float | None, formula: Callable[[float], float]) -> Setting:
    """The setting with the noise multiplier of one upload: from sigma as given, or by the paper's formula from privacy.epsilon.

    What is claimed is no target that a budget could hold, so the setting keeps no epsilon.

    Raises:
        ConfigError: noise on the sum, DP-SGD, or sigma and epsilon at once.
    """
    refuse_dp_sgd(s, name)
    if sum_noise(s):
        raise ConfigError(
            f"the published variant of {name} sends each client's upload to the server, with a share of the noise: "
            "set privacy.view = 'server' (its claim is about the sum all the same)"
        )
    if given is not None and s.epsilon is not None:
        raise ConfigError(f"method.sigma = {given:g} fixes the noise: remove privacy.epsilon and privacy.noise_multiplier")
    if s.noise_multiplier is not None or (given is None and s.epsilon is None):
        return s
    sigma = given if given is not None else formula(s.epsilon or 0.0)
    return replace(s, epsilon=None, noise_multiplier=sigma / math.sqrt(s.cohort))


def sigma_of(s: Setting) -> float:
    """The paper's sigma: noise std of the sum / clip when all n clients add their shares."""
    return s.z if sum_noise(s) else s.z * math.sqrt(s.cohort)


def summed_claim(s: Setting, formula: Callable[[float], float], source: str) -> Claim | None:
    """The paper's claim about sums, by its formula from sigma."""
    if not s.z:
        return None
    note = f"sigma = {sigma_of(s):.4g}, of which each upload carries the share 1/sqrt({s.cohort})"
    return Claim(formula(sigma_of(s)), s.delta, SUMS, source, note)
