from __future__ import annotations

import math

import numpy as np
import pytest

from fedveil.accounting import gaussian
from fedveil.audit import worlds
from fedveil.audit.single_upload import audit_noise, largest_deviation, layer_noise, log_likelihood_ratio, releases, single_upload
from fedveil.audit.subject import Output, Subject, epsilon_ceiling, isotropic
from fedveil.errors import ConfigError

DELTA = 1e-5


def test_clean_gaussian_stays_below_its_epsilon_and_near_the_expected_figures() -> None:
    found = [single_upload(worlds.plain_gaussian(200), np.random.default_rng(seed)) for seed in range(12)]
    assert not any(result.structure.leak for result in found)
    counted, through_mu, recomputed = (np.array([result.tests[i].epsilon for result in found]) for i in range(3))
    assert np.all(counted < 2)
    assert np.all(through_mu < 2)
    assert counted.mean() == pytest.approx(0.49, abs=0.15)
    assert through_mu.mean() == pytest.approx(1.31, abs=0.2)
    assert recomputed.mean() == pytest.approx(1.99, abs=0.02)


@pytest.mark.parametrize(("factor", "refuted"), [(0.5, True), (0.7, True), (1.0, False), (1.5, False)])
def test_missing_noise_refutes_the_claim(factor: float, refuted: bool) -> None:
    result = single_upload(worlds.plain_gaussian(200, noise_factor=factor), np.random.default_rng(2), n=2000)
    assert (result.headline.epsilon > 2) is refuted
    assert result.headline.rigorous
    assert "Gaussian DP" in result.headline.test


@pytest.mark.parametrize(
    "subject",
    [worlds.ladp_below_threshold(), worlds.fedanc(), worlds.fedanc(masked=True), worlds.private_mask()],
    ids=lambda subject: subject.name,
)
def test_published_structural_faults_are_infinite_and_the_counts_reach_the_ceiling(subject: Subject) -> None:
    result = single_upload(subject, np.random.default_rng(0))
    assert math.isinf(result.headline.epsilon)
    assert result.headline.scope == worlds.CLIENT_UPLOAD
    assert result.tests[0].epsilon > 4.9
    assert "which alone show 5.6 at" in result.headline.note


def test_truncated_noise_exceeds_its_claim_without_a_structural_leak() -> None:
    subject = worlds.truncated_noise(epsilon=4.0, delta=1e-7)
    result = single_upload(subject, np.random.default_rng(0), delta=1e-7)
    assert not result.structure.leak
    assert result.headline.epsilon > 4.5
    assert "largest deviation" in result.headline.test


def test_truncated_noise_spread_over_all_coordinates_reaches_the_ceiling() -> None:
    result = single_upload(worlds.truncated_noise(spread=True), np.random.default_rng(0), delta=1e-7)
    assert result.headline.epsilon == pytest.approx(epsilon_ceiling(1000), abs=0.05)


def test_unreachable_mass_against_the_reference() -> None:
    bound = (math.exp(4) - 0.5) / (math.exp(4) + 0.5)
    sigma = gaussian.classical_noise_multiplier(4.0, 1e-7)
    assert worlds.unreachable_mass(np.array([1.0]), bound, sigma) == pytest.approx(0.51, abs=0.005)
    assert worlds.unreachable_mass(np.array([0.3]), 1.0, 0.3) == pytest.approx(0.009394329763965880, rel=1e-12)
    assert worlds.unreachable_mass(np.array([1.5]), 1.0, 2.0) == pytest.approx(0.7577693951757450, rel=1e-12)


def test_noise_scale_that_follows_raw_norms_is_found_by_the_likelihood_ratio() -> None:
    result = single_upload(worlds.raw_clip_weights(), np.random.default_rng(0))
    assert not result.structure.leak
    assert result.headline.epsilon == pytest.approx(epsilon_ceiling(1000), abs=0.05)


def test_mask_of_the_noisy_upload_adds_nothing() -> None:
    result = single_upload(worlds.noisy_mask(), np.random.default_rng(0))
    assert result.headline.epsilon < 2


def test_log_likelihood_ratio_by_hand() -> None:
    scope = worlds.CLIENT_UPLOAD
    equal = Subject("s", lambda world, rng: Output(np.zeros(2)), scope, (np.zeros(2), np.array([1.0, 0.0])), isotropic(2, 2.0))
    x = np.array([[3.0, 5.0]])
    assert log_likelihood_ratio(equal, x) == pytest.approx((3**2 - 2**2) / 8)
    std = np.array([1.0, 3.0]), np.array([2.0, 3.0])
    unequal = Subject("s", equal.mechanism, scope, equal.mean, std)
    assert log_likelihood_ratio(unequal, x) == pytest.approx(9 / 2 - 4 / 8 - math.log(2))
    assert largest_deviation(equal, x) == pytest.approx(5.0)


def test_released_vectors_come_from_the_asked_world() -> None:
    subject = worlds.plain_gaussian(50)
    drawn = [releases(subject, world, 400, np.random.default_rng(0)) for world in (0, 1)]
    gap = (drawn[1] - drawn[0]).mean(axis=0)
    assert np.allclose(gap, subject.mean[1] - subject.mean[0])


@pytest.mark.parametrize(("factor", "too_little", "too_much"), [(1.0, False, False), (0.9, True, False), (1.1, False, True)])
def test_recomputed_noise_per_layer(factor: float, too_little: bool, too_much: bool) -> None:
    subject = worlds.plain_gaussian(400)
    layered = Subject(
        "s", subject.mechanism, subject.scope, subject.mean, subject.noise_std, layers={"a": slice(0, 100), "b": slice(100, 400)}
    )
    std = subject.noise_std[0].copy()
    std[100:] *= factor
    uploads = subject.mean[0] + std * np.random.default_rng(5).standard_normal((50, 400))
    first, second = layer_noise(layered, uploads)
    assert min(first.p_low, first.p_high) > 1e-3
    assert (second.p_low < 1e-6) is too_little
    assert (second.p_high < 1e-6) is too_much
    assert second.measured == pytest.approx(factor * second.declared, rel=0.02)


def test_recomputed_epsilon_by_hand() -> None:
    subject = worlds.plain_gaussian(100, epsilon=2.0)
    exact = audit_noise(subject, releases(subject, 0, 4000, np.random.default_rng(0)), DELTA)
    half = audit_noise(
        subject, subject.mean[0] + 0.5 * (releases(subject, 0, 4000, np.random.default_rng(0)) - subject.mean[0]), DELTA
    )
    assert exact.epsilon == pytest.approx(2.0, abs=0.02)
    assert half.epsilon == pytest.approx(gaussian.epsilon_of(2 * gaussian.mu_of(2.0, DELTA), DELTA), abs=0.05)


def test_bad_subjects_are_refused() -> None:
    good = np.zeros(3), np.zeros(3)
    with pytest.raises(ConfigError, match="one length"):
        Subject("s", lambda world, rng: Output(np.zeros(3)), worlds.CLIENT_UPLOAD, good, (np.zeros(2), np.zeros(3)))
    with pytest.raises(ConfigError, match="finite"):
        Subject("s", lambda world, rng: Output(np.zeros(3)), worlds.CLIENT_UPLOAD, (np.zeros(3), np.full(3, np.nan)), good)
    wrong = Subject("s", lambda world, rng: Output(np.zeros(2)), worlds.CLIENT_UPLOAD, good, isotropic(3, 1.0))
    with pytest.raises(ConfigError, match="2 coordinates"):
        releases(wrong, 0, 1, np.random.default_rng(0))
