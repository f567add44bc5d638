"""Privacy of the LAST global model alone: bounds by shifted interpolation that stop growing with the number of rounds.

The bounds hold only for the final view, since every client sees every iterate. In each round the model moves by a rho-Lipschitz
map, two adjacent data sets move one model at most gamma apart, Gaussian noise is added, and the model is projected on a ball of
diameter D. Choose a round t0 at which the two runs may be up to D apart (0 at t0 = 0: a common start) and shifts u_t >= 0 with

    d_t0 = D,   d_t+1 = rho_t d_t + gamma_t - u_t >= 0,   d_T = 0.

Then the last iterate is mu-GDP with mu^2 = sum (u_t / s_t)^2 (Bok, Su & Altschuler 2024, Theorem 3.1 and Lemma 3.2; the proof of
Noisy-FedAvg drops the constraint d >= 0). Proofs and the exact solution: docs/privacy.md, "The last iterate".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting._numbers import at_least, non_negative, numpy_defaults, positive, vector
from fedveil.accounting.types import Adjacency
from fedveil.errors import ConfigError

_Numbers = Sequence[float] | NDArray[np.float64]


def _refuse_contraction(smallest: float, hidden_iterates: bool, clipping_inactive: bool) -> None:
    if smallest < 1 and not (hidden_iterates and clipping_inactive):
        raise ConfigError(
            f"rho = {smallest} < 1 claims a contraction, which batch clipping destroys and visible iterates void: "
            "pass rho >= 1, or hidden_iterates=True and clipping_inactive=True if both really hold"
        )


def _exp(log: float) -> float:
    """Return e^log, or inf on overflow."""
    return math.exp(log) if log < 709.78 else math.inf


def _log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(values, out=np.full_like(values, -np.inf), where=values > 0)


def shift(
    rates: _Numbers, clip: float, clients: int, *, proximal: float = 0.0, adjacency: Adjacency = Adjacency.REPLACE_ONE
) -> float:
    """gamma of one round: (f V / m) sum_k eta_k prod_(j>k) |1 - eta_j alpha|, with f = 2 (replace-one) or 1 (zero-out).

    For alpha = 0 this is (f V / m) sum eta; for constant eta alpha <= 1 it is (f V / (m alpha)) (1 - (1 - eta alpha)^K).
    Beyond eta alpha = 1 the absolute values matter: a client may answer with a gradient of alternating sign.

    Args:
        rates: eta_0 .. eta_(K-1) of the round. clip: V. clients: m. proximal: alpha >= 0.

    Source: Noisy-FedAvg, Lemmas 7 and 9.
    """
    eta, alpha = vector("rates", rates), non_negative("proximal", proximal)
    kept = np.append(np.cumprod(np.abs(1 - eta[:0:-1] * alpha))[::-1], 1.0)
    return adjacency.factor * positive("clip", clip) / at_least("clients", clients, 1) * math.fsum(eta * kept)


def lipschitz(rates: _Numbers, smoothness: float, *, proximal: float = 0.0) -> float:
    """Lipschitz constant of one round's map under L-smooth losses: d_{k+1} <= (|1 - eta alpha| + eta L) d_k + eta alpha d_0.

    Clipping a gradient to a ball is a projection, so it does not increase L. For networks L is an assumption.

    Source: Noisy-FedAvg, Lemmas 8 and 10, without their approximations.
    """
    eta, smooth, alpha = vector("rates", rates), non_negative("smoothness", smoothness), non_negative("proximal", proximal)
    distance = 1.0
    for rate in eta:
        distance = (abs(1 - rate * alpha) + rate * smooth) * distance + rate * alpha
    return distance


@numpy_defaults
def final_mu(
    rhos: _Numbers,
    gammas: _Numbers,
    diameters: _Numbers,
    noise_stds: _Numbers,
    *,
    hidden_iterates: bool = False,
    clipping_inactive: bool = False,
) -> float:
    """Return the smallest mu that the projected last-iterate bound proves, exactly, for varying rounds.

    With a_t = prod_(j>t) rho_j and v_t = a_t u_t, the solution is the shortest path, in the metric v^2 / (a_t s_t)^2, below the
    points (X_t, Y_t), X_t = sum (a s)^2 and Y_t = a_(t0-1) d_t0 + sum a gamma, that ends in the last point: their greatest
    convex minorant. The slopes of a suffix are pooled once, from the last round backwards, in logarithms.

    Args:
        rhos: Lipschitz constant of each round's map, > 0; below 1 only if both conditions hold.
        gammas: largest distance between the images of one model under adjacent data, >= 0.
        diameters: diameter of the ball that holds the model at the START of each round, > 0 (inf: no projection); the first is
            unused (common start).
        noise_stds: std of the Gaussian noise on the model in each round (sigma / sqrt(m) for a mean of m), > 0.
        hidden_iterates, clipping_inactive: the two conditions for a contraction; see `contraction_mu`.

    Raises:
        ConfigError: lengths differ, a value out of range, or an unjustified contraction.
    """
    rho, gamma, std = (vector(name, v) for name, v in (("rhos", rhos), ("gammas", gammas), ("noise_stds", noise_stds)))
    size = vector("diameters", diameters, finite=False)
    if len({rho.size, gamma.size, size.size, std.size}) != 1:
        raise ConfigError(f"one value per round: got {rho.size}, {gamma.size}, {size.size} and {std.size}")
    if np.any(rho <= 0) or np.any(std <= 0):
        raise ConfigError("rhos and noise_stds must be > 0")
    _refuse_contraction(float(rho.min()), hidden_iterates, clipping_inactive)
    log_a = np.append(np.cumsum(np.log(rho)[:0:-1])[::-1], 0.0)
    widths, heights = 2 * (log_a + np.log(std)), log_a + _log(gamma)
    starts = log_a + np.log(rho) + _log(size)
    starts[0] = -np.inf
    return math.sqrt(_best_start(widths.tolist(), heights.tolist(), starts.tolist()))


def _add(x: float, y: float) -> float:
    top = max(x, y)
    return top if top == -math.inf else top + math.log1p(math.exp(-abs(x - y)) if x != y else 1.0)


def _best_start(widths: list[float], heights: list[float], starts: list[float]) -> float:
    """Return the minimum over t0 of the energy of the greatest convex minorant; all arguments are logarithms."""
    best = math.inf
    pooled: list[
        tuple[float, float, float]
    ] = []  # suffix segments, last pushed = first in time: (width, height, energy from here)

    def push(width: float, height: float, stack_top: int) -> tuple[float, float, int]:
        while stack_top > 0 and height - width > pooled[stack_top - 1][1] - pooled[stack_top - 1][0]:
            other = pooled[stack_top - 1]
            width, height = _add(width, other[0]), _add(height, other[1])
            stack_top -= 1
        return width, height, stack_top

    def cost_of(width: float, height: float, stack_top: int) -> float:
        later = pooled[stack_top - 1][2] if stack_top else 0.0
        return later + (_exp(2 * height - width) if height > -math.inf else 0.0)

    for t0 in range(len(widths) - 1, -1, -1):
        width, height, top = push(widths[t0], _add(heights[t0], starts[t0]), len(pooled))
        best = min(best, cost_of(width, height, top))
        width, height, top = push(widths[t0], heights[t0], len(pooled))
        cost = cost_of(width, height, top)
        del pooled[top:]
        pooled.append((width, height, cost))
    return best


@numpy_defaults
def final_mu_constant(
    rho: float,
    gamma: float,
    rounds: int,
    diameter: float,
    noise_std: float,
    *,
    hidden_iterates: bool = False,
    clipping_inactive: bool = False,
) -> float:
    """Return `final_mu` for constant rounds, in closed form for each start and vectorised over the starts.

    Starting n rounds before the end costs Y^2 / X with Y = rho^n D + gamma S1, X = S2, S_k = sum_(j<n) rho^(kj), when the last
    shift Y / X >= gamma (always for rho <= 1); other n are never best. From the common start: T gamma^2 for rho >= 1.

    Args:
        rho: Lipschitz constant of the round map, > 0; below 1 only if both conditions hold.
        gamma: data sensitivity of a round, >= 0.
        rounds: T >= 0.
        diameter: of the projection ball, > 0 (inf: no projection).
        noise_std: std of the noise on the model in each round, > 0.
    """
    rho, gamma, noise_std = positive("rho", rho), non_negative("gamma", gamma), positive("noise_std", noise_std)
    rounds = at_least("rounds", rounds, 0)
    _refuse_contraction(rho, hidden_iterates, clipping_inactive)
    diameter, log_rho = _size(diameter), math.log(rho)
    if rounds == 0 or gamma == 0:
        return 0.0
    common = (gamma * gamma) * (rounds if rho >= 1 else _exp(2 * _log_sum(log_rho, rounds) - _log_sum(2 * log_rho, rounds)))
    best = common
    if math.isfinite(diameter) and rounds > 1:
        n = np.arange(1, rounds, dtype=np.float64)
        log_y = np.logaddexp(n * log_rho + math.log(diameter), math.log(gamma) + _log_sums(log_rho, n))
        log_x = _log_sums(2 * log_rho, n)
        feasible = log_y - log_x >= math.log(gamma) - 1e-12
        with np.errstate(over="ignore"):
            costs = np.where(feasible | (rho <= 1), np.exp(2 * log_y - log_x), np.inf)
        best = min(common, float(costs.min()))
    return math.sqrt(best) / noise_std


def _size(diameter: float) -> float:
    if not diameter > 0:
        raise ConfigError(f"diameter must be > 0 (inf for no projection), got {diameter}")
    return float(diameter)


def _log_sums(log_rho: float, n: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ln sum_(j<n) rho^j from ln rho, since rho^2 may overflow or underflow."""
    if log_rho == 0:
        return np.asarray(np.log(n), dtype=np.float64)
    rate = abs(log_rho)
    sums = np.log(-np.expm1(-n * rate)) - math.log(-math.expm1(-rate)) + ((n - 1) * rate if log_rho > 0 else 0.0)
    return np.asarray(sums, dtype=np.float64)


def _log_sum(log_rho: float, n: int) -> float:
    return float(_log_sums(log_rho, np.array([float(n)]))[0])


def continuous_optimum(rho: float, gamma: float, diameter: float) -> float:
    """Return H = (rho + 1) D (2 gamma + (rho - 1) D), the smallest Y^2 / X over real n for rho >= 1; mu >= sqrt(H) / noise_std.

    It beats composition only for T > H / gamma^2. With r = rho^n, A = D + B and B = gamma / (rho - 1), the cost is
    (rho^2 - 1) (A r - B)^2 / (r^2 - 1), smallest at r = A / B = 1 + (rho - 1) D / gamma.
    """
    rho, gamma, diameter = positive("rho", rho), non_negative("gamma", gamma), positive("diameter", diameter)
    if rho < 1:
        raise ConfigError(f"the continuous optimum is for rho >= 1, got {rho}")
    return (rho + 1) * diameter * (2 * gamma + (rho - 1) * diameter)


def contraction_mu(
    rho: float, gamma: float, rounds: int, noise_std: float, *, hidden_iterates: bool, clipping_inactive: bool
) -> float:
    """Return mu of the last iterate if all round maps contract: gamma sqrt((1+rho)(1-rho^T) / ((1-rho)(1+rho^T))) / s.

    Args:
        rho: contraction factor in (0, 1).
        gamma, rounds, noise_std: as in `final_mu_constant`.
        hidden_iterates: only the holder of the last model saw any iterate (False is refused).
        clipping_inactive: gradients are never clipped, by construction and not by observation (False is refused): clipping a
            batch gradient to a ball destroys contraction even for quadratics.

    Source: Bok, Su & Altschuler 2024, Theorem 4.2 (strongly convex case).
    """
    if not 0 < rho < 1:
        raise ConfigError(f"a contraction has rho in (0, 1), got {rho}; use final_mu_constant for rho >= 1")
    return final_mu_constant(
        rho, gamma, rounds, math.inf, noise_std, hidden_iterates=hidden_iterates, clipping_inactive=clipping_inactive
    )
