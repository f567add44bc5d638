"""Searches on the private data: what is charged, what is left behind, what the statement says, and what is refused."""

from __future__ import annotations

import json
import random
import sqlite3
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedveil.accounting.selection import Selection
from fedveil.accounting.types import Adjacency, OneOrder, Scope, Unit, View
from fedveil.cli.app import app
from fedveil.errors import BudgetExhausted, ConfigError, FedveilError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, configure
from fedveil.experiment.experiment import Experiment
from fedveil.experiment.run import run
from fedveil.experiment.verification import verification
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.population_budget import create_budget
from fedveil.studies.cell import CellState, state_of
from fedveil.studies.tune import search as looked_at
from fedveil.studies.tune import search as module
from fedveil.studies.tune.search import BOOKED, WINNER, Chance, SearchSpec, look_at_all, private_search
from fedveil.verify import Finding

GRID = {"method.clip": [0.2, 0.5]}
SEARCH = Selection(3.0, 0.0)
SCOPE = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)


def config(**sections: Any) -> Config:
    base: dict[str, Any] = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 60}, "client_test_fraction": 0.25},
        "model": {"name": "linear", "start": "zero"},
        "method": {"name": "dp-fedavg"},
        "training": {"rounds": 2, "clients_per_round": 20},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "run": {"engine": "inline"},
    }
    return configure(**{name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections})


def spec(score_noise: float | None = 5.0, **sections: Any) -> SearchSpec:
    return SearchSpec(config(**sections), GRID, score_noise)


def chance(runs: int, seed: int = 1) -> Chance:
    """So many runs, by the inverse of the law."""
    edge = sum(SEARCH.law.probability_of(k) for k in range(1, runs)) if SEARCH.law else 0.0
    return Chance(lambda n: int((edge + 1e-6) * 2**n), random.Random(seed).randrange)


def wrong(path: Path) -> list[Finding]:
    return [f for f in verification(path).findings if f.kind in ("contradicted", "unknown")]


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def test_the_best_run_is_released_verifies_and_says_how_it_was_chosen(tmp_path: Path) -> None:
    path, statement = private_search(spec(), tmp_path / "out", SEARCH, chance(3))
    assert wrong(path) == []
    assert statement.proven.epsilon == pytest.approx(8.0, rel=1e-4)
    assert statement.notes[0].startswith(
        "chosen by private selection among a random number of runs, expected 3 (logarithmic law)"
    )
    written = tomllib.loads((path / "config.toml").read_text())
    assert written["privacy"]["selection"] == {"runs": 3.0, "shape": 0.0, "score_noise": 5.0}
    assert certify_config(configure(**written)).proven == statement.proven
    with Ledger.open(path / "ledger.sqlite") as ledger:
        *rounds, score = [entry for _, _, entry in ledger.entries()]
    assert [entry.round for entry in rounds] == [0, 1]
    assert (score.round, score.dimension, score.event.mu) == (2, 1, pytest.approx(1 / 5))  # type: ignore[union-attr]
    assert 0 <= json.loads((path / "summary.json").read_text())["selection_score"] <= 2


def test_nothing_that_is_left_depends_on_how_many_runs_there_were(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[int] = []
    real = module.train

    def counted(*args: Any, **more: Any) -> Any:
        began.append(1)
        print("a worker says something")
        return real(*args, **more)

    monkeypatch.setattr(module, "train", counted)
    left, texts = [], []
    for runs in (1, 4):
        began.clear()
        out = tmp_path / f"out-{runs}"
        path, _ = private_search(spec(training={"sampling": "fixed"}), out, SEARCH, chance(runs))
        assert len(began) == runs
        left.append(names(out))
        texts.append(capfd.readouterr())
        stamps = {p.stat().st_mtime for p in (out, *out.rglob("*"))}
        assert stamps == {(out / BOOKED).stat().st_mtime}
        assert "seconds" not in (path / "history.csv").read_text().splitlines()[0]
        assert "seconds" not in json.loads((path / "summary.json").read_text())
        with sqlite3.connect(path / "ledger.sqlite") as db:
            assert db.execute("SELECT count(*) FROM release WHERE time IS NOT NULL OR nonce IS NOT NULL").fetchone() == (0,)
            assert db.execute("SELECT value FROM meta WHERE key = 'created'").fetchone() == ("0.0",)  # not how many ran before
    assert left[0] == left[1]
    assert not any(name.startswith("private") for name in left[0])
    assert texts[0] == texts[1] == ("", "")


def budget(path: Path, epsilon: float) -> str:
    create_budget(path, epsilon, 1e-3, SCOPE, order=3.0)
    return str(path)


def test_the_whole_price_is_booked_before_the_first_run_and_a_killed_search_is_not_repeated_for_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = budget(tmp_path / "budget.sqlite", 40.0)

    def killed(*_: Any, **__: Any) -> Any:
        with Ledger.open(Path(ledger)) as booked:
            assert [type(entry.event) for _, _, entry in booked.entries()] == [OneOrder]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train", killed)
    search = spec(privacy={"budget": ledger})
    with pytest.raises(KeyboardInterrupt) as stop:
        private_search(search, tmp_path / "out", SEARCH)
    assert "rounds" not in "".join(stop.value.__notes__)
    assert names(tmp_path / "out") == [BOOKED]
    with pytest.raises(ConfigError, match="begun and charged"):
        private_search(search, tmp_path / "out", SEARCH)
    monkeypatch.undo()
    private_search(search, tmp_path / "again", SEARCH, chance(1))
    with Ledger.open(Path(ledger)) as booked:
        events = [entry.event for _, _, entry in booked.entries()]
    assert len(events) == 2
    assert events[0] == events[1]


def test_the_charge_is_the_whole_search_and_a_budget_without_room_refuses_it(tmp_path: Path) -> None:
    ledger = budget(tmp_path / "budget.sqlite", 7.0)
    with pytest.raises(BudgetExhausted):
        private_search(spec(privacy={"budget": ledger}), tmp_path / "out", SEARCH)
    assert not (tmp_path / "out" / BOOKED).exists()
    create_budget(tmp_path / "gdp.sqlite", 50.0, 1e-3, SCOPE)
    with pytest.raises(ConfigError, match="no price for a selection"):
        private_search(spec(privacy={"budget": str(tmp_path / "gdp.sqlite")}), tmp_path / "other", SEARCH)


def test_a_run_that_fails_is_a_secret_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise FedveilError("client 7 has no example of class 3")

    monkeypatch.setattr(module, "train", failing)
    with pytest.raises(FedveilError, match="no run of the search could be finished") as problem:
        private_search(spec(), tmp_path / "out", SEARCH, chance(2))
    assert "client 7" not in str(problem.value)
    assert problem.value.__cause__ is None
    assert names(tmp_path / "out") == [BOOKED]


def test_settings_are_drawn_afresh_and_the_best_score_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def scored(experiment: Experiment, prepared: Any, folder: Path, **_: Any) -> Any:
        tried.append(experiment.method.clip)  # type: ignore[attr-defined]
        result = run_real(experiment, prepared, folder)
        return type("R", (), {"selection_score": float(len(tried) == 2)})() if result else None

    run_real = module.train
    monkeypatch.setattr(module, "train", scored)
    picks = iter([1, 0, 0])
    path, _ = private_search(spec(), tmp_path / "out", SEARCH, Chance(chance(3).bits, lambda n: next(picks)))
    assert tried == [0.5, 0.2, 0.2]
    assert tomllib.loads((path / "config.toml").read_text())["method"]["clip"] == 0.2


def test_runs_that_were_looked_at_say_how_many_and_what_they_cost_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grid(cells: Any, out: Path, *_: Any) -> list[CellState]:
        for cell in cells:
            run(cell.config, out / "cells" / cell.name)
        return [state_of(cell, out) for cell in cells]

    monkeypatch.setattr(looked_at, "run_grid", grid)
    found = look_at_all(spec(), tmp_path / "out", jobs=1)
    assert found[0].score >= found[1].score
    for one in found:
        assert wrong(one.state.path) == []
        assert one.state.statement is not None
        assert one.state.statement.notes[0].startswith("2 runs were looked at, and this is one of them: one such run alone costs")
        assert one.state.statement.proven.epsilon > 9
        assert one.state.statement.target_epsilon is None
        assert " epsilon = 8" in one.state.statement.notes[0]


@pytest.mark.parametrize(
    ("sections", "grid", "score", "message"),
    [
        ({"data": {"client_test_fraction": 0.0}}, GRID, 5.0, "set data.client_test_fraction.*--by-test-set"),
        ({}, {"training.rounds": [1, 2]}, 5.0, "plan other releases"),
        ({}, {"privacy.delta": [1e-5]}, 5.0, "guarantee, data and seeds"),
        ({}, {}, 5.0, "nothing to try"),
        ({"run": {"seeded_noise": True}}, GRID, 5.0, "secret randomness"),
        ({"privacy": {"view": "server"}}, GRID, 5.0, "privacy.view = 'aggregate'"),
        (
            {"method": {"name": "adaptive-clipping"}},
            {"training.optimizer.lr": [0.1]},
            5.0,
            "noise is fixed before the run",
        ),
        ({"privacy": {"epsilon": None, "noise_multiplier": 1.0}}, GRID, 5.0, "privacy.epsilon is not set"),
        ({}, GRID, 0.01, "score_noise"),
    ],
)
def test_what_has_no_price_is_refused_before_anything_is_charged(
    sections: dict[str, Any], grid: dict[str, Any], score: float, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        private_search(SearchSpec(config(**sections), grid, score), tmp_path / "out", SEARCH)
    assert not (tmp_path / "out").exists()


def test_a_run_alone_cannot_pretend_that_it_was_chosen(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one run alone has not been chosen"):
        run(config(privacy={"selection": {"runs": 3, "shape": 0}}), tmp_path / "run")


@pytest.mark.parametrize("forged", [{"runs": 30.0}, {"shape": 2.0}, {"score_noise": 6.0}])
def test_an_epsilon_too_small_for_its_search_is_contradicted(forged: dict[str, float], tmp_path: Path) -> None:
    path, _ = private_search(spec(), tmp_path / "out", SEARCH, chance(1))
    for key, value in forged.items():
        text = (path / "config.toml").read_text()
        written = tomllib.loads(text)["privacy"]["selection"][key]
        (path / "config.toml").write_text(text.replace(f"{key} = {written}", f"{key} = {value}"))
    subjects = {f.subject for f in verification(path).findings if f.kind == "contradicted"}
    assert subjects - {"files", "statement made again"}


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[data]\nname = "digits"\npartition = { kind = "iid", clients = 60 }\n[model]\nname = "linear"\n'
        '[method]\nname = "dp-fedavg"\n[training]\nrounds = 1\nclients_per_round = 20\n'
        '[privacy]\nepsilon = 20.0\ndelta = 1e-3\n[run]\nengine = "inline"\n'
    )
    command = ["tune", str(file), "--try", "method.clip=[0.2, 0.5]", "--out", str(tmp_path / "out")]
    for flags, message in (([], "say where"), (["--private", "--unaccounted"], "say where"), (["--private"], "by-test-set")):
        refused = CliRunner().invoke(app, [*command, *flags])
        assert isinstance(refused.exception, ConfigError)
        assert message in str(refused.exception)
    done = CliRunner().invoke(app, [*command, "--private", "--by-test-set", "--runs", "1.5", "--shape", "1"])
    assert done.exit_code == 0, done.output
    assert "expected 1.5 (negative binomial law of shape 1)" in done.output
    assert f"fedveil verify {tmp_path / 'out' / WINNER}" in done.output.replace("\n", " ")
