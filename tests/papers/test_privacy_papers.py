"""The papers' claims: where each breaks, by exact value, simulation or search, and that what replaces it holds."""

from __future__ import annotations

import math
from collections.abc import Iterable

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid
from scipy.special import ndtr

from fedveil.accounting import last_iterate
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Adjacency, View
from fedveil.errors import ConfigError
from fedveil.papers.aldp_fl import claim as truncated
from fedveil.papers.convergent_dp import claim as noisy_fedavg
from fedveil.papers.convergent_dp.claim import StepRates
from fedveil.papers.fedanc import method as fedanc
from fedveil.papers.fedglp_adp import claim as fedglp
from fedveil.papers.ladp_fl import claim as ladp

ZERO = Adjacency.ZERO_OUT
settings_002 = {"learning_rate": 0.1, "clip": 10.0, "steps": 5, "smoothness": 1.0, "clients": 50, "noise_std": 1.0}


def shifts_002(schedule: StepRates, rounds: int, *, learning_rate: float = 0.1, steps: int = 5) -> list[float]:
    return [last_iterate.shift(row, 10.0, 50) for row in noisy_fedavg.learning_rates(schedule, learning_rate, steps, rounds)]


def harmonic(steps: int) -> float:
    return math.fsum(1 / k for k in range(1, steps + 1))


# --- Noisy-FedAvg -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [2, 3, 10, 600])
@pytest.mark.parametrize("schedule", [StepRates.CONSTANT, StepRates.CYCLIC])
def test_noisy_fedavg_theorem_3_a_and_b_are_refuted_by_linear_losses_from_two_rounds_on(schedule: StepRates, rounds: int) -> None:
    scale = harmonic(5) * 0.1 / math.log(6)  # c such that (b)'s 2 c V ln(K+1) / m is the true gamma
    claim = noisy_fedavg.FedAvgClaim(schedule, **settings_002, rounds=rounds, scale=scale).mu
    attained = noisy_fedavg.linear_loss_mu(shifts_002(schedule, rounds), 50, 1.0)
    assert claim < attained
    one = noisy_fedavg.FedAvgClaim(schedule, **settings_002, rounds=1, scale=scale).mu
    assert one == pytest.approx(noisy_fedavg.linear_loss_mu(shifts_002(schedule, 1), 50, 1.0))


def test_noisy_fedavg_theorem_4_is_refuted_by_linear_losses() -> None:
    claim = noisy_fedavg.claim_fedprox(clip=10, proximal=1, smoothness=0.5, rounds=600, clients=50, noise_std=1)
    rates = noisy_fedavg.learning_rates(StepRates.CONSTANT, 0.1, 50, 600)
    attained = noisy_fedavg.linear_loss_mu([last_iterate.shift(row, 10, 50, proximal=1) for row in rates], 50, 1)
    assert attained > 10 * claim
    with pytest.raises(ConfigError, match="alpha > L"):
        noisy_fedavg.claim_fedprox(clip=10, proximal=1, smoothness=2, rounds=1, clients=1, noise_std=1)


def test_noisy_fedavg_linear_loss_value_by_running_the_algorithm() -> None:
    """Noisy-FedAvg on losses V <+-e, w>: 4 clients, 3 steps, 16 rounds, one client replaced; distance of the last models."""
    rng, clients, steps, rounds, clip, rate, sigma, runs = np.random.default_rng(2), 4, 3, 16, 2.0, 0.1, 0.5, 100_000
    ends = []
    for sign in (1.0, -1.0):
        gradients = np.array([sign * clip, clip, clip, clip])
        w = np.zeros(runs)
        for _ in range(rounds):
            local = np.repeat(w[:, None], clients, axis=1)
            for _ in range(steps):
                local -= rate * np.clip(gradients, -clip, clip)
            w = (local + sigma * rng.standard_normal(local.shape)).mean(axis=1)
        ends.append(w)
    observed = (ends[1].mean() - ends[0].mean()) / ends[0].std()
    shifts = [last_iterate.shift([rate] * steps, clip, clients)] * rounds
    assert observed == pytest.approx(noisy_fedavg.linear_loss_mu(shifts, clients, sigma), abs=0.02)
    claim = noisy_fedavg.FedAvgClaim(
        StepRates.CONSTANT,
        learning_rate=rate,
        clip=clip,
        steps=steps,
        smoothness=1,
        rounds=rounds,
        clients=clients,
        noise_std=sigma,
    ).mu
    assert claim < observed - 1


@given(st.integers(1, 60), st.integers(1, 8), st.floats(0.01, 2))
def test_noisy_fedavg_theorem_3_c_and_d_are_composition_and_d_needs_its_z(rounds: int, steps: int, mu: float) -> None:
    arguments = {**settings_002, "learning_rate": mu, "steps": steps, "rounds": rounds}

    def true_mu(schedule: StepRates) -> float:
        shifts = shifts_002(schedule, rounds, learning_rate=mu, steps=steps)
        return noisy_fedavg.composition_mu(shifts, 50, 1.0, View.AGGREGATE)

    assert noisy_fedavg.FedAvgClaim(StepRates.STAGE_WISE, **arguments).mu >= true_mu(StepRates.STAGE_WISE) * (1 - 1e-12)
    z = mu * harmonic(steps)
    assert noisy_fedavg.FedAvgClaim(StepRates.ITERATIVE, **arguments, scale=z).mu >= true_mu(StepRates.ITERATIVE) * (1 - 1e-12)
    first = {**arguments, "rounds": 1}
    one = noisy_fedavg.composition_mu(shifts_002(StepRates.ITERATIVE, 1, learning_rate=mu, steps=steps), 50, 1, View.AGGREGATE)
    assert noisy_fedavg.FedAvgClaim(StepRates.ITERATIVE, **first, scale=0.99 * z).mu < one


def test_noisy_fedavg_smallest_scale_bounds_every_round() -> None:
    for steps in (1, 5, 40):
        z = harmonic(steps) / math.log(2)
        rates = noisy_fedavg.learning_rates(StepRates.ITERATIVE, 1, steps, 300)
        t = np.arange(300)
        slack = z * np.log((t + 2) / (t + 1)) - rates.sum(axis=1)
        assert slack[0] == pytest.approx(0, abs=1e-12)
        assert np.all(slack >= -1e-12)


@given(st.lists(st.floats(0.01, 1.5), min_size=1, max_size=6), st.floats(0, 3))
def test_noisy_fedavg_shift_is_the_worst_sequence_of_gradients(rates: list[float], alpha: float) -> None:
    """Over all sign patterns of one client's +-V gradients against the other's: the largest distance after the recursion."""
    worst = 0.0
    for pattern in range(2 ** len(rates)):
        d = 0.0
        for k, rate in enumerate(rates):
            d = (1 - rate * alpha) * d + rate * (2.0 if pattern >> k & 1 else -2.0)
        worst = max(worst, abs(d))
    assert last_iterate.shift(rates, 1.0, 1, proximal=alpha) == pytest.approx(worst, rel=1e-9)
    assert last_iterate.shift(rates, 1.0, 1, proximal=alpha, adjacency=ZERO) == pytest.approx(worst / 2, rel=1e-9)


def test_noisy_fedavg_lipschitz_constant_is_attained_by_a_concave_quadratic_and_equals_the_closed_form() -> None:
    rates, smooth = [0.1, 0.3, 0.2], 1.5
    assert last_iterate.lipschitz(rates, smooth) == pytest.approx(math.prod(1 + r * smooth for r in rates))
    alpha = 2.0
    a, b = 1.0, 0.0  # two starts; gradient of -L w^2 / 2 is -L w
    w, v = a, b
    for rate in rates:
        w, v = w - rate * (-smooth * w + alpha * (w - a)), v - rate * (-smooth * v + alpha * (v - b))
    assert last_iterate.lipschitz(rates, smooth, proximal=alpha) == pytest.approx(abs(w - v))
    assert last_iterate.lipschitz([0.1] * 400, 0.5, proximal=1.0) == pytest.approx(
        1 / 0.5, rel=1e-6
    )  # the paper's alpha / (alpha - L)


def test_noisy_fedavg_views() -> None:
    shifts = shifts_002(StepRates.CONSTANT, 9)
    assert noisy_fedavg.composition_mu(shifts, 50, 1, View.AGGREGATE) == pytest.approx(3 * 0.2 * math.sqrt(50))
    assert noisy_fedavg.composition_mu(shifts, 50, 1, View.SERVER) == pytest.approx(3 * 0.2 * 50)
    assert noisy_fedavg.composition_mu(shifts, 50, 1, View.FINAL) == noisy_fedavg.composition_mu(shifts, 50, 1, View.AGGREGATE)


# --- LaDP-FL ----------------------------------------------------------------------------------------------------------


def test_ladp_fl_printed_constant_misses_its_target_by_24_to_56_times_at_delta_1e_5_and_not_at_002() -> None:
    ratios = [ladp.delta_as_printed(e, 1e-5) / 1e-5 for e in (0.2, 0.5)]
    assert ratios == pytest.approx([24.0, 55.6], rel=0.02)
    assert ladp.delta_as_printed(1.04, 0.02) < 0.02 < ladp.delta_as_printed(1.05, 0.02)
    assert ladp.sufficient_up_to(1e-9) < 0.2


def test_ladp_fl_scale_leak_by_simulation_and_long_arithmetic() -> None:
    with mp.workdps(40):
        half, r2 = mp.mpf(50), mp.mpf("1.1") ** 2
        tau = 2 * (100 * mp.log(mp.mpf("1.1")) - 1) / (1 - 1 / r2)
        narrow = mp.gammainc(half, 0, tau / 2, regularized=True) - mp.e * mp.gammainc(half, 0, tau / r2 / 2, regularized=True)
        tau = 2 * (100 * mp.log(mp.mpf("1.1")) + 1) / (1 - 1 / r2)
        wide = mp.gammainc(half, tau / r2 / 2, regularized=True) - mp.e * mp.gammainc(half, tau / 2, regularized=True)
    assert ladp.scale_leak_delta(100, 1.1, 1.0) == pytest.approx(float(max(narrow, wide)), rel=1e-10)
    assert ladp.scale_leak_delta(100, 1 / 1.1, 1.0) == ladp.scale_leak_delta(100, 1.1, 1.0)
    assert ladp.scale_leak_delta(5, 1.0, 0.0) == 0
    squares = np.random.default_rng(3).chisquare(100, 400_000)
    loss = 0.5 * squares * (1.1**2 - 1) - 100 * math.log(1.1)  # x drawn from the wide one, ln of wide over narrow density
    assert np.maximum(-np.expm1(1 - loss), 0).mean() == pytest.approx(float(wide), rel=0.03)


def test_ladp_fl_accountant_and_sensitivity() -> None:
    assert ladp.claimed_total(0.5, 0.02, 400, 0.1) == (pytest.approx(20), pytest.approx(0.8))
    assert ladp.sensitivity_theorem2(0.1, 2, 20) == 8
    assert ladp.constant_as_printed(1, 0.5) == pytest.approx((1 + math.sqrt(3)) / 2)


# --- FedGLP-ADP and FedANC --------------------------------------------------------------------------------------------


def test_fedglp_adp_claim_is_the_minimum_over_orders_and_inverts() -> None:
    orders = 1 + np.geomspace(1e-4, 1e4, 400_001)
    for sigma, rounds, delta in ((0.3, 40, 0.1), (5, 20, 1e-5)):
        grid = float(np.min(rounds * orders / (2 * sigma**2) + math.log(1 / delta) / (orders - 1)))
        assert fedglp.claimed_epsilon(sigma, rounds, delta) == pytest.approx(grid, rel=1e-7)
        again = fedglp.claimed_noise_multiplier(fedglp.claimed_epsilon(sigma, rounds, delta), rounds, delta)
        assert again == pytest.approx(sigma, rel=1e-12)


def test_fedglp_adp_uploads() -> None:
    assert fedglp.upload_mu(4, 9, 4) == pytest.approx(math.sqrt(36) / 4)
    assert fedglp.upload_mu(4, 9, 4, Adjacency.REPLACE_ONE) == pytest.approx(2 * math.sqrt(36) / 4)


def test_fedanc_sparsity_changes_the_claim_but_not_the_cost() -> None:
    low, high = (fedanc.claimed_epsilon(b, g, d, 1e-5) for b, g, d in ((0.7, 0.1, 44426), (0.3, 0.9, 11_173_962)))
    assert low == pytest.approx(461.3, abs=0.1)
    assert high == pytest.approx(51213, abs=1)
    assert fedanc.release_mu(0.5, 9) == pytest.approx(12)
    assert epsilon_of(fedanc.release_mu(0.7), 1e-5) < low / 25


# --- ALDP-FL ----------------------------------------------------------------------------------------------------------


@given(st.floats(0.1, 3), st.floats(0.3, 2), st.floats(0.01, 3), st.floats(0, 3))
@settings(deadline=None)
def test_aldp_fl_one_dimensional_delta_by_integration(std: float, bound: float, shift: float, epsilon: float) -> None:
    x = np.linspace(-bound, bound + shift, 200_001)
    mass = 2 * float(ndtr(bound / std)) - 1
    scale = 1 / (mass * std * math.sqrt(2 * math.pi))
    q = np.where(np.abs(x) <= bound, np.exp(-(x**2) / (2 * std**2)), 0) * scale
    p = np.where(np.abs(x - shift) <= bound, np.exp(-((x - shift) ** 2) / (2 * std**2)), 0) * scale
    exact = float(trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), x))
    ours = truncated.delta_1d(std, bound, shift, epsilon)
    assert ours == pytest.approx(exact, abs=3e-4)
    floor = truncated.delta_floor(std, bound, shift)
    assert floor <= ours * (1 + 1e-9) + 1e-12
    assert truncated.delta_1d(std, bound, shift, 600) == pytest.approx(floor, rel=1e-9)


def test_aldp_fl_floor_is_what_no_epsilon_removes_and_the_claim_ignores() -> None:
    """One coordinate at the paper's epsilon = 4, delta = 1e-7, eta = 0.5, clip 1: the floor is thousands of times delta."""
    std, bound = truncated.claimed_std(4, 1e-7, 2.0), truncated.bound_of(4, 0.5)
    assert std == pytest.approx(2 * math.sqrt(2 * math.log(1.25e7)) / 4)
    assert bound == pytest.approx((math.exp(4) - 0.5) / (math.exp(4) + 0.5))
    assert truncated.delta_floor(std, bound, 0.01) > 1e4 * 1e-7
    with pytest.raises(ConfigError):
        truncated.bound_of(4, 1)


def floor_of(std: float, shifts: Iterable[float]) -> float:
    return 1 - math.prod(1 - truncated.delta_floor(std, 1.0, shift) for shift in shifts)


@given(st.floats(0.2, 2), st.floats(0.01, 1.9), st.integers(2, 6), st.integers(0, 2**31))
@settings(deadline=None, max_examples=40)
def test_aldp_fl_floor_sup_covers_random_directions_and_their_spread(std: float, norm: float, dimension: int, seed: int) -> None:
    sup = truncated.delta_floor_sup(std, 1.0, norm, dimension)
    rng = np.random.default_rng(seed)
    for power in (1, 3, 8):
        direction = np.abs(rng.standard_normal(dimension)) ** power
        shifts = norm * direction / np.linalg.norm(direction)
        assert floor_of(std, shifts) <= sup * (1 + 1e-9) + 1e-12
    equal = floor_of(std, [norm / math.sqrt(dimension)] * dimension)
    alone = truncated.delta_floor(std, 1.0, norm)
    assert max(equal, alone) <= sup * (1 + 1e-9) + 1e-12
    assert sup <= -math.expm1(1.3 * math.log1p(-min(max(equal, alone), 1 - 1e-15))) + 1e-3


@pytest.mark.parametrize("std", [1e-300, 1e-9, 1e-3, 0.05])
def test_aldp_fl_floor_of_hardly_any_noise(std: float) -> None:
    """One coordinate may be moved past the bound, so nothing is hidden: 1 to the last bit, not a logarithm of 0."""
    assert truncated.delta_floor_sup(std, 1.0, 1.5, 10) == 1.0
    assert truncated.delta_floor_sup(std, 1.0, 0.4, 2) == pytest.approx(0, abs=1e-20)  # out of reach of so little noise
