"""A run in which nothing was learned says so: everybody failed, or the score is that of a trivial answer."""

from __future__ import annotations

import csv
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedveil as fv
from fedveil.cli.app import app
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.ledger.ledger import Ledger
from fedveil.report.report import write_report

CLIENTS, ROUNDS = 6, 3
SIZES = {"clients": CLIENTS, "train_examples": 180}


def prices(path: Path, scale: float) -> Path:
    """Prices by size, of six clients and one for the test; where `scale` is large, training at a usual rate diverges."""
    draw = np.random.default_rng(0)
    size = draw.normal(0, 1, 210) * scale
    rows = [f"k{i % (CLIENTS + 1)},{s:.3f},{8 * s + draw.normal() * scale:.3f}\n" for i, s in enumerate(size)]
    path.write_text("c,size,price\n" + "".join(rows))
    return path


def config(file: Path, **sections: Any) -> Config:
    chosen: dict[str, Any] = {
        "data": {"source": {"file": str(file), "target": "price", "client": "c", "features": ["size"], **SIZES}},
        "model": {"name": "linear"},
        "task": {"name": "regression"},
        "method": {"name": "dp-fedavg", "clip": 0.5},
        "training": {"rounds": ROUNDS},
        "privacy": {"epsilon": 8.0, "delta": 1e-2},
        "run": {"engine": "inline", "seeded_noise": True},
    }
    return fv.configure(**{name: {**keys, **sections.get(name, {})} for name, keys in chosen.items()})


def failures(path: Path) -> list[dict[str, str]]:
    with (path / "private" / "failures.csv").open() as file:
        return list(csv.DictReader(file))


def releases(path: Path) -> int:
    with Ledger.open(path / "ledger.sqlite") as ledger:
        return len([*ledger.entries()])


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_a_run_ends_after_a_round_in_which_all_failed(view: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All 18 updates were discarded, every round was charged, and `fv.train` said nothing of it."""
    path = tmp_path / "run"
    result = fv.train(config(prices(tmp_path / "p.csv", 1e6), privacy={"view": view}), path)
    assert (len(result.history), len(failures(path))) == (1, CLIENTS)
    assert releases(path) == (CLIENTS if view == "server" else 1)
    assert result.ended.startswith("every client of a round failed, in round 0")
    first = failures(path)[0]["failure"]
    left_out = result.warnings[1]  # the first is that noise is seeded
    assert left_out == f"all {CLIENTS} client updates were left out; the first reason: {first}"
    assert left_out in repr(result)
    assert left_out in result._repr_html_()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert left_out in told[0]
    assert str(path) in told[0]
    page = write_report([path]).read_text()
    assert left_out in page
    assert result.ended in page
    assert fv.verification(path).outcome == "verified"
    public = (path / "summary.json").read_text()
    assert first not in public, "the reason is private"
    assert "max_update_norm" not in public
    with pytest.raises(ConfigError, match=r"every client of a round failed.*nothing was copied"):
        fv.publish(path, tmp_path / "shown")
    assert not (tmp_path / "shown").exists()


def test_the_terminal_says_so(tmp_path: Path) -> None:
    prices(tmp_path / "p.csv", 1e6)
    text = (
        f'[data.source]\nfile = "p.csv"\ntarget = "price"\nclient = "c"\nfeatures = ["size"]\nclients = {CLIENTS}\n'
        "train_examples = 180\n"
        '[model]\nname = "linear"\n[task]\nname = "regression"\n[method]\nname = "dp-fedavg"\n[training]\nrounds = 3\n'
        '[privacy]\nepsilon = 8.0\ndelta = 1e-2\n[run]\nengine = "inline"\n'
    )
    (tmp_path / "c.toml").write_text(text)
    done = CliRunner().invoke(app, ["run", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run"), "--quiet"])
    assert done.exit_code == 3
    assert "Ended early: every client of a round failed" in done.output
    assert f"all {CLIENTS} client updates were left out; the first reason: the update has norm" in " ".join(done.output.split())
    assert "budget is spent" not in done.output


def test_a_single_client_that_fails_ends_nothing(tmp_path: Path) -> None:
    file = prices(tmp_path / "p.csv", 1.0)
    rows = file.read_text().splitlines()
    file.write_text("\n".join([rows[0], *(f"k1,{1e9:.1f},{1e9:.1f}" if row.startswith("k1,") else row for row in rows[1:])]))
    result = fv.train(config(file), tmp_path / "all")
    assert (len(result.history), result.ended) == (ROUNDS, "")
    assert len({row["client"] for row in failures(tmp_path / "all")}) == 1
    assert any(text.startswith(f"{ROUNDS} client updates were left out; the first reason: ") for text in result.warnings)
    alone = fv.train(config(file, training={"clients_per_round": 1, "sampling": "fixed", "rounds": 12}), tmp_path / "alone")
    assert (len(alone.history), alone.ended) == (12, "")


def test_rounds_of_one_client_end_where_all_failed_from_the_start(tmp_path: Path) -> None:
    cell = config(prices(tmp_path / "p.csv", 1e6), training={"clients_per_round": 1, "sampling": "fixed", "rounds": 12})
    result = fv.train(cell, tmp_path / "run")
    assert len(result.history) == 2
    assert result.ended.startswith("every client of a round failed, in round 1")


def test_a_run_that_learned_something_says_nothing(tmp_path: Path) -> None:
    file = prices(tmp_path / "p.csv", 1.0)
    good = config(file, training={"optimizer": {"lr": 0.1}}, method={"clip": 10.0}, privacy={"epsilon": 1000.0})
    result = fv.train(good, tmp_path / "run")
    assert result.warnings == result.privacy.warnings
    assert result.trivial is not None
    assert result.score < result.trivial.score
    recorded = json.loads((tmp_path / "run" / "summary.json").read_text())["trivial"]
    assert recorded == {"score": result.trivial.score, "answer": "always the mean of the test set"}
    alike = replace(result, trivial=replace(result.trivial, score=result.score))
    assert "is no better than that of always the mean" in alike.warnings[-1]


@fv.register_task
class Broken(fv.Task):
    """Its trivial score is none."""

    name: str = "broken-trivial"

    def losses(self, output: Any, target: Any) -> Any:
        return (output[:, 0] - target).square()

    def trivial(self, target: Any) -> Any:
        return {}


def test_a_trivial_score_of_ones_own_that_fails_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    broken = config(prices(tmp_path / "p.csv", 1.0), task={"name": "broken-trivial"})
    with pytest.raises(ConfigError, match=r"task.name = 'broken-trivial': `trivial` has to return a number or None"):
        fv.train(broken, tmp_path / "run")
    assert not (tmp_path / "run").exists()
