"""The noise of FedGLP-ADP's baselines as their papers or programs compute it, and the epsilon that they claim for it.

BLUR+LUS and the paper's form of FedDPA count T releases of a round's sum by the Renyi accountant (`opacus_accountant`).
"""

from __future__ import annotations

import math

from fedveil.accounting._numbers import at_least, open_probability, positive, probability


def record_steps(batch: int, examples: int, rounds: int, epochs: float, client_rate: float = 1.0) -> tuple[float, float]:
    """(sampling rate, steps) that DynamicPFL hands to its accountant: those of one DP-SGD run over all clients' records.

    q = batch / sum n_i * client_rate; steps = client_rate T E sum n_i / batch. Yet no record is clipped or noised by itself.

    Args:
        batch: examples a batch. examples: sum n_i, of all clients. rounds: T. epochs: E. client_rate: share of clients a round.

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
    """sigma^2 = 7 q^2 T (epsilon + 2 ln(1/delta)) / epsilon^2, which Fed-SMP states to be enough.

    Args:
        rate: q, share of clients a round, drawn without replacement.
    """
    room = positive("epsilon", epsilon) + 2 * math.log(1 / open_probability("delta", delta))
    return probability("rate", rate) * math.sqrt(7 * at_least("rounds", rounds, 1) * room) / epsilon


def fedsmp_epsilon(noise_multiplier: float, rounds: int, delta: float, rate: float) -> float:
    """The epsilon of which `fedsmp_noise_multiplier` is sigma: the positive root of epsilon^2 - a (epsilon + 2 ln(1/delta))."""
    a = 7 * probability("rate", rate) ** 2 * at_least("rounds", rounds, 0) / positive("noise_multiplier", noise_multiplier) ** 2
    return (a + math.sqrt(a * a + 8 * a * math.log(1 / open_probability("delta", delta)))) / 2
