"""A grid of runs: the same as single runs, resumable, never repeating what is finished."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedveil.studies.grid as grid
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.experiment.config_files import read_config
from fedveil.experiment.run import run
from fedveil.studies import worker_pool
from fedveil.studies.cell import Cell, CellState, Listener, state_of
from fedveil.studies.grid import Pace, run_grid
from forked_workers import FORKING
from grid_cells import cells, content, small

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its victims")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted grid of four cells."""
    out = tmp_path_factory.mktemp("grid") / "calm"
    assert [s.state for s in run_grid(cells(), out, jobs=2)] == ["done"] * 4
    return out


class Forked:
    """The grid in a process of its own, to be interrupted."""

    def __init__(self, cells: list[Cell], out: Path, jobs: int) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            try:
                run_grid(cells, out, jobs, Hears(lambda s: os.write(writing, f"{s.state} {s.rounds}\n".encode())))
            finally:
                os._exit(130 if isinstance(sys.exception(), KeyboardInterrupt) else 0)
        os.close(writing)
        self.lines = os.fdopen(reading)

    def end(self, after: str, sign: int) -> int:
        """Send the signal to its group after that line, and return how it ended."""
        with self.lines:
            assert any(line.strip() == after for line in self.lines), "the grid ended before it could be interrupted"
            (os.killpg if sign == signal.SIGINT else os.kill)(self.pid, sign)
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Hears(Listener):
    """Passes on each changed cell."""

    def __init__(self, act: Callable[[CellState], object]) -> None:
        self.act = act

    def changed(self, state: CellState, left: float | None) -> None:
        self.act(state)


def is_free(out: Path) -> bool:
    """Whether neither a grid nor any of its workers is left."""
    with (out / "grid.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def test_cells_are_the_runs_that_run_makes(calm: Path, tmp_path: Path) -> None:
    for cell in cells():
        alone = run(cell.config, tmp_path / cell.name)
        assert content(alone.path) == content(calm / "cells" / cell.name)
        state = state_of(cell, calm)
        assert (state.state, state.rounds, state.total, state.error, state.ended) == ("done", 3, 3, "", "")
        assert state.score == pytest.approx(alone.accuracy, abs=1e-12)
        assert state.statement == alone.privacy
        assert state.summary["rounds"] == 3


@pytest.mark.parametrize(("asked", "used"), [("auto", "inline"), ("pool", "inline"), ("batched", "batched")])
def test_cells_keep_an_engine_that_takes_several_clients_in_one_pass(asked: str, used: str, tmp_path: Path) -> None:
    config = Config.model_validate(small().resolved() | {"run": {"engine": asked, "seeded_noise": True}})
    (state,) = run_grid([Cell("one", config)], tmp_path, jobs=1)
    assert state.state == "done"
    assert read_config(state.path / "config.toml").run.engine == used
    assert any("in one pass" in str(a) for a in state.statement.assumptions) == (used == "batched")


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_cell_of_another_engine_is_kept_or_goes_on_as_it_was_begun(rounds: int, tmp_path: Path) -> None:
    def stop(record: dict[str, Any]) -> None:
        if record["round"] + 1 == rounds < 3:
            raise ZeroDivisionError

    one, other = (
        Config.model_validate(small().resolved() | {"run": {"engine": engine, "seeded_noise": True}})
        for engine in ("inline", "batched")
    )
    run_grid([Cell("first", other)], tmp_path, jobs=1)
    with contextlib.suppress(ZeroDivisionError):
        run(one, tmp_path / "cells" / "second", stop)
    states = run_grid([Cell("first", one), Cell("second", other)], tmp_path, jobs=1)
    assert [(s.state, s.rounds) for s in states] == [("done", 3)] * 2
    assert [read_config(s.path / "config.toml").run.engine for s in states] == ["batched", "inline"]


def test_a_cell_of_an_engine_for_one_run_alone_is_trained_in_one_process(tmp_path: Path) -> None:
    sections = small(rounds=1).resolved() | {"run": {"engine": "flower"}}
    (state,) = run_grid([Cell("only", Config.model_validate(sections))], tmp_path, jobs=1)
    assert (state.state, read_config(state.path / "config.toml").run.engine) == ("done", "inline")


@forks
def test_a_killed_grid_continues_to_the_same_cells(calm: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    assert Forked(cells(), out, jobs=2).end("running 2", signal.SIGKILL) == -signal.SIGKILL
    assert any(state_of(cell, out).state == "waiting" for cell in cells())
    assert [s.state for s in run_grid(cells(), out, jobs=1)] == ["done"] * 4
    for cell in cells():
        assert content(out / "cells" / cell.name) == content(calm / "cells" / cell.name)


@forks
def test_ctrl_c_ends_every_worker(tmp_path: Path) -> None:
    assert Forked(cells(rounds=10_000), tmp_path, jobs=1).end("running 1", signal.SIGINT) == 130
    assert is_free(tmp_path)
    assert {row["state"] for row in json.loads((tmp_path / "grid.json").read_text())["cells"]} <= {"waiting", "running"}


def test_finished_cells_are_kept_and_more_are_welcome(calm: Path) -> None:
    before = {cell.name: run_of(calm, cell) for cell in cells()}
    changed: list[str] = []
    again = run_grid(cells(seeds=3, methods=("dp-fedavg",)), calm, jobs=2, listener=Hears(lambda s: changed.append(s.cell.name)))
    assert [s.state for s in again] == ["done"] * 3
    assert set(changed) == {"dp-fedavg/seed-3"}
    assert {cell.name: run_of(calm, cell) for cell in cells()} == before
    remembered = json.loads((calm / "grid.json").read_text())["cells"]
    assert {row["name"] for row in remembered} == {*before, "dp-fedavg/seed-3"}
    assert {row["state"] for row in remembered} == {"done"}


def run_of(out: Path, cell: Cell) -> tuple[str, int]:
    path = state_of(cell, out).path / "summary.json"
    return json.loads(path.read_text())["run"], path.stat().st_mtime_ns


def test_another_configuration_is_refused_with_the_difference(calm: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.rounds was 3 and is 4"):
        run_grid(cells(rounds=4), calm)


def test_a_failed_cell_has_its_reason_and_stops_no_other(tmp_path: Path) -> None:
    impossible = Cell("bad/seed-1", small("fedavg"), {})
    good = cells(seeds=1, methods=("dp-fedavg",))
    waste = tmp_path / "cells" / good[0].name  # left by a run that was killed before it had begun
    waste.mkdir(parents=True)
    (waste / "config.toml.part").write_text("")
    (tmp_path / "grid.json").write_text(json.dumps({"format": grid.FORMAT, "cells": []}))
    failed, done = run_grid([impossible, *good], tmp_path, jobs=1)
    assert (failed.state, done.state) == ("failed", "done")
    assert failed.error.startswith("fedavg adds no noise")
    assert "fedavg adds no noise" in (tmp_path / "grid.json").read_text()
    repaired = Cell("bad/seed-1", small("dp-fedavg"), {})
    assert state_of(repaired, tmp_path).state == "waiting"


@pytest.mark.parametrize("program", [pytest.param("forked", marks=forks), pytest.param("started", marks=pytest.mark.slow)])
def test_a_worker_that_dies_fails_its_cell_only(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[int] = []
    start = (subprocess if program == "started" else FORKING).Popen

    def started(*arguments: Any, **named: Any) -> Any:
        process = start(*arguments, **named)
        workers.append(process.pid)
        return process

    monkeypatch.setattr(worker_pool.subprocess, "Popen", started)

    def kill(changed: CellState) -> None:
        if changed.cell.name == long.name and changed.rounds == 1 and changed.state == "running":
            os.kill(workers[0], signal.SIGKILL)

    long = Cell("long", small(rounds=10_000), {})
    short = Cell("short", small(rounds=1), {})
    first, second = run_grid([long, short], tmp_path, jobs=1, listener=Hears(kill))
    assert (first.state, second.state) == ("failed", "done"), second.error
    assert "signal 9" in first.error
    assert len(workers) == 2


def test_two_grids_in_one_directory_are_refused(calm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "LOCK_SECONDS", 0.0)
    with (calm / "grid.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another grid is running"):
            run_grid(cells(), calm)
    assert is_free(calm)


@pytest.mark.parametrize("name", ["/a", "../a", "a/../b", "a//b", ".", ""])
def test_names_stay_inside(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="relative directory"):
        run_grid([Cell(name, small())], tmp_path)


def test_refusals(tmp_path: Path) -> None:
    one = Cell("a", small())
    for chosen, message in (([one, one], "named twice"), ([one, Cell("a/b", small())], "would lie in"), ([], "at least one")):
        with pytest.raises(ConfigError, match=message):
            run_grid(chosen, tmp_path / "new")
    with pytest.raises(ConfigError, match="jobs must be at least 1"):
        run_grid([one], tmp_path / "new", jobs=0)
    assert not (tmp_path / "new").exists()
    (tmp_path / "letter.txt").write_text("")
    with pytest.raises(ConfigError, match="holds no grid"):
        run_grid([one], tmp_path)
    assert not (tmp_path / "grid.lock").exists()
    (tmp_path / "grid.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"cannot read .* as the list of a grid's runs"):
        run_grid([one], tmp_path)


def test_pace_goes_by_the_most_similar_cells() -> None:
    def config(method: str = "dp-fedavg", seed: int = 0, **training: Any) -> Any:
        base = small(method, seed)
        return base.model_copy(update={"training": base.training.model_copy(update=training)})

    pace = Pace()
    assert pace.left([(config(), 3)], 2) is None
    assert pace.expected(config(), 4) > pace.expected(config(clients_per_round=3), 4) > 0
    pace.measure(config(seed=1), 2, 6.0)
    pace.measure(config("aldp-fl", clients_per_round=3), 1, 5.0)
    assert pace.expected(config(seed=2), 4) == pytest.approx(12.0)
    assert pace.expected(config(clients_per_round=12), 1) == pytest.approx(6.0)  # its method's pace, twice the work
    assert pace.expected(config("ladp-fl"), 1) == pytest.approx(11.0 / 2.5)  # the pace of all: 11 s for 2.5 such rounds
    assert pace.left([(config(), 1), (config(), 1), (config(), 1)], 2) == pytest.approx(4.5)
    assert pace.left([(config(), 4), (config(), 1)], 2) == pytest.approx(12.0)
    assert pace.left([], 2) == 0.0
