"""The last-iterate solver against exhaustive search, an optimiser and simulation; and against what it must not undercut."""

from __future__ import annotations

import itertools
import math
import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedveil.accounting import last_iterate as li
from fedveil.errors import ConfigError
from fedveil.papers.convergent_dp.claim import equality_coefficient, optimum_as_printed

HIDDEN = {"hidden_iterates": True, "clipping_inactive": True}
Instance = tuple[list[float], list[float], list[float], list[float]]


def random_instance(rng: random.Random, rounds: int) -> Instance:
    def draw(low: float, high: float) -> list[float]:
        return [rng.uniform(low, high) for _ in range(rounds)]

    return draw(0.6, 1.8), draw(0.0 if rng.random() < 0.2 else 0.05, 1.0), draw(0.1, 3.0), draw(0.3, 2.0)


def segment(instance: Instance, start: int, stop: int, distance: float) -> float | None:
    """Cheapest shifts from d = distance at `start` to d = 0 at `stop`, by Cauchy-Schwarz, or None if some d is negative."""
    rho, gamma, _, std = instance
    weight = [math.prod(rho[t + 1 : stop]) for t in range(start, stop)]
    need = math.prod(rho[start:stop]) * distance + sum(w * gamma[t] for w, t in zip(weight, range(start, stop), strict=True))
    scale = need / sum((w * std[t]) ** 2 for w, t in zip(weight, range(start, stop), strict=True))
    d, cost = distance, 0.0
    for w, t in zip(weight, range(start, stop), strict=True):
        shift = scale * w * std[t] ** 2
        d = rho[t] * d + gamma[t] - shift
        if d < -1e-9:
            return None
        cost += (shift / std[t]) ** 2
    return cost


def exhaustive(instance: Instance) -> float:
    """Minimum over the start and over every set of rounds after which d = 0: exact, exponential in the number of rounds."""
    rounds, best = len(instance[0]), math.inf
    for start in range(rounds):
        for zeros in itertools.chain.from_iterable(
            itertools.combinations(range(start + 1, rounds), k) for k in range(rounds - start)
        ):
            cost, d, at = 0.0, instance[2][start] if start else 0.0, start
            for stop in (*zeros, rounds):
                part = segment(instance, at, stop, d)
                if part is None:
                    break
                cost, d, at = cost + part, 0.0, stop
            else:
                best = min(best, cost)
    return best


def test_solver_equals_exhaustive_search_on_300_random_instances() -> None:
    rng = random.Random(5)
    for _ in range(300):
        instance = random_instance(rng, rng.randint(1, 6))
        assert li.final_mu(*instance, **HIDDEN) ** 2 == pytest.approx(exhaustive(instance), rel=1e-9, abs=1e-12)


def path(instance: Instance, start: int, shifts: np.ndarray) -> np.ndarray:
    """d after each round from `start` on."""
    d, found = instance[2][start] if start else 0.0, []
    for shift, rho, gamma in zip(shifts, instance[0][start:], instance[1][start:], strict=True):
        d = rho * d + gamma - shift
        found.append(d)
    return np.array(found)


def test_solver_equals_a_general_optimiser() -> None:
    rng = random.Random(6)
    for _ in range(25):
        rounds = rng.randint(2, 6)
        rho, gamma, size, std = random_instance(rng, rounds)
        best = math.inf
        for start in range(rounds):
            distances = partial(path, (rho, gamma, size, std), start)
            weights = 1 / np.array(std[start:]) ** 2
            guess = np.zeros(rounds - start)
            guess[-1] = distances(guess)[-1]
            found = minimize(
                lambda u, weights=weights: float(weights @ u**2),
                guess,
                jac=lambda u, weights=weights: 2 * weights * u,
                method="SLSQP",
                constraints=[
                    {"type": "ineq", "fun": lambda u, f=distances: f(u)[:-1]},
                    {"type": "eq", "fun": lambda u, f=distances: f(u)[-1:]},
                ],
                options={"ftol": 1e-13, "maxiter": 500},
            )
            best = min(best, float(found.fun))
        assert li.final_mu(rho, gamma, size, std, **HIDDEN) ** 2 == pytest.approx(best, rel=1e-5, abs=1e-9)


@settings(max_examples=60)
@given(st.floats(0.7, 1.4), st.floats(0.01, 2), st.integers(1, 25), st.floats(0.05, 10), st.floats(0.2, 3))
def test_closed_form_equals_the_general_solver(rho: float, gamma: float, rounds: int, diameter: float, std: float) -> None:
    general = li.final_mu([rho] * rounds, [gamma] * rounds, [diameter] * rounds, [std] * rounds, **HIDDEN)
    assert li.final_mu_constant(rho, gamma, rounds, diameter, std, **HIDDEN) == pytest.approx(general, rel=1e-9)


@given(st.floats(1, 1.3), st.floats(0.01, 1), st.integers(1, 2000), st.floats(0.1, 10))
def test_bound_is_composition_at_first_and_then_stays_above_the_continuous_optimum(
    rho: float, gamma: float, rounds: int, diameter: float
) -> None:
    mu = li.final_mu_constant(rho, gamma, rounds, diameter, 1)
    limit = math.sqrt(li.continuous_optimum(rho, gamma, diameter))
    composition = math.sqrt(rounds) * gamma
    assert mu <= composition * (1 + 1e-12)
    assert mu >= min(composition, limit) * (1 - 1e-9)
    assert li.final_mu_constant(rho, gamma, rounds + 1, diameter, 1) >= mu * (1 - 1e-12)
    assert li.final_mu_constant(rho, gamma, rounds, diameter, 2) == pytest.approx(mu / 2)


def test_huge_expansion_and_a_million_rounds_do_not_overflow() -> None:
    assert li.final_mu_constant(50, 0.1, 10**6, 1, 1) <= math.sqrt(li.continuous_optimum(50, 0.1, 1)) * 1.02
    assert li.final_mu([50.0] * 2000, [0.1] * 2000, [1.0] * 2000, [1.0] * 2000) == pytest.approx(
        li.final_mu_constant(50, 0.1, 2000, 1, 1), rel=1e-9
    )


def test_linear_losses_are_never_undercut_while_the_printed_optimum_undercuts_them() -> None:
    """rho = 1.1, D so large that projection never acts: the last iterate of linear losses has mu = sqrt(T) gamma exactly."""
    for rounds in (2, 5, 50):
        assert li.final_mu_constant(1.1, 1, rounds, 1e9, 1) == pytest.approx(math.sqrt(rounds), rel=1e-12)
        assert math.sqrt(optimum_as_printed(1.1, rounds)) < math.sqrt(rounds)
        assert equality_coefficient(1.1, rounds) > 1


def test_contraction_by_simulation_of_the_hardest_case() -> None:
    """w <- rho w + shift + noise: with constant shift gamma the exact mu is gamma S1 / sqrt(S2); the bound must equal it."""
    rho, gamma, rounds = 0.8, 0.3, 12
    s1, s2 = sum(rho**j for j in range(rounds)), sum(rho ** (2 * j) for j in range(rounds))
    assert li.contraction_mu(rho, gamma, rounds, 1, **HIDDEN) == pytest.approx(gamma * s1 / math.sqrt(s2), rel=1e-12)
    rng = np.random.default_rng(1)
    w = np.zeros((2, 200_000))
    for _ in range(rounds):
        w = rho * w + np.array([[0.0], [gamma]]) + rng.standard_normal(w.shape)
    observed = (w[1].mean() - w[0].mean()) / w.std(axis=1).mean()
    assert observed == pytest.approx(gamma * s1 / math.sqrt(s2), abs=0.015)


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("unclipped", [True, False])
def test_contraction_is_refused_unless_both_conditions_hold(hidden: bool, unclipped: bool) -> None:
    conditions = {"hidden_iterates": hidden, "clipping_inactive": unclipped}
    if hidden and unclipped:
        assert li.contraction_mu(0.5, 1, 3, 1, **conditions) > 0
        return
    for call in (
        lambda: li.contraction_mu(0.5, 1, 3, 1, **conditions),
        lambda: li.final_mu_constant(0.5, 1, 3, 1, 1, **conditions),
        lambda: li.final_mu([1, 0.5], [1, 1], [1, 1], [1, 1], **conditions),
    ):
        with pytest.raises(ConfigError, match="contraction"):
            call()


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="one value per round"):
        li.final_mu([1], [1, 2], [1], [1])
    with pytest.raises(ConfigError):
        li.final_mu([1], [1], [1], [0])
    with pytest.raises(ConfigError):
        li.final_mu_constant(1, 1, 3, 0, 1)
    with pytest.raises(ConfigError):
        li.continuous_optimum(0.9, 1, 1)
    with pytest.raises(ConfigError):
        li.contraction_mu(1.2, 1, 3, 1, **HIDDEN)


@pytest.mark.parametrize("rho", [1.0, 1.5])
@pytest.mark.parametrize("diameter", [1e154, 1e155, 1e200, 1e308, math.inf])
def test_a_ball_without_end_leaves_composition(rho: float, diameter: float) -> None:
    composed = 0.1 * math.sqrt(5)
    assert li.final_mu([rho] * 5, [0.1] * 5, [diameter] * 5, [1.0] * 5) == pytest.approx(composed)
    assert li.final_mu_constant(rho, 0.1, 5, diameter, 1.0) == pytest.approx(composed)


def test_a_sensitivity_that_floats_cannot_square_proves_nothing() -> None:
    assert li.final_mu([1.0] * 3, [1e160] * 3, [1.0] * 3, [1.0] * 3) == math.inf
    assert li.final_mu_constant(1.0, 1e160, 3, 1.0, 1.0) == math.inf
    assert li.final_mu_constant(1e300, 1e308, 3, 1e155, 1.0) == math.inf
    assert li.final_mu_constant(1e-200, 1.0, 3, 1.0, 1.0, **HIDDEN) == pytest.approx(1.0)
