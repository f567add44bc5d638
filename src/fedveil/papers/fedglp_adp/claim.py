"""FedGLP-ADP's claimed epsilon, the valid bound, the claims of its baselines, and the accountant of Opacus that they used.

BLUR+LUS and the paper's form of FedDPA count T releases of a round's sum by the Renyi accountant (`opacus_accountant`).

Each of n clients clips layer l to C_l (sum C_l^2 = C^2) and adds noise of variance L sigma^2 C_l^2 / n to it, for L layers and
the noise multiplier sigma. All bounds are mu over T rounds, if clips and masks do not depend on raw data.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from fedveil.accounting._numbers import at_least, non_negative, open_probability, positive, probability
from fedveil.accounting.gaussian import rdp_epsilons, zcdp_epsilon
from fedveil.accounting.subsampled import rdp
from fedveil.accounting.types import Adjacency

ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(12, 64)))


def opacus_epsilon(noise_multiplier: float, steps: float, delta: float, *, rate: float = 1.0) -> float:
    """Return the epsilon of `steps` Poisson-sampled Gaussian releases.

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
    """Return the smallest noise multiplier whose `opacus_epsilon` is at most epsilon, to a relative 1e-9."""
    positive("epsilon", epsilon)
    low, high = 1e-3, 1.0
    while opacus_epsilon(high, steps, delta, rate=rate) > epsilon:
        low, high = high, 2 * high
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if opacus_epsilon(middle, steps, delta, rate=rate) > epsilon else (low, middle)
    return high


def record_steps(batch: int, examples: int, rounds: int, epochs: float, client_rate: float = 1.0) -> tuple[float, float]:
    """Return (sampling rate, steps) that DynamicPFL gives to its accountant: those of one DP-SGD run over all clients' records.

    q = batch / sum n_i * client_rate; steps = client_rate T E sum n_i / batch. Yet no record is clipped.

    Args:
        batch: examples per batch. examples: sum n_i over all clients. rounds: T. epochs: E. client_rate: of clients per round.

    Source: xiyuanyang45/DynamicPFL, utils.py, compute_noise_multiplier.
    """
    share = at_least("batch", batch, 1) / at_least("examples", examples, 1)
    q = min(1.0, share) * probability("client_rate", client_rate)
    return q, client_rate * at_least("rounds", rounds, 1) * positive("epochs", epochs) / share


def fedaddp_noise(epsilon: float, rounds: int, delta: float) -> float:
    """sigma_0 = sqrt(T a / (2 (epsilon + ln(delta) / (a - 1)))), a = ceil(log2(1 / delta) / epsilon + 1).

    Source: yyguo-xdu/FedADDP, utils.py, get_sigma0.
    """
    order = math.ceil(math.log2(1 / open_probability("delta", delta)) / positive("epsilon", epsilon) + 1)
    left = epsilon + math.log(delta) / (order - 1)  # at least (1 - ln 2) epsilon
    return math.sqrt(at_least("rounds", rounds, 1) * order / (2 * left))


def fedsmp_noise_multiplier(epsilon: float, rounds: int, delta: float, rate: float) -> float:
    """sigma^2 = 7 q^2 T (epsilon + 2 ln(1/delta)) / epsilon^2, which is sufficient according to Fed-SMP.

    Args:
        rate: q, share of clients per round, drawn without replacement.
    """
    room = positive("epsilon", epsilon) + 2 * math.log(1 / open_probability("delta", delta))
    return probability("rate", rate) * math.sqrt(7 * at_least("rounds", rounds, 1) * room) / epsilon


def fedsmp_epsilon(noise_multiplier: float, rounds: int, delta: float, rate: float) -> float:
    """Invert `fedsmp_noise_multiplier`: the positive root of epsilon^2 - a (epsilon + 2 ln(1/delta))."""
    a = 7 * probability("rate", rate) ** 2 * at_least("rounds", rounds, 0) / positive("noise_multiplier", noise_multiplier) ** 2
    return (a + math.sqrt(a * a + 8 * a * math.log(1 / open_probability("delta", delta)))) / 2


_ZERO = Adjacency.ZERO_OUT


def claimed_epsilon(noise_multiplier: float, rounds: int, delta: float) -> float:
    """min over a > 1 of T a / (2 sigma^2) + ln(1/delta) / (a - 1) = r + 2 sqrt(r ln(1/delta)), r = T / (2 sigma^2).

    Args:
        noise_multiplier: sigma, > 0. rounds: T. delta: in (0, 1); the paper takes 1 / n, which is vacuous.

    Source: FedGLP-ADP, Theorem 1.
    """
    return zcdp_epsilon(at_least("rounds", rounds, 0) / (2 * positive("noise_multiplier", noise_multiplier) ** 2), delta)


def claimed_noise_multiplier(epsilon: float, rounds: int, delta: float) -> float:
    """Return the sigma whose `claimed_epsilon` is epsilon.

    Args:
        epsilon: > 0. rounds: T >= 1. delta: in (0, 1).

    Source: FedGLP-ADP, Theorem 1, solved for sigma.
    """
    log_inverse = math.log(1 / open_probability("delta", delta))
    root = positive("epsilon", epsilon) / (math.sqrt(epsilon + log_inverse) + math.sqrt(log_inverse))
    return math.sqrt(at_least("rounds", rounds, 1) / 2) / root


def accountant_epsilon(noise_multiplier: float, rounds: int, delta: float) -> float:
    """Return the epsilon of T Gaussian releases by the accountant that the paper used, which is sharper than Theorem 1.

    It reproduces the beta of the paper's Table 3 to two digits, which Theorem 1 does not.

    Args:
        noise_multiplier: sigma, > 0. rounds: T. delta: in (0, 1).
    """
    return opacus_epsilon(noise_multiplier, rounds, delta)


def accountant_noise_multiplier(epsilon: float, rounds: int, delta: float) -> float:
    """Return the smallest sigma whose `accountant_epsilon` is at most epsilon, to a relative 1e-9.

    Args:
        epsilon: > 0. rounds: T >= 1. delta: in (0, 1).
    """
    return opacus_noise_multiplier(epsilon, at_least("rounds", rounds, 1), delta)


def uplink_bits(parameters: int, beta: float, round: int, rounds: int) -> float:
    """Return the bits that one client sends in round t of T: 32 per shared coordinate, and 1 bit of mask per coordinate.

    Args:
        parameters: M. beta: personalisation threshold, in [0, 1]. round: t in 0..T. rounds: T >= 1.

    Source: FedGLP-ADP, Eq. 20.
    """
    return 32 * at_least("parameters", parameters, 1) * (1 - round * beta / at_least("rounds", rounds, 1)) + parameters


def upload_mu(noise_multiplier: float, clients: int, rounds: int = 1, adjacency: Adjacency = _ZERO) -> float:
    """Return mu of one client's uploads, each visible: f sqrt(n T) / sigma; f = 1 (zero-out) or 2 (replace-one).

    Each layer contributes (C_l / std_l)^2 = n / (L sigma^2), so the L layers sum to n / sigma^2 a round.

    Args:
        noise_multiplier: sigma, > 0. clients: n >= 1. rounds: T >= 0. adjacency: of the guarantee.
    """
    weight = at_least("clients", clients, 1) * at_least("rounds", rounds, 0)
    return adjacency.factor * math.sqrt(weight) / positive("noise_multiplier", noise_multiplier)
