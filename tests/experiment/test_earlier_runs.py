"""Run directories of version 0.1, made by its own code: shown as they are, and never continued.

`data/aggregate-0.1` is a finished run of dp-fedavg in the aggregate view, `data/server-0.1-interrupted` one in the server view
that was killed, with releases in the ledger's log.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.errors import ConfigError, LedgerError
from fedveil.experiment.config_files import load_config
from fedveil.experiment.resume import resumable
from fedveil.experiment.run import run
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.ledger_store import schema_of
from fedveil.studies.grid import Cell, run_cell, run_grid

DATA = Path(__file__).parent / "data"
FINISHED, KILLED = "aggregate-0.1", "server-0.1-interrupted"
WHY = "earlier version with floating-point noise"


@pytest.fixture
def earlier(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(DATA / name, tmp_path / name))


def content(folder: Path) -> dict[str, str]:
    """Digests of what must stay: all but SQLite's own index of a log."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm") and path.stat().st_size)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(("name", "rows", "mu2"), [(FINISHED, 3, 4.34001), (KILLED, 12, 12 * 0.01085)])
def test_its_ledger_is_read_as_it_was_written(name: str, rows: int, mu2: float, earlier: Callable[[str], Path]) -> None:
    path = earlier(name)
    before = content(path)
    with Ledger.open(path / "ledger.sqlite") as ledger:
        entries = [entry for _, _, entry in ledger.entries()]
        assert (ledger.schema, len(entries)) == (1, rows)
        with pytest.raises(LedgerError, match="floating-point"):
            ledger.charge_many(entries[:1])
    assert all((entry.grid, entry.mechanism, entry.extras) == (None, "", ()) for entry in entries)
    assert math.fsum(entry.event.mu**2 for entry in entries) == pytest.approx(mu2, rel=1e-4)  # type: ignore[union-attr]
    with pytest.raises(LedgerError, match="floating-point"):
        BudgetedLedger(path / "ledger.sqlite", None).charge_all(entries[:1])
    assert content(path) == before


@pytest.mark.parametrize("name", [FINISHED, KILLED])
def test_a_changed_release_of_an_earlier_ledger_is_noticed(name: str, earlier: Callable[[str], Path]) -> None:
    path = earlier(name)
    file = next(path / f for f in ("ledger.sqlite-wal", "ledger.sqlite") if (path / f).exists())
    clip, changed = b"[1.0, 1.0]", file.read_bytes()

    assert clip in changed
    file.write_bytes(changed.replace(clip, b"[9.0, 1.0]"))
    with pytest.raises(LedgerError, match=r"damaged|lost releases"):
        Ledger.open(path / "ledger.sqlite")


@pytest.mark.parametrize(("name", "epsilon", "view"), [(FINISHED, 8.0, "aggregate"), (KILLED, 8.0, "server")])
def test_it_is_shown_as_it_is(name: str, epsilon: float, view: str, earlier: Callable[[str], Path]) -> None:
    path = earlier(name)
    saved, before = json.loads((path / "statement.json").read_text()), content(path)

    def shown(*words: str) -> str:
        result = CliRunner().invoke(app, [*words])
        assert result.exit_code == 0, result.output
        return result.stdout

    totals = json.loads(shown("ledger", str(path), "--json"))
    assert sum(row["releases"] for row in totals) == (3 if name == FINISHED else 12)
    statement = json.loads(shown("certify", str(path), "--json"))
    proven = next(v["proven"]["epsilon"] for v in statement["views"] if v["proven"]["scope"]["view"] == view)
    assert proven == pytest.approx(epsilon, rel=1e-3)
    assert proven == next(v["proven"]["epsilon"] for v in saved["views"] if v["proven"]["scope"]["view"] == view)
    shown("report", str(path))
    assert view in (path / "report.html").read_text()
    shown("plot", str(path))
    assert (path / "overview.png").stat().st_size > 10_000
    assert {file: digest for file, digest in content(path).items() if file in before} == before


def test_it_is_not_resumed(earlier: Callable[[str], Path]) -> None:
    path = earlier(KILLED)
    before = content(path)
    with pytest.raises(ConfigError, match=WHY):
        resumable(path)
    with pytest.raises(ConfigError, match=WHY):
        run(load_config(path / "config.toml"), path, resume=True)
    with pytest.raises(ConfigError, match=WHY):
        run_cell({"path": str(path), "config": load_config(path / "config.toml").model_dump(mode="json")}, print)
    result = CliRunner().invoke(app, ["run", "--resume", str(path)])
    assert isinstance(result.exception, ConfigError)
    assert WHY in str(result.exception)
    assert "\n" not in str(result.exception)
    assert content(path) == before


@pytest.mark.parametrize("name", [FINISHED, KILLED])
def test_a_comparison_or_reproduction_does_not_go_on_with_it(name: str, tmp_path: Path) -> None:
    """Both run their cells by `run_grid`, which would take a finished one as its own."""
    cell = Cell("dp-fedavg/seed-1", load_config(DATA / name / "config.toml"))
    shutil.copytree(DATA / name, tmp_path / "grid" / "cells" / cell.name)
    (tmp_path / "grid" / "grid.json").write_text('{"format": "fedveil-grid/1"}')
    with pytest.raises(ConfigError, match=WHY):
        run_grid([cell], tmp_path / "grid", 1)


def test_it_is_not_audited_as_if_it_had_left_by_the_door_of_today(earlier: Callable[[str], Path]) -> None:
    path = earlier(FINISHED)
    before = (path / "statement.json").read_bytes()
    result = CliRunner().invoke(app, ["audit", str(path), "--n", "10"])
    assert isinstance(result.exception, ConfigError)
    assert WHY in str(result.exception)
    assert (path / "statement.json").read_bytes() == before


def test_what_is_no_ledger_has_no_schema(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("text")
    assert schema_of(tmp_path / "other") == 0
    Ledger.create(tmp_path / "new", "r").close()
    assert schema_of(tmp_path / "new") == 2
    assert schema_of(DATA / FINISHED / "ledger.sqlite") == 1
