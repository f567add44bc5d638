"""A noise sampler that is not exact: its distance from the ideal law, and what that adds to delta."""

from __future__ import annotations

import math

from fedveil.accounting._check import at_least, non_negative, open_probability, probability
from fedveil.errors import ConfigError

_LARGEST_PART = 0.01


def total_variation(n: int) -> float:
    """Bound on the total variation between one draw of n coordinates by `fedveil.mechanism.sampler` and its ideal law.

    Rounding adds nothing. The words are distinct blocks of a permutation of 2^128 values, where ideal ones may repeat: at most
    m (m - 1) / 2^129 for m pairs, 2^-84 at 11 million coordinates. Beyond this stands the usual assumption that AES-256 and
    shake_256 with a secret key cannot be told from random.

    Source: PRP/PRF switching lemma (Bellare & Rogaway 2006, Lemma 1).
    """
    pairs = (n + 1) // 2
    return pairs * (pairs - 1) * 2.0**-129


def sampler_delta(variation: float, coordinates: int, releases: int, epsilon: float, delta: float) -> float:
    """What to add to delta: (1 + e^epsilon) tau d T, refused unless it is below 1 % of delta.

    The law of all that is released is within tau d T of the ideal one in both worlds, however rounds depend on earlier ones, so
    P'(S) <= P(S) + tau d T <= e^eps Q(S) + delta + tau d T <= e^eps Q'(S) + delta + (1 + e^eps) tau d T.

    Args:
        variation: tau in [0, 1], total variation between the sampler's law of one coordinate and the ideal one.
        coordinates: d >= 0 of a release. releases: T >= 0. epsilon: >= 0, delta: in (0, 1), proven of ideal noise.

    Raises:
        ConfigError: the addition is 1 % of delta or more.
    """
    tau, delta = probability("variation", variation), open_probability("delta", delta)
    total = tau * at_least("coordinates", coordinates, 0) * at_least("releases", releases, 0)
    epsilon = non_negative("epsilon", epsilon)
    added = total * (1 + math.exp(epsilon)) if epsilon < 700 else (math.inf if total > 0 else 0.0)
    if not added < _LARGEST_PART * delta:
        raise ConfigError(
            f"the noise sampler's error (total variation {tau:g} a coordinate) adds {added:.3g} to delta = {delta:g}, where less "
            f"than 1 % of it is allowed: use a more exact sampler, fewer coordinates or releases, or a larger delta"
        )
    return added
