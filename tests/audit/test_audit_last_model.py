from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.accounting import gaussian
from fedveil.accounting.types import View
from fedveil.attacks.audit_run import audit_config
from fedveil.audit.adapter import Case
from fedveil.audit.training_audit import Runs, audit_last_model
from fedveil.audit.two_world import draw, midpoint, rates
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, parse
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.papers.convergent_dp.audit import LinearRun
from method_kit import Sums, update_of

DELTA = 1e-5


def theorem_3a(rounds: int, *, clients: int = 20, **method: Any) -> Config:
    """The setting of `LinearRun`, as a configuration."""
    return parse(
        {
            "data": {"partition": {"kind": "iid", "clients": clients}},
            "model": {"name": "linear"},
            "method": {"name": "noisy-fedavg", "variant": "published", "sigma": 0.5, "smoothness": 10.0, **method},
            "training": {"rounds": rounds, "batch_clip": 10.0, "local_steps": 5, "optimizer": {"lr": 0.01}, "sampling": "fixed"},
            "privacy": {"delta": DELTA, "view": "final", "adjacency": "replace_one"},
        }
    )


def proven(name: str, rounds: int = 4, *, sampling: str = "fixed", **privacy: Any) -> Config:
    noise = {} if name == "fedavg" else {"epsilon": 2.0}
    training = {"rounds": rounds, "clients_per_round": 4, "batch_clip": 1.0, "local_steps": 2, "sampling": sampling}
    return parse(
        {
            "data": {"partition": {"kind": "iid", "clients": 8}},
            "model": {"name": "linear"},
            "method": {"name": name},
            "training": training,
            "privacy": {"delta": 1e-3, "view": "final", **noise, **privacy},
        }
    )


def case(config: Config, dimension: int = 20) -> Case:
    return Case.of(*calibrated_setting(config), dimension=dimension)


def test_claim_and_worlds_are_those_of_the_linear_construction() -> None:
    run, runs = LinearRun(3), Runs.of(case(theorem_3a(3)))
    claim = runs.case.method.claim(runs.case.setting)
    assert claim is not None
    assert claim.epsilon == pytest.approx(gaussian.epsilon_of(run.claimed_mu, DELTA))
    score, rng = runs.score(), np.random.default_rng(1)
    low, high = draw(score, 0, 250, rng), draw(score, 1, 250, rng)
    spread = math.sqrt((low.var() + high.var()) / 2)
    assert (high.mean() - low.mean()) / spread == pytest.approx(run.true_mu, abs=0.3)


def test_the_pair_is_what_local_training_makes_of_a_linear_loss() -> None:
    one = case(theorem_3a(5))
    shift, s = Runs.of(one).pair[1], one.setting
    method, network = {"name": "noisy-fedavg", "sigma": 1e-9}, Sums(*s.layout.sizes)
    rows, zeros = (20.0 * shift / shift.norm()).repeat(16, 1), torch.zeros(16, dtype=torch.int64)
    update = update_of(method, network, rows, zeros, local_steps=5, batch_clip=10.0, optimizer={"lr": 0.01})
    assert torch.allclose(update, shift, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_theorem_3a_is_refuted_by_the_real_runs() -> None:
    statement = audit_config(theorem_3a(50), n=150)
    numbers = statement.view(View.FINAL)
    assert numbers.claimed is not None
    assert numbers.audited is not None
    assert numbers.claimed.epsilon < 4.1 < 8 < numbers.audited.epsilon <= numbers.proven.epsilon
    assert [(c.number, c.label) for c in statement.contradictions()] == [("claimed", "REFUTED")]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["fedavg", "dp-fedavg", "ladp-fl", "noisy-fedavg"])
def test_no_proven_number_is_exceeded(name: str) -> None:
    statement = audit_config(proven(name), n=40)
    numbers = statement.view(View.FINAL)
    assert numbers.audited is not None
    assert numbers.audited.epsilon <= numbers.proven.epsilon
    assert math.isinf(numbers.audited.epsilon) is (name == "fedavg")
    assert not [c for c in statement.contradictions() if c.number == "proven"]


def test_half_the_noise_is_refuted() -> None:
    method, setting = calibrated_setting(proven("dp-fedavg", rounds=3))
    found = [
        audit_last_model(
            Case.of(method, replace(setting, noise_multiplier=setting.z * f), dimension=20),
            np.random.default_rng(0),
            n=250,
            delta=1e-3,
        )
        for f in (0.5, 1.0)
    ]
    assert found[0].epsilon > 2.0 >= found[1].epsilon > 0.4
    assert "Gaussian DP" in found[1].test


@pytest.mark.slow
def test_a_projected_run_is_not_called_gaussian_and_tells_less() -> None:
    free, held = case(theorem_3a(16)), case(theorem_3a(16, variant="proven", project_to=0.1))
    assert Runs.of(free).gaussian
    assert not Runs.of(held).gaussian
    errors = []
    for one in (free, held):
        score, rng = Runs.of(one).score(), np.random.default_rng(0)
        cut = midpoint(draw(score, 0, 40, rng), draw(score, 1, 40, rng))
        counts = rates(draw(score, 0, 60, rng), draw(score, 1, 60, rng), cut)
        errors.append(counts.fp + counts.fn)
    assert errors[0] + 10 < errors[1]


def test_secret_sampling_is_sampled() -> None:
    runs = Runs.of(case(proven("dp-fedavg", rounds=2, sampling="poisson")))
    assert runs.case.rate == 0.5
    assert not runs.gaussian


def test_soundness_over_many_repeats() -> None:
    """400 audits of 200 + 200 runs, resampled from 1000 + 1000 real runs of one round."""
    config = proven("dp-fedavg", rounds=1)
    one = case(config, dimension=4)
    score, rng = Runs.of(one).score(), np.random.default_rng(0)
    pool = [draw(score, world, 1200, rng) for world in (0, 1)]
    cut = midpoint(pool[0][:200], pool[1][:200])
    mu = 1 / one.setting.z
    wrong = sum(rates(*(rng.choice(scores[200:], 200, replace=False) for scores in pool), cut).mu() > mu for _ in range(400))
    assert wrong <= 20


def test_other_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match="summed"):
        Runs.of(case(proven("dp-fedavg", view="server")))
