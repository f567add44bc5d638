"""Noisy-FedAvg and Noisy-FedProx: the theorems and the table as printed, exact values that refute them, and valid bounds.

Symbols: m clients, K local steps of rate eta_{k,t}, gradients clipped to V, noise std sigma on each upload (so sigma / sqrt(m) on
the mean), L smoothness, alpha proximal coefficient, T rounds. gamma_t is the distance of two means of uploads from one model
when one client's data are replaced: (2 V / m) sum_k eta_{k,t}. Claims and bounds are mu of Gaussian DP.

`accounting.last_iterate.lipschitz` and `shift` are the same quantities without the table's approximations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting._numbers import at_least, positive, vector
from fedveil.accounting.types import View
from fedveil.errors import ConfigError

_Numbers = Sequence[float] | NDArray[np.float64]


class StepRates(StrEnum):
    """Learning rates of Noisy-FedAvg: mu, mu/(k+1), mu/(t+1) and mu/(tK+k+1)."""

    CONSTANT = "constant"
    CYCLIC = "cyclic"
    STAGE_WISE = "stage_wise"
    ITERATIVE = "iterative"


# --- as printed ---------------------------------------------------------------------------------------------------------


def optimum_as_printed(rho: float, rounds: int) -> float:
    """Return H_0 in units of gamma^2: (rho+1)(rho^T-1) / ((rho-1)(rho^T+1)), the value of the Cauchy-Schwarz step.

    Not attainable: for rho > 1, T >= 2 it needs a first interpolation coefficient above 1 (`equality_coefficient`).

    Source: Noisy-FedAvg, Section G.3, with constant rho and gamma.
    """
    rho, rounds = _expansion(rho), at_least("rounds", rounds, 1)
    return (rho + 1) / (rho - 1) * math.tanh(0.5 * rounds * math.log(rho))


def optimum_of_rounds(rhos: _Numbers, shifts: _Numbers) -> float:
    """Return H_0 for rho_t and gamma_t that change: (sum p_t gamma_t)^2 / sum p_t^2 with p_t = rho_(t+1) ... rho_(T-1).

    It is what is left of Eq. 13 by Cauchy-Schwarz, attainable or not: no coefficient is kept within [0, 1].

    Source: Noisy-FedAvg, Section G.3, Eqs. 34 to 36.
    """
    logs = np.log(vector("rhos", rhos))
    weights = np.exp(logs[0] - np.cumsum(logs))  # p_t in units of p_0, which cancel
    return float((weights @ vector("shifts", shifts)) ** 2 / (weights @ weights))


def equality_coefficient(rho: float, rounds: int) -> float:
    """lambda_1 at which Noisy-FedAvg's Cauchy-Schwarz step is an equality: rho^(T-1) (rho+1) / (rho^T+1), above 1 for T >= 2."""
    rho, rounds = _expansion(rho), at_least("rounds", rounds, 1)
    return (rho + 1) / (rho + math.exp((1 - rounds) * math.log(rho)))


def _expansion(rho: float) -> float:
    if not (rho > 1 and math.isfinite(rho)):
        raise ConfigError(f"rho must be above 1, as in Noisy-FedAvg's paper, got {rho}")
    return rho


@dataclass(frozen=True)
class FedAvgClaim:
    """Theorem 3 of Noisy-FedAvg, as printed, for its four schedules: FALSE for constant and cyclic rates.

    Args:
        schedule: (a) constant, (b) cyclic, (c) stage-wise, (d) iterative.
        learning_rate: mu; in (b) and (d) it enters through the exponent only, as printed.
        clip: V. steps: K. smoothness: L. rounds: T. clients: m. noise_std: sigma of one upload.
        scale: the constants c of (b), 1 <= c < 1.543, and z of (d); (d) holds only if z >= mu (1 + 1/2 + ... + 1/K).

    Source: Noisy-FedAvg, Theorem 3, equations (15) to (18).
    """

    schedule: StepRates
    learning_rate: float
    clip: float
    steps: int
    smoothness: float
    rounds: int
    clients: int
    noise_std: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip", "smoothness", "noise_std", "scale"):
            positive(name, getattr(self, name))
        for name in ("steps", "rounds", "clients"):
            at_least(name, getattr(self, name), 1)

    @property
    def mu(self) -> float:
        """The claimed mu of Gaussian DP."""
        mu, steps, rounds, scale = self.learning_rate, self.steps, self.rounds, self.scale
        unit = 2 * self.clip / (math.sqrt(self.clients) * self.noise_std)
        if self.schedule is StepRates.CONSTANT:
            return unit * mu * steps * _root(steps * math.log1p(mu * self.smoothness), rounds)
        if self.schedule is StepRates.CYCLIC:
            return unit * scale * math.log(steps + 1) * _root(scale * mu * self.smoothness * math.log(steps + 1), rounds)
        tail = math.sqrt(2 - 1 / rounds)
        return unit * (mu * steps if self.schedule is StepRates.STAGE_WISE else scale) * tail


def _root(log_rho: float, rounds: int) -> float:
    """Return the square root of `optimum_as_printed` from ln rho."""
    return math.sqrt(math.tanh(0.5 * rounds * log_rho) / math.tanh(0.5 * log_rho))


def claim_fedprox(*, clip: float, proximal: float, smoothness: float, rounds: int, clients: int, noise_std: float) -> float:
    """Return mu of Theorem 4 of Noisy-FedAvg, as printed: FALSE, for the same reason as Theorem 3 (a).

    Args:
        clip: V. proximal: alpha > L. smoothness: L. rounds: T. clients: m. noise_std: sigma of one upload.

    Source: Noisy-FedAvg, Theorem 4, equation (19).
    """
    smooth, rounds, clients = positive("smoothness", smoothness), at_least("rounds", rounds, 1), at_least("clients", clients, 1)
    if not proximal > smooth:
        raise ConfigError(
            f"proximal = {proximal:g} is not above smoothness = {smooth:g}: Theorem 4 of Noisy-FedAvg holds only for alpha > L, "
            f"where `proximal` is alpha and `smoothness` is L: raise the one or lower the other"
        )
    unit = 2 * positive("clip", clip) / (math.sqrt(clients) * proximal * positive("noise_std", noise_std))
    shrink = math.tanh(0.5 * rounds * (math.log(proximal) - math.log(proximal - smooth)))
    return unit * math.sqrt((2 * proximal - smooth) / smooth * shrink)


# --- valid bounds -------------------------------------------------------------------------------------------------------


def learning_rates(schedule: StepRates, learning_rate: float, steps: int, rounds: int) -> NDArray[np.float64]:
    """Return eta_{k,t} as an array of shape (rounds, steps).

    Source: Noisy-FedAvg, Theorem 3.
    """
    mu, steps, rounds = positive("learning_rate", learning_rate), at_least("steps", steps, 1), at_least("rounds", rounds, 0)
    k, t = np.arange(steps, dtype=np.float64), np.arange(rounds, dtype=np.float64)[:, None]
    divisors = {
        StepRates.CONSTANT: np.ones((rounds, steps)),
        StepRates.CYCLIC: np.broadcast_to(k + 1, (rounds, steps)),
        StepRates.STAGE_WISE: np.broadcast_to(t + 1, (rounds, steps)),
        StepRates.ITERATIVE: t * steps + k + 1,
    }
    return np.asarray(mu / divisors[schedule], dtype=np.float64)


def composition_mu(shifts: _Numbers, clients: int, noise_std: float, view: View) -> float:
    """Return mu of all rounds together by composition in this view; the final view has the bound of the aggregate view.

    Args:
        shifts: gamma_t of each round (see `shift`). clients: m. noise_std: sigma of one upload. view: view of the adversary.

    Source: Dong, Roth & Su 2022, Corollary 3.3. The mean has noise sigma / sqrt(m); one upload shifts by m gamma_t under sigma.
    """
    gamma, clients = vector("shifts", shifts), at_least("clients", clients, 1)
    weight = clients if view is View.SERVER else math.sqrt(clients)
    return weight * float(np.linalg.norm(gamma)) / positive("noise_std", noise_std)


def linear_loss_mu(shifts: _Numbers, clients: int, noise_std: float) -> float:
    """Return the exact mu of the LAST model when all losses are linear: sqrt(m) sum gamma_t / (sigma sqrt(T)).

    Linear losses are L-smooth for every L >= 0. w_T is w_0 plus constants plus T Gaussian vectors of std sigma / sqrt(m);
    replacing one client's loss V <e, w> by -V <e, w> moves w_T by sum gamma_t along e. So no bound below this value can hold.
    For constant gamma it equals composition: sqrt(T) gamma sqrt(m) / sigma.
    """
    gamma, clients = vector("shifts", shifts), at_least("clients", clients, 1)
    return math.sqrt(clients) * math.fsum(gamma) / (positive("noise_std", noise_std) * math.sqrt(gamma.size))


def printed_sensitivity(claim: FedAvgClaim, round: int) -> tuple[float, float]:
    """Return (rho_t, gamma_t) of Noisy-FedAvg in the setting of a claim, whose `scale` is the table's c and z.

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
    """Return (rho_t, gamma_t) of Noisy-FedProx: alpha / (alpha - L) and 2 V / (m alpha).

    Source: Noisy-FedAvg, Table 2.
    """
    if not proximal > smoothness:
        raise ConfigError(
            f"proximal = {proximal:g} is not above smoothness = {smoothness:g}: Table 2 of Noisy-FedAvg holds only for alpha > "
            "L, where `proximal` is alpha and `smoothness` is L: raise the one or lower the other"
        )
    return proximal / (proximal - smoothness), 2 * positive("clip", clip) / (at_least("clients", clients, 1) * proximal)


GROWTH: dict[str, Callable[[int, int, int, float], float]] = {
    "wei": lambda t, k, m, delta: math.sqrt(t**2 - m),
    "shi": lambda t, k, m, delta: t * math.sqrt(k),
    "zhang": lambda t, k, m, delta: math.sqrt(t + m * k),
    "noble": lambda t, k, m, delta: math.sqrt(math.log(2 * t / delta) * t * k),
    "cheng": lambda t, k, m, delta: math.sqrt(t),
    "zhang-tang": lambda t, k, m, delta: t * k,
    "hu": lambda t, k, m, delta: math.sqrt(t),
    "fukami": lambda t, k, m, delta: math.sqrt(t),
    "bastianello": lambda t, k, m, delta: -math.expm1(-t),
}
"""Noisy-FedAvg, Table 3: by analysis, how sigma, or epsilon of Renyi DP, grows with T rounds and K steps of m clients at delta.

Constants that the table does not state are left out; the exposures L of Wei et al. and the beta of Bastianello et al. are 1.
"""
