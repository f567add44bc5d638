from __future__ import annotations

import math

import numpy as np
import pytest

from fedveil.errors import ConfigError
from fedveil.papers.convergent_dp.audit import LinearRun, audit_linear_loss


@pytest.mark.parametrize(
    ("rounds", "claimed", "true"), [(1, 0.447, 0.447), (10, 0.917, 1.414), (50, 0.925, 3.162), (200, 0.925, 6.325)]
)
def test_claimed_and_true_mu(rounds: int, claimed: float, true: float) -> None:
    run = LinearRun(rounds)
    assert run.claimed_mu == pytest.approx(claimed, abs=6e-4)
    assert run.true_mu == pytest.approx(true, abs=6e-4)


@pytest.mark.parametrize("rounds", [1, 10])
def test_claim_against_the_printed_formula(rounds: int) -> None:
    run = LinearRun(rounds, clients=7, steps=3, clip=2.0, lr=0.05, noise_std=0.3, smoothness=4.0)
    rho = (1 + 0.05 * 4.0) ** 3
    factor = (rho + 1) / (rho - 1) * (rho**rounds - 1) / (rho**rounds + 1)
    assert run.claimed_mu == pytest.approx(2 * 0.05 * 2.0 * 3 / (math.sqrt(7) * 0.3) * math.sqrt(factor))


def test_one_round_agrees_with_the_claim() -> None:
    mu, _ = audit_linear_loss(LinearRun(1), np.random.default_rng(0))
    assert 0.3 < mu < 0.447


@pytest.mark.parametrize(("rounds", "least"), [(10, 1.2), (50, 2.9), (200, 5.3)])
def test_convergent_claim_is_refuted(rounds: int, least: float) -> None:
    run = LinearRun(rounds)
    mu, audit = audit_linear_loss(run, np.random.default_rng(0), n=5000 if rounds < 200 else 3000)
    assert run.claimed_mu < least < mu < run.true_mu
    assert audit.rigorous
    assert audit.scope.view == "final"


def test_simulation_has_the_stated_distribution() -> None:
    run = LinearRun(10, clients=4, steps=2, clip=3.0, lr=0.1, noise_std=0.7)
    low, high = (run.final_coordinate(world, 20_000, np.random.default_rng(world)) for world in (0, 1))
    std = 0.7 * math.sqrt(10 / 4)
    assert low.std() == pytest.approx(std, rel=0.02)
    assert (high.mean() - low.mean()) / std == pytest.approx(run.true_mu, abs=0.05)


def test_bad_runs_are_refused() -> None:
    with pytest.raises(ConfigError):
        LinearRun(0)
