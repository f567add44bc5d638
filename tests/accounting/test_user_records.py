"""Users with several records: integrals, random users in the plane, a second library, Renyi divergences two ways."""

from __future__ import annotations

import itertools
import logging
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from fedveil.accounting import pld, secret_samples, subsampled
from fedveil.accounting.accountant import bound
from fedveil.accounting.types import Adjacency, SampledGaussian, UserRecordsGaussian
from fedveil.errors import ConfigError
from reference_costs import epsilon_pld

ZERO, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
logging.getLogger("absl").setLevel(logging.ERROR)


@given(st.integers(1, 12), st.floats(1e-3, 0.9), st.floats(0.4, 4), st.floats(0, 4))
@settings(max_examples=60, deadline=None)
@pytest.mark.heavy
def test_one_step_deltas_by_integration(records: int, rate: float, z: float, epsilon: float) -> None:
    x = np.linspace(-10 * z, records + 10 * z, 100_001)
    j = np.arange(records + 1)
    base, mixed = norm.pdf(x, 0, z), binom.pmf(j, records, rate) @ norm.pdf(x, j[:, None], z)
    step = x[1] - x[0]
    removed = np.maximum(mixed - math.exp(epsilon) * base, 0).sum() * step
    added = np.maximum(base - math.exp(epsilon) * mixed, 0).sum() * step
    assert secret_samples.one_step_delta(records, rate, z, epsilon) == pytest.approx((removed, added), rel=1e-4, abs=1e-8)


def test_one_record_is_the_sampled_gaussian() -> None:
    for epsilon in (0.0, 0.05, 0.5, 2.0):
        ours, known = secret_samples.one_step_delta(1, 0.1, 1.3, epsilon), subsampled.one_step_delta(0.1, 1.3, epsilon)
        assert ours == pytest.approx(known, rel=1e-9, abs=1e-15)
    for adjacency in (ZERO, REPLACE, None):
        one, sampled = (e(0.1, 1.3, 50) for e in (lambda *a: UserRecordsGaussian(1, *a), SampledGaussian))
        assert bound([one], 1e-5, adjacency=adjacency) == bound([sampled], 1e-5, adjacency=adjacency)


def test_no_user_in_the_plane_costs_more_than_one_whose_records_pull_together() -> None:
    rng, axis = np.random.default_rng(11), np.linspace(-8, 8, 321)
    x, y = np.meshgrid(axis, axis)
    cell = (axis[1] - axis[0]) ** 2

    def density(v: np.ndarray) -> np.ndarray:
        return np.exp(-((x - v[0]) ** 2 + (y - v[1]) ** 2) / 2) / (2 * math.pi)

    for records in (2, 2, 3, 3, 3, 4):
        rate, epsilon = rng.uniform(0.05, 0.6), rng.uniform(0, 1.5)
        vectors = rng.normal(size=(records, 2))
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1)
        mixed = np.zeros_like(x)
        for subset in itertools.product((0, 1), repeat=records):
            weight = rate ** sum(subset) * (1 - rate) ** (records - sum(subset))
            mixed += weight * density(np.array(subset) @ vectors)
        removed, added = secret_samples.one_step_delta(records, rate, 1, epsilon)
        base = density(np.zeros(2))
        assert np.maximum(mixed - math.exp(epsilon) * base, 0).sum() * cell <= removed + 1e-6
        assert np.maximum(base - math.exp(epsilon) * mixed, 0).sum() * cell <= added + 1e-6


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("records", "rate", "z", "rounds"),
    [(2, 0.01, 1.0, 1000), pytest.param(4, 0.01, 1.0, 1000, marks=pytest.mark.slow), (3, 0.1, 1.5, 60)],
)
@pytest.mark.heavy
def test_composition_agrees_with_a_second_library(records: int, rate: float, z: float, rounds: int) -> None:
    j = np.arange(records + 1)
    theirs = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        standard_deviation=z,
        sensitivities=j.tolist(),
        sampling_probs=binom.pmf(j, records, rate).tolist(),
        value_discretization_interval=1e-3,
    ).self_compose(rounds)
    ours = epsilon_pld(UserRecordsGaussian(records, rate, z, rounds), 1e-5, adjacency=ZERO)
    assert ours == pytest.approx(theirs.get_epsilon_for_delta(1e-5), rel=3e-4)


def test_loss_distributions_are_the_one_step_curves_from_above_in_both_directions() -> None:
    release = secret_samples.pairs_of(UserRecordsGaussian(3, 0.2, 1.1))
    for direction in (True, False):
        law = release.losses(0.01, release.highest(1e-13), direction, replace=False)
        for epsilon in (0.0, 0.1, 0.3, 1.0, 3.0):
            exact = secret_samples.one_step_delta(3, 0.2, 1.1, epsilon)[0 if direction else 1]
            assert exact * (1 - 1e-9) - 1e-12 <= pld.delta(law, epsilon) <= exact * 1.01 + 1e-9


def test_telling_how_many_records_are_in_the_sample_covers_replacement() -> None:
    """Records replaced by their opposites, noise std in units of 2C; 1 and 2 records by quadrature."""
    x = np.linspace(-12, 12, 100_001)
    for records in (1, 2, 5):
        rate, z = 0.2, 0.9
        weights = binom.pmf(np.arange(records + 1), records, rate)
        up, down = (weights @ norm.pdf(x, sign * np.arange(records + 1)[:, None] / 2, z) for sign in (1, -1))
        release = secret_samples.UserPairs(records, rate, z, 1)
        law = release.losses(0.01, release.highest(1e-13), None, replace=True)
        for epsilon in (0.0, 0.5, 1.5):
            real = np.maximum(up - math.exp(epsilon) * down, 0).sum() * (x[1] - x[0])
            found = weights @ [pld_delta(j / z, epsilon) for j in range(records + 1)]
            assert real <= pld.delta(law, epsilon)
            assert pld.delta(law, epsilon) == pytest.approx(found, rel=1e-3)


def pld_delta(mu: float, epsilon: float) -> float:
    if mu == 0:
        return 0.0
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize(("records", "rate", "z"), [(2, 0.1, 1.0), (3, 0.01, 0.8), (6, 0.3, 4.0)])
def test_renyi_divergences_by_integration_in_both_directions(records: int, rate: float, z: float) -> None:
    j, orders = np.arange(records + 1), np.array([2.0, 3.0, 5.0, 2.5])
    x = np.linspace(-14 * z, 6 * records + 14 * z, 400_001)
    log_base = norm.logpdf(x, 0, z)
    log_mixed = np.logaddexp.reduce(binom.logpmf(j, records, rate)[:, None] + norm.logpdf(x, j[:, None], z), axis=0)
    ours = secret_samples.user_rdp(records, rate, z, orders, adjacency=ZERO)
    for a, value in zip(orders, ours, strict=True):
        both = [math.log(np.exp(a * p + (1 - a) * q).sum() * (x[1] - x[0])) / (a - 1) for p, q in
                ((log_mixed, log_base), (log_base, log_mixed))]  # fmt: skip
        if a == round(a):
            assert value == pytest.approx(max(both), rel=1e-8)
        else:
            assert max(both) <= value <= ours[1]  # between integers: at most the next one's
    assert np.all(secret_samples.user_rdp(records, rate, z, orders) >= ours)
    assert np.all(secret_samples.user_rdp(records, rate, z, orders) <= orders * records**2 / (2 * z * z))


def test_a_present_user_would_be_charged_needlessly_much() -> None:
    """Present with probability 1 - (1-q)^2, then with both records: 24.2 where 3.98 is exact."""
    crude = subsampled.epsilon_pld(1 - 0.99**2, 0.5, 1000, 1e-5, adjacency=ZERO)
    assert crude == pytest.approx(24.2, abs=0.1)


@given(st.integers(1, 5), st.floats(0.01, 0.5), st.floats(0.7, 3), st.integers(1, 50))
@settings(max_examples=20, deadline=None)
@pytest.mark.heavy
def test_more_records_cost_more(records: int, rate: float, z: float, rounds: int) -> None:
    costs = [epsilon_pld(UserRecordsGaussian(k, rate, z, rounds), 1e-5, adjacency=ZERO) for k in (records, records + 1)]
    assert costs[0] <= costs[1] * 1.002 + 1e-4


def test_values_out_of_range_are_refused() -> None:
    for bad in ((0, 0.1, 1.0), (1001, 0.1, 1.0), (2, 1.1, 1.0), (2, 0.1, 0.0)):
        with pytest.raises(ConfigError):
            UserRecordsGaussian(*bad)
        with pytest.raises(ConfigError):
            secret_samples.one_step_delta(*bad, 1.0)
