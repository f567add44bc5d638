"""Table 2 of the convergent f-DP analysis as printed: rho_t and gamma_t of Theorem 2, for each schedule of rates.

`convergent_claim.lipschitz` and `shift` are the same quantities without the table's approximations.
"""

from __future__ import annotations

import math

from fedveil.accounting._numbers import at_least, positive
from fedveil.errors import ConfigError
from fedveil.papers.convergent_dp.convergent_claim import FedAvgClaim, StepRates


def printed_sensitivity(claim: FedAvgClaim, round: int) -> tuple[float, float]:
    """(rho_t, gamma_t) of Noisy-FedAvg in the setting of a claim, whose `scale` is the table's c and z.

    Args:
        round: t, from 0.

    Source: Noisy-FedAvg, Table 2.
    """
    mu, k, t, scale = claim.learning_rate, claim.steps, at_least("round", round, 0), claim.scale
    power, grown = mu * claim.smoothness, math.log((t + 2) / (t + 1))
    rates = {
        StepRates.CONSTANT: ((1 + power) ** k, mu * k),
        StepRates.CYCLIC: ((1 + k) ** (scale * power), scale * math.log(k + 1)),
        StepRates.STAGE_WISE: ((1 + power / (t + 1)) ** k, mu * k / (t + 1)),
        StepRates.ITERATIVE: (math.exp(scale * power * grown), scale * grown),
    }
    rho, shift = rates[claim.schedule]
    return rho, 2 * claim.clip / claim.clients * shift


def printed_sensitivity_fedprox(clip: float, proximal: float, smoothness: float, clients: int) -> tuple[float, float]:
    """(rho_t, gamma_t) of Noisy-FedProx: alpha / (alpha - L) and 2 V / (m alpha).

    Source: Noisy-FedAvg, Table 2.
    """
    if not proximal > smoothness:
        raise ConfigError(f"Table 2 of Noisy-FedAvg needs alpha > L, got alpha = {proximal} and L = {smoothness}")
    return proximal / (proximal - smoothness), 2 * positive("clip", clip) / (at_least("clients", clients, 1) * proximal)
