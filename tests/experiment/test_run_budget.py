"""A run whose budget is spent ends cleanly: last model, exit status, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from fedveil.accounting.types import Adjacency, Event, SampledGaussian
from fedveil.cli.app import app
from fedveil.experiment import shared_budget
from fedveil.ledger.budget import FixedPlan

CONFIG = """
data = { name = "digits", partition = { kind = "iid", clients = 10 } }
model = { name = "linear" }
method = { name = "dp-fedavg", clip = 0.5 }
training = { rounds = 5, clients_per_round = 5, sampling = "poisson" }
privacy = { epsilon = 6.0, delta = 1e-3 }
run = { seed = 4, seeded_noise = true, engine = "inline" }
"""


def test_a_spent_budget_ends_the_run_with_its_last_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def two_releases(planned: Any, epsilon: float | None, delta: float, adjacency: Adjacency) -> FixedPlan:
        event: Event = planned[0]
        assert isinstance(event, SampledGaussian)
        return FixedPlan(SampledGaussian(event.rate, event.noise_multiplier * (1 - 1e-6)), 2)

    monkeypatch.setattr(shared_budget, "filter_for", two_releases)
    config, out = tmp_path / "c.toml", tmp_path / "run"
    config.write_text(CONFIG)
    done = CliRunner().invoke(app, ["run", str(config), "--out", str(out)])
    assert done.exit_code == 3
    assert "budget is spent" in done.output
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rounds"] == 2
    assert "budget" in summary["ended"] or "exceed" in summary["ended"] or "left" in summary["ended"]
    assert load_file(out / "model.safetensors")


def test_clients_that_may_take_part_three_times_fill_all_rounds(tmp_path: Path) -> None:
    """Eight rounds of 3 of 8 clients are 24 uploads, three of each client: the budget of none of them ends the run."""
    config, out = tmp_path / "c.toml", tmp_path / "run"
    text = CONFIG.replace("clients = 10", "clients = 8").replace(
        'rounds = 5, clients_per_round = 5, sampling = "poisson"', "rounds = 8, clients_per_round = 3"
    )
    config.write_text(text.replace("delta = 1e-3", 'delta = 1e-3, view = "server", max_participations = 3'))
    done = CliRunner().invoke(app, ["run", str(config), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads((out / "summary.json").read_text())["rounds"] == 8
