"""Over 400 repeats on mechanisms of known epsilon, each rigorous bound exceeds the truth in at most alpha of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom

from fedveil.accounting import gaussian
from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.audit import worlds
from fedveil.audit.adapter import Case, release_subject
from fedveil.audit.canaries import Guesses, epsilon_bound, guess, mu_bound, simulate_gaussian, threshold_bound
from fedveil.audit.single_upload import _scores, audit_noise, releases, single_upload
from fedveil.audit.subject import Output, Subject
from fedveil.audit.two_world import Repeats, choose_threshold, curve_of, many_runs, midpoint, rates, tradeoff_of_profile
from fedveil.experiment.config import parse
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.papers.convergent_dp.audit import LinearRun, counts
from fedveil.papers.ladp_fl.claim import scale_leak_delta

REPEATS = 400
REPEATED = pytest.mark.parametrize("repeats", [100, pytest.param(REPEATS, marks=pytest.mark.slow)])
"""For what takes seconds in 400 repeats."""
ALPHA = 0.05
DELTA = 1e-5
SCOPE = Scope(Unit.CLIENT, Adjacency.REPLACE_ONE, View.SERVER)


def allowed(repeats: int = REPEATS) -> int:
    return int(ALPHA * repeats)


def allowed_at_exact_level(repeats: int = REPEATS) -> int:
    """For a bound that errs with probability alpha exactly, the count is binomial: its 99.9 % quantile."""
    return int(binom.ppf(0.999, repeats, ALPHA))


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_two_worlds_on_a_gaussian(epsilon: float) -> None:
    mu, rng = gaussian.mu_of(epsilon, DELTA), np.random.default_rng(0)
    wrong = {"counted": 0, "mu": 0, "curve": 0}
    grid = np.linspace(0, 12, 300)
    curve = tradeoff_of_profile(grid, [gaussian.delta_of(mu, e) for e in grid])
    for _ in range(REPEATS):
        pilots = rng.standard_normal(200), mu + rng.standard_normal(200)
        s0, s1 = rng.standard_normal(500), mu + rng.standard_normal(500)
        found = rates(s0, s1, choose_threshold(*pilots, 500, DELTA, ALPHA))
        wrong["counted"] += found.epsilon(DELTA, ALPHA) > epsilon
        middle = rates(s0, s1, midpoint(*pilots))
        wrong["mu"] += middle.mu(ALPHA) > mu
        wrong["curve"] += middle.refutes(curve, ALPHA)
    assert max(wrong.values()) <= allowed()


def test_two_worlds_where_the_bound_is_tight() -> None:
    """Randomised response at delta = 0: nothing is lost between rates and epsilon, so only the intervals protect the bound."""
    rate, rng = 1 / (1 + math.exp(-1.0)), np.random.default_rng(0)
    bounds = []
    for _ in range(REPEATS):
        s0, s1 = rng.random(2000) > rate, rng.random(2000) < rate
        bounds.append(rates(s0, s1, 0.5).epsilon(0.0, ALPHA))
    assert sum(bound > 1 for bound in bounds) <= allowed()
    assert np.mean(bounds) > 0.85


def test_threshold_tuned_on_the_tested_scores_would_not_be_sound() -> None:
    """Laplace noise, epsilon = 1: the rates of all high thresholds have the same ratio e, so picking the best picks luck."""
    rng, wrong = np.random.default_rng(0), {"tuned": 0, "fixed": 0}
    for _ in range(REPEATS):
        s0, s1, p0, p1 = rng.laplace(size=(4, 1000)) + np.array([[0], [1], [0], [1]])
        wrong["tuned"] += rates(s0, s1, choose_threshold(s0, s1, 1000, 0.0, ALPHA)).epsilon(0.0, ALPHA) > 1
        wrong["fixed"] += rates(s0, s1, choose_threshold(p0, p1, 1000, 0.0, ALPHA)).epsilon(0.0, ALPHA) > 1
    assert wrong["fixed"] <= allowed() < wrong["tuned"]


@REPEATED
def test_many_runs(repeats: int) -> None:
    mu = gaussian.mu_of(2.0, DELTA)

    def run(world: int, rng: np.random.Generator) -> float:
        return rng.standard_normal() + mu * world

    found = [many_runs(run, SCOPE, np.random.default_rng(s), Repeats(100, 50), gaussian=s % 2 == 0) for s in range(repeats)]
    assert sum(audit.epsilon > 2 for audit in found) <= allowed(repeats)


@REPEATED
def test_single_upload_of_a_clean_mechanism(repeats: int) -> None:
    subject = worlds.plain_gaussian(5, epsilon=2.0)
    found = [single_upload(subject, np.random.default_rng(seed), n=100, pilot=50) for seed in range(repeats)]
    assert not any(result.structure.leak for result in found)
    for test in range(3):
        assert sum(result.tests[test].epsilon > 2 for result in found) <= (
            allowed_at_exact_level(repeats) if test == 2 else allowed(repeats)
        )


@pytest.mark.parametrize("adjacency", [Adjacency.REPLACE_ONE, pytest.param(Adjacency.ZERO_OUT, marks=pytest.mark.slow)])
def test_one_release_at_the_real_door_under_secret_sampling(adjacency: Adjacency) -> None:
    """The noise is what epsilon = 1 of one sampled sum allows; a release that the client surely joins is found above it."""
    training = {"rounds": 1, "clients_per_round": 4, "sampling": "poisson", "batch_clip": 1.0, "local_steps": 1}
    privacy = {"epsilon": 1.0, "delta": 0.01, "view": "aggregate", "adjacency": adjacency.value}
    values = {"data": {"partition": {"kind": "iid", "clients": 20}}, "model": {"name": "linear"}}
    method, setting = calibrated_setting(
        parse({**values, "method": {"name": "dp-fedavg"}, "training": training, "privacy": privacy})
    )
    subject = release_subject(Case.of(method, setting, dimension=4), np.random.default_rng(0))
    assert subject.present is not None
    drawn = [_scores(subject, world, 1500, np.random.default_rng(world))[0] for world in (0, 1)]
    certain = [_scores(replace(subject, mechanism=subject.present), w, 300, np.random.default_rng(w))[0] for w in (0, 1)]
    event, rng, wrong = subject.sampled, np.random.default_rng(0), {"counted": 0, "curve": 0}
    assert event is not None
    curve = curve_of(event, 0.01, adjacency)
    assert rates(certain[0], certain[1], midpoint(*certain)).refutes(curve)
    for _ in range(REPEATS):
        s0, s1 = (rng.choice(scores, 600) for scores in drawn)
        counts = rates(s0[200:], s1[200:], choose_threshold(s0[:200], s1[:200], 400, 0.01, ALPHA))
        wrong["counted"] += counts.epsilon(0.01, ALPHA) > 1
        wrong["curve"] += counts.refutes(curve, ALPHA)
    assert max(wrong.values()) <= allowed()


def test_recomputed_noise_is_sound_at_its_exact_level() -> None:
    subject, rng = worlds.plain_gaussian(20, epsilon=2.0), np.random.default_rng(0)
    wrong = sum(audit_noise(subject, releases(subject, 0, 20, rng), DELTA).epsilon > 2 for _ in range(REPEATS))
    assert 5 <= wrong <= allowed_at_exact_level()


@REPEATED
def test_noise_scales_where_their_epsilon_is_known(repeats: int) -> None:
    """N(0, I) against N(0, 1.44 I) in 20 coordinates: only the scale tells the worlds apart, and its epsilon is exact."""
    std, zero = (np.ones(20), np.full(20, 1.2)), (np.zeros(20), np.zeros(20))
    subject = Subject("scale", lambda world, rng: Output(std[world] * rng.standard_normal(20)), SCOPE, zero, std)
    true = brentq(lambda e: scale_leak_delta(20, 1.2, e) - 0.01, 0.0, 20.0)
    found = [single_upload(subject, np.random.default_rng(s), n=200, pilot=100, delta=0.01).tests[0] for s in range(repeats)]
    assert sum(audit.epsilon > true for audit in found) <= allowed(repeats)
    assert np.mean([audit.epsilon for audit in found]) > 0.2 * true


@REPEATED
def test_truncated_noise_at_the_delta_where_its_epsilon_is_known(repeats: int) -> None:
    """sigma 0.3, support [-1, 1], shift 0.3: delta(1) = 0.1277836378609641 exactly, so epsilon at that delta is 1."""
    subject = worlds.truncated_gaussian(np.array([0.3]), 0.3, 1.0)
    known = 0.1277836378609641
    found = [single_upload(subject, np.random.default_rng(seed), n=200, pilot=100, delta=known) for seed in range(repeats)]
    for test in range(2):
        assert sum(result.tests[test].epsilon > 1 for result in found) <= allowed(repeats)
    assert np.mean([result.tests[0].epsilon for result in found]) > 0.2


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_one_run_where_the_bound_is_tight(epsilon: float) -> None:
    """Each coin leaves through randomised response: the number of right guesses is exactly the binomial of the null."""
    rng = np.random.default_rng(0)
    right = rng.binomial(200, 1 / (1 + math.exp(-epsilon)), size=REPEATS)
    bounds = [epsilon_bound(Guesses(200, 200, int(v)), 0.0, ALPHA) for v in right]
    assert (
        sum(bound > epsilon for bound in bounds) <= allowed() + 8
    )  # an exact level: Binomial(400, 0.05) exceeds 28 in 3 % of cases
    assert np.mean(bounds) > 0.6 * epsilon


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_one_run_on_a_gaussian(epsilon: float) -> None:
    mu, rng = gaussian.mu_of(epsilon, DELTA), np.random.default_rng(0)
    wrong = {"counted": 0, "mu": 0}
    for _ in range(REPEATS):
        scores, coins = simulate_gaussian(200, mu, rng)
        found = guess(scores, coins, 25, 25)
        wrong["counted"] += epsilon_bound(found, DELTA, ALPHA) > epsilon
        wrong["mu"] += mu_bound(found, ALPHA) > mu
    assert max(wrong.values()) <= allowed()


def test_client_canaries_in_runs_of_their_own() -> None:
    """Independent canaries at threshold fpr: cos = z / sqrt(z^2 + chi^2 / mu^2) with z ~ N(1, 1 / mu^2)."""
    mu, d, rng = 1.5, 500, np.random.default_rng(0)
    true = gaussian.epsilon_of(mu, DELTA)
    along = 1 + rng.standard_normal((REPEATS, 300)) / mu
    rest = rng.chisquare(d - 1, (REPEATS, 300)) / mu**2
    bounds = [threshold_bound(row, d, DELTA, independent=True).epsilon for row in along / np.sqrt(along**2 + rest)]
    assert sum(bound > true for bound in bounds) <= allowed()
    assert np.mean(bounds) > 2


def test_linear_losses() -> None:
    run = LinearRun(4, clients=2, steps=1)
    rng = np.random.default_rng(0)
    assert sum(counts(run, rng, n=300, pilot=50).mu(ALPHA) > run.true_mu for _ in range(REPEATS)) <= allowed()
