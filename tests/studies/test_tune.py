"""Tuning on a public proxy: the federation is the same, the data are others, and what is chosen is written."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, configure
from fedveil.experiment.config_files import load_config
from fedveil.studies.cell import CellState
from fedveil.studies.tune import search
from fedveil.studies.tune.proxy_grid import TuningSpec, grid_of, proxy_sections
from fedveil.studies.tune.search import tune_on

GRID = {"method.clip": [0.01, 0.5], "training.optimizer.lr": [1e-6, 0.5]}


FILE = """
[data]
name = "mnist"
download = false
partition = { kind = "iid", clients = 8, examples_per_client = 60 }
[model]
name = "linear"
[method]
name = "dp-fedavg"
clip = 5.0
[training]
rounds = 2
[privacy]
epsilon = 500.0
delta = 1e-3
"""


def config(**sections: Any) -> Config:
    base: dict[str, Any] = {
        "data": {"name": "mnist", "partition": {"kind": "iid", "clients": 8, "examples_per_client": 60}},
        "model": {"name": "linear", "start": "zero"},
        "method": {"name": "dp-fedavg"},
        "training": {"rounds": 2, "clients_per_round": 8},
        "privacy": {"epsilon": 500.0, "delta": 1e-3},
    }
    return configure(**{name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections})


def test_the_proxy_is_partitioned_alike_and_the_choice_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def grid(cells: Any, *_: Any) -> list[CellState]:
        for cell in cells:
            assert cell.config.data.name == "digits"
            assert cell.config.data.partition == {"kind": "iid", "clients": 8, "examples_per_client": 60}
            assert cell.config.run.seeded_noise
            assert cell.config.privacy.epsilon == 500.0
        scores = {(0.5, 0.5): 0.9}
        return [
            CellState(c, tmp_path, "done", score=scores.get((c.config.method.clip, c.config.training.optimizer.lr), 0.1))
            for c in cells
        ]

    monkeypatch.setattr(search, "run_grid", grid)
    tuned = tune_on(TuningSpec(config(), "digits", GRID, seeds=2), tmp_path)
    assert len(tuned.trials) == 4
    assert tuned.trials[0].setting == {"method.clip": 0.5, "training.optimizer.lr": 0.5}
    assert tuned.trials[0].scores == (0.9, 0.9)
    written = load_config(tmp_path / "tuned.toml")
    assert written.data == config().data
    assert written.privacy == config().privacy
    assert (written.method.clip, written.training.optimizer.lr) == (0.5, 0.5)  # type: ignore[attr-defined]
    assert json.loads((tmp_path / "tuning.json").read_text())["runs"] == 8


def test_a_failed_setting_is_last_and_never_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def grid(cells: Any, *_: Any) -> list[CellState]:
        return [CellState(c, tmp_path, "failed", score=1.0, error="broken") for c in cells[:1]] + [
            CellState(c, tmp_path, "done", score=0.2) for c in cells[1:]
        ]

    monkeypatch.setattr(search, "run_grid", grid)
    tuned = tune_on(TuningSpec(config(), "digits", {"method.clip": [0.1, 0.2]}), tmp_path)
    assert [t.error for t in tuned.trials] == ["", "broken"]
    assert tuned.config.method.clip == 0.2  # type: ignore[attr-defined]


def test_a_search_by_the_program_finds_the_rate_that_learns_without_the_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The data to be protected cannot be had here: a run that loaded them would fail."""
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "c.toml"
    file.write_text(FILE)
    arguments = ["tune", str(file), "--on", "digits", "--try", "training.optimizer.lr=[1e-6, 0.5]", "--out", str(tmp_path / "o")]
    done = CliRunner().invoke(app, [*arguments, "--jobs", "1"])
    assert done.exit_code == 0, done.output
    assert "chosen: --set training.optimizer.lr=0.5" in done.output
    assert tomllib.loads((tmp_path / "o" / "tuned.toml").read_text())["training"]["optimizer"]["lr"] == 0.5


def test_public_data_that_are_the_proxy_whiten_nothing_there() -> None:
    features = {"data": {"features": "oriented-gradients"}, "public": {"data": ["shapes", "digits"]}}
    assert proxy_sections(config(**features), "digits")["public"]["data"] == ["shapes"]


@pytest.mark.parametrize(
    ("proxy", "grid", "message"),
    [
        ("mnist", GRID, "--on mnist: these are the data to be protected"),
        ("mnits", GRID, "did you mean 'mnist'"),
        ("digits", {}, "nothing to try"),
        ("digits", {"privacy.epsilon": [1.0, 8.0]}, "--try privacy.epsilon: guarantee, data and seeds stay"),
        ("digits", {"run.seed": [1, 2]}, "--try run.seed: guarantee, data and seeds stay"),
        ("digits", {"method.clip": []}, "--try method.clip: no values"),
    ],
)
def test_what_may_not_be_tuned_is_refused(proxy: str, grid: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TuningSpec(config(), proxy, grid)


def test_a_proxy_with_too_few_examples_is_refused() -> None:
    many = config(data={"partition": {"kind": "iid", "clients": 100, "examples_per_client": 60}})
    with pytest.raises(ConfigError, match="it has 1437 training examples, and 100 clients of 60 take 6000"):
        TuningSpec(many, "digits", GRID).cells()


def test_the_grid_is_read_as_toml() -> None:
    assert grid_of(["method.clip=[0.1, 1]", "training.server_optimizer.name=['sgd', 'adam']"]) == {
        "method.clip": [0.1, 1],
        "training.server_optimizer.name": ["sgd", "adam"],
    }
    for wrong in (["clip=[1]"], ["method.clip=1"], ["method.clip"], ["method.clip=[1]", "method.clip=[2]"]):
        with pytest.raises(ConfigError, match=r"write section\.key="):
            grid_of(wrong)
