"""LaDP-FL's theorem as printed and corrected, its accountant, and the formulas of the methods that it is compared with.

A layer gets noise sigma = c Delta / (epsilon P) with an estimate P clipped to B, so in units of Delta at least c / (epsilon B).
Constants are returned as c / B.

The formulas of NbAFL and AdapLDP are from papers and code. Those of Time-Varying DP and DPA-LDP are reconstructed from the
abstracts and LaDP-FL, since no source of their equations was found (docs/methods/time-varying-dp.md, docs/methods/dpa-ldp.md).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammainc, gammaincc

from fedveil.accounting._numbers import at_least, crossing, non_negative, open_probability, positive, probability
from fedveil.accounting.gaussian import classical_noise_multiplier, delta_of


def constant_as_printed(epsilon: float, delta: float) -> float:
    """Return c / B of Theorem 3 as printed, which is too small for small delta.

    (sqrt(s) + sqrt(s + 8 eps)) / 4 with s = ln(2 / (pi delta^2)) for delta <= sqrt(2 / (pi e^4)), else (1 + sqrt(1 + 2 eps)) / 2.

    Args:
        epsilon: > 0. delta: in (0, 1).

    Source: LaDP-FL, Theorem 3, equation (11).
    """
    epsilon, delta = positive("epsilon", epsilon), open_probability("delta", delta)
    if delta > math.sqrt(2 / (math.pi * math.e**4)):
        return (1 + math.sqrt(1 + 2 * epsilon)) / 2
    square = math.log(2 / (math.pi * delta**2))
    return (math.sqrt(square) + math.sqrt(square + 8 * epsilon)) / 4


def delta_as_printed(epsilon: float, delta: float) -> float:
    """Return the exact delta at epsilon of noise calibrated to (epsilon, delta) by Theorem 3 as printed, at P = B.

    Args:
        epsilon: > 0. delta: the target, in (0, 1).
    """
    return delta_of(epsilon / constant_as_printed(epsilon, delta), epsilon)


def sufficient_up_to(delta: float) -> float:
    """Return the epsilon up to which the printed constant gives (epsilon, delta), since other slack makes up for the factor.

    Args:
        delta: in (0, 1). The result is 0 if the constant never suffices and inf if it always does, for epsilon in [1e-6, 1e4].
    """

    def excess(log_epsilon: float) -> float:
        return math.log(max(delta_as_printed(math.exp(log_epsilon), delta), 1e-320) / delta)

    low, high = math.log(1e-6), math.log(1e4)
    if excess(low) > 0:
        return 0.0
    grid = np.linspace(low, high, 400)
    first = next((i for i in range(1, grid.size) if excess(float(grid[i])) > 0), None)
    if first is None:
        return math.inf
    return math.exp(crossing(excess, float(grid[first - 1]), float(grid[first])))


def claimed_total(epsilon: float, delta: float, rounds: int, rate: float) -> tuple[float, float]:
    """The paper's sequential accountant: (q T epsilon, q T delta); a claim, since its first-order amplification is not a theorem.

    Args:
        epsilon, delta: per round. rounds: T. rate: q = batch size / local data size, in [0, 1].

    Source: LaDP-FL, Section XIII, equations (17) to (19).
    """
    weight = probability("rate", rate) * at_least("rounds", rounds, 0)
    return weight * non_negative("epsilon", epsilon), weight * probability("delta", delta)


def sensitivity_theorem2(learning_rate: float, epochs: int, clip: float) -> float:
    """Return 2 eta E G_c, the sensitivity of Theorem 2, which counts epochs (pass steps for the correct value).

    Source: LaDP-FL, Theorem 2, equation (9).
    """
    return 2 * positive("learning_rate", learning_rate) * at_least("epochs", epochs, 1) * positive("clip", clip)


def scale_leak_delta(dimension: int, ratio: float, epsilon: float) -> float:
    """Return delta at epsilon of N(0, I) against N(0, ratio^2 I) in `dimension` coordinates: the leak of the noise scale ALONE.

    The likelihood ratio depends on ||x||^2, a chi-square variable, so both directions are exact; the larger is returned.

    Args:
        dimension: coordinates that share the scale, >= 1. ratio: of the two standard deviations, > 0. epsilon: >= 0.
    """
    dimension, ratio, epsilon = at_least("dimension", dimension, 1), positive("ratio", ratio), non_negative("epsilon", epsilon)
    ratio = max(ratio, 1 / ratio)
    if ratio == 1:
        return 0.0
    spread, excess = dimension * math.log(ratio), -math.expm1(-2 * math.log(ratio)) / 2
    inner, outer = (spread - epsilon) / excess, (spread + epsilon) / excess
    half = dimension / 2
    narrow = (
        float(gammainc(half, inner / 2)) - _weighted(epsilon, float(gammainc(half, inner / (2 * ratio**2)))) if inner > 0 else 0.0
    )
    wide = float(gammaincc(half, outer / (2 * ratio**2))) - _weighted(epsilon, float(gammaincc(half, outer / 2)))
    return max(narrow, wide, 0.0)


def _weighted(epsilon: float, probability: float) -> float:
    """Return e^epsilon times a probability, 0 if that underflows."""
    return math.exp(epsilon + math.log(probability)) if probability > 0 else 0.0


def nbafl_upload_std(epsilon: float, delta: float, clip: float, records: int, exposures: int) -> float:
    """Return c L (2 C / n_min) / epsilon, the noise std that NbAFL adds to the weights of an upload.

    Args:
        clip: C, bound on the norm of a client's weights. records: n_min, examples of the smallest client. exposures: L, uploads
            of a client that an eavesdropper sees.

    Source: Wei et al. 2020, Section III.
    """
    sensitivity = 2 * positive("clip", clip) / at_least("records", records, 1)
    return classical_noise_multiplier(epsilon, delta) * at_least("exposures", exposures, 1) * sensitivity


def nbafl_broadcast_std(one_upload: float, epsilon: float, exposures: int, rounds: int, clients: int, cohort: int) -> float:
    """Return the noise std that NbAFL adds to the global model if the noise of the uploads does not cover all rounds; else 0.

    2 c C sqrt(T^2 / b^2 - L^2 K) / (n_min K epsilon) with b = -(T / epsilon) ln(1 - N/K + (N/K) e^(-epsilon/T)), so b = 1 if
    all clients take part (K = N).

    Args:
        one_upload: c (2 C / n_min) / epsilon, the noise std for one exposed upload. rounds: T. clients: N. cohort: K of them.

    Source: Wei et al. 2020, Theorem 1 and its K-random form.
    """
    ratio = clients / at_least("cohort", cohort, 1)
    inside = 1 - ratio + ratio * math.exp(-epsilon / rounds)
    reach = -epsilon / math.log(inside) if inside > 0 else 0.0  # T / b, which is T if all clients take part
    return one_upload / cohort * math.sqrt(max(0.0, reach**2 - exposures**2 * cohort))


def zcdp_of(epsilon: float, delta: float) -> float:
    """Return the rho of zero-concentrated DP that gives (epsilon, delta): epsilon = rho + 2 sqrt(rho ln(1/delta)).

    Source: Bun and Steinke 2016, Proposition 1.3.
    """
    log = -math.log(open_probability("delta", delta))
    return (math.sqrt(log + positive("epsilon", epsilon)) - math.sqrt(log)) ** 2


def falling_first_std(epsilon: float, delta: float, sensitivity: float, decay: float, rounds: int, accountant: str) -> float:
    """Return sigma_1 such that T rounds with sigma_t = sigma_1 v^(t-1) cost epsilon in total.

    naive: sum_t c Delta / sigma_t = epsilon. zcdp: sum_t Delta^2 / (2 sigma_t^2) = rho.

    Args:
        decay: v in (0, 1]. accountant: `naive` or `zcdp`.
    """
    if accountant == "naive":
        return classical_noise_multiplier(epsilon, delta) * sensitivity * geometric_sum(1 / decay, rounds)
    return sensitivity * math.sqrt(geometric_sum(decay**-2, rounds) / (2 * zcdp_of(epsilon, delta)))


def allocated_std(epsilon: float, delta: float, sensitivity: float, contraction: float, rounds: int, round: int) -> float:
    """DPA-LDP's sigma_t, t from 0: sigma_t^2 = Delta^2 / (2 rho) (sum_s sqrt(a_s)) / sqrt(a_t), a_t = kappa^(T-1-t).

    The optimum of sum_t a_t sigma_t^2 under sum_t Delta^2 / (2 sigma_t^2) = rho (Lagrange).

    Args:
        contraction: kappa in (0, 1], by which one step shrinks an earlier error.
    """
    root = math.sqrt(contraction)
    total = geometric_sum(root, rounds)
    return sensitivity * math.sqrt(total / (2 * zcdp_of(epsilon, delta) * root ** (rounds - 1 - round)))


def geometric_sum(ratio: float, count: int) -> float:
    """Return 1 + r + ... + r^(count - 1)."""
    return float(count) if ratio == 1 else math.expm1(count * math.log(ratio)) / (ratio - 1)


def adapldp_scale(epsilon: float, delta: float, sensitivity: float, scaler: float, law: str) -> float:
    """AdapLDP's noise: the Laplace scale Delta / (epsilon c), or the Gaussian std Delta sqrt(2 ln(1.25 / (delta c))) / epsilon.

    Args:
        scaler: c_i > 0. law: `laplace` or `gaussian`. For c >= 1.25 / delta the code takes the root of a negative number;
            here the Gaussian std is at least Delta / epsilon.

    Source: Yue et al. 2025, by the authors' code.
    """
    if law == "laplace":
        return sensitivity / (positive("epsilon", epsilon) * positive("scaler", scaler))
    inside = 1.25 / (delta * positive("scaler", scaler))
    return sensitivity * math.sqrt(max(2 * math.log(inside), 1.0)) / positive("epsilon", epsilon)


def epsilon_of_noise(std: float, sensitivity: float, delta: float) -> float:
    """Return sqrt(2 ln(1.25 / delta)) Delta / sigma, the epsilon that LaDP-FL computes from the added noise; inf without noise.

    Source: LaDP-FL, Section XIII, equation (17), with the sensitivity that it leaves out.
    """
    return classical_noise_multiplier(1.0, delta) * sensitivity / std if non_negative("std", std) else math.inf
