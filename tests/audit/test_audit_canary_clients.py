"""Client canaries in real runs: the estimate is near the truth, finds missing noise, and is refused where it says nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation_runs import DEFENCES
from fedveil.accounting.types import Unit, View
from fedveil.attacks.audit_run import audit_canaries, audit_config, audit_run
from fedveil.attacks.snapshot import uncharged
from fedveil.audit.canaries import Canaries, run_with_canaries
from fedveil.audit.subject import epsilon_of_mu
from fedveil.errors import ConfigError
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool
from fedveil.experiment.assembly import prepare
from fedveil.experiment.config import Config, parse
from fedveil.experiment.resolve import data_spec, opened
from fedveil.experiment.run import run
from fedveil.methods.method_registry import METHODS
from fedveil.training.local import Plain
from method_kit import planner

CLIENTS, ROUNDS = 60, 4


def federation_of(method: dict[str, Any], clients: int = CLIENTS, rounds: int = ROUNDS, **privacy: Any) -> Config:
    """All of the clients in each round; a network of 3,760 coordinates."""
    return parse(
        {
            "data": {"partition": {"kind": "iid", "clients": clients}},
            "model": {"name": "mlp", "hidden": [50]},
            "method": method,
            "training": {
                "rounds": rounds,
                "clients_per_round": clients,
                "sampling": "fixed",
                "local_steps": 2,
                "batch_clip": 1.0,
            },
            "privacy": {"delta": 1e-5, "view": "aggregate", "adjacency": "zero_out", **privacy},
        }
    )


DP_FEDAVG = {"name": "dp-fedavg", "clip": 0.3}


def test_a_canary_uploads_its_direction_and_others_their_own() -> None:
    marked = Canaries(Plain(), 7, 100.0)
    directions = [marked.direction(i, 1000) for i in range(3)]
    assert all(float(v.norm()) == pytest.approx(1.0) for v in directions)
    assert abs(float(directions[0] @ directions[1])) < 0.15
    assert marked.direction(2, 1000).equal(directions[2])


@pytest.mark.parametrize("noise_multiplier", [1.0, 2.0])
def test_the_estimate_is_near_the_truth(noise_multiplier: float) -> None:
    """Every client is a canary: the only known bias is their number in the norm, and the mean has a std of 1/sqrt(k)."""
    job = uncharged(*opened(federation_of(DP_FEDAVG, noise_multiplier=noise_multiplier)), 0)
    seen = run_with_canaries(job, Inline, CLIENTS, np.random.default_rng(3))
    mu, d = math.sqrt(ROUNDS) / noise_multiplier, seen.d
    expected = mu / math.sqrt(1 + mu**2 * CLIENTS / d)
    found = float(seen.final.mean()) * math.sqrt(d)
    assert abs(found - expected) < 3 / math.sqrt(CLIENTS)
    final, rounds = seen.audits(1e-5)
    assert (final.scope.view, rounds.scope.view) == (View.FINAL, View.AGGREGATE)
    assert not final.rigorous
    assert final.epsilon == pytest.approx(epsilon_of_mu(mu, 1e-5), rel=0.35)
    assert 0 < rounds.epsilon < 1.2 * epsilon_of_mu(mu, 1e-5)


def test_canaries_that_never_join_are_not_seen() -> None:
    job = uncharged(*opened(federation_of(DP_FEDAVG, noise_multiplier=1.0)), 0)
    seen = run_with_canaries(job, Inline, CLIENTS, np.random.default_rng(3))
    assert seen.unseen.size == 1000
    assert float(seen.rounds.mean()) > float(seen.unseen.mean()) + 5 * float(seen.unseen.std()) / math.sqrt(CLIENTS)


def test_missing_noise_is_doubted() -> None:
    """A door that adds a third of the noise it charges: the estimate lies above the proven epsilon."""
    config = federation_of(DP_FEDAVG, epsilon=3.0)
    honest = uncharged(*opened(config), 0)
    assert honest.setting.noise_multiplier is not None
    less = replace(honest.setting, noise_multiplier=honest.setting.noise_multiplier / 3)
    context = replace(honest.context, policy=planner(honest.method, less))
    final, _ = run_with_canaries(replace(honest, context=context), Inline, 30, np.random.default_rng(0)).audits(1e-5)
    assert final.epsilon > 6
    true, _ = run_with_canaries(honest, Inline, 30, np.random.default_rng(0)).audits(1e-5)
    assert true.epsilon < 4


def test_both_engines_see_the_same() -> None:
    job = uncharged(*opened(federation_of(DP_FEDAVG, noise_multiplier=1.0)), 0)
    one = run_with_canaries(job, Inline, 10, np.random.default_rng(3))
    job = uncharged(*opened(federation_of(DP_FEDAVG, noise_multiplier=1.0)), 0)
    two = run_with_canaries(job, lambda context: ProcessPool(context, 2), 10, np.random.default_rng(3))
    assert np.array_equal(one.final, two.final)
    assert np.array_equal(one.rounds, two.rounds)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", sorted(set(METHODS) - {"fedavg", "scaffold", "adap-dp-fl"} - DEFENCES))
def test_every_proven_method_carries_canaries(name: str) -> None:
    """Adap DP-FL is not among them: it protects records, by DP-SGD inside the clients."""
    own = {"separation": 1} if name == "banded-mf" else {}  # every client is in every round
    found = audit_canaries(*opened(federation_of({"name": name, **own}, 25, 2, epsilon=4.0)), 20)
    assert [audit.n for audit in found] == [20, 20]
    assert all(0 <= audit.epsilon < 8 for audit in found)


def test_the_command_writes_estimates_into_the_statement(tmp_path: Path) -> None:
    config = federation_of(DP_FEDAVG, epsilon=4.0)
    steps: list[tuple[int, int, str]] = []
    statement = audit_config(config, n=20, canaries=10, on_step=lambda *step: steps.append(step))
    assert [a.rigorous for v in statement.views for a in v.audits].count(False) == 2
    assert (4, 4, "10 canary clients, rounds") in steps
    run(config, tmp_path / "run")
    audit_run(tmp_path / "run", n=20, canaries=10)
    assert "client canaries" in (tmp_path / "run" / "audits.json").read_text()


def test_what_canaries_cannot_say_is_refused() -> None:
    with pytest.raises(ConfigError, match="from 2 to 60"):
        audit_canaries(*opened(federation_of(DP_FEDAVG, epsilon=4.0)), 61)
    with pytest.raises(ConfigError, match="fixes no clip before"):
        audit_canaries(*opened(federation_of({"name": "ladp-fl", "variant": "published"}, epsilon=4.0, view="server")), 10)
    with pytest.raises(ConfigError, match="fixes no clip before"):
        audit_canaries(*opened(federation_of({"name": "fedavg"})), 10)
    record = federation_of({"name": "dp-fedavg"}, epsilon=4.0, unit=Unit.RECORD.value, adjacency="replace_one")
    with pytest.raises(ConfigError, match="unit = 'client'"):
        audit_canaries(*opened(record), 10)


def test_a_run_on_data_that_were_handed_over_is_refused(tmp_path: Path) -> None:
    config = federation_of(DP_FEDAVG, epsilon=4.0)
    prepared = prepare(data_spec(config))
    run(config, tmp_path / "run", data=prepared.dataset, partition=prepared.partition)
    with pytest.raises(ConfigError, match="hand them over again in Python"):
        audit_run(tmp_path / "run", n=40, canaries=10)


def test_a_run_in_which_nothing_moves_is_refused() -> None:
    job = uncharged(*opened(federation_of(DP_FEDAVG, noise_multiplier=1.0)), 0)
    still = replace(job, setting=replace(job.setting, min_survivors=CLIENTS + 1))
    with pytest.raises(ConfigError, match="no round"):
        run_with_canaries(still, Inline, 10, np.random.default_rng(0))
