"""A run leaves its ledger closed, however it ends: all rows in the one file, nothing in the log beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedveil as fv
from fedveil.errors import BudgetExhausted
from fedveil.federation.history import Row
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.files import head_path
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.ledger_store import wal_path


def train(out: Path, engine: str, view: str, on_round: Callable[[Row], None] | None = None) -> None:
    config = fv.configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 4}},
        model={"name": "linear"},
        method={"name": "dp-fedavg"},
        training={"rounds": 3, "clients_per_round": 4, "sampling": "fixed"},
        privacy={"noise_multiplier": 1.0, "delta": 1e-2, "view": view},
        run={"engine": engine},
    )
    fv.train(config, out, on_round)


def rows_of_a_copy(run: Path, to: Path) -> int:
    """Rows in ledger.sqlite alone, copied with its head; the copy must hold all that was charged."""
    source = run / "ledger.sqlite"
    assert not wal_path(source).exists()
    assert sorted(file.name for file in run.glob("ledger*")) == ["ledger.sqlite", "ledger.sqlite-head"]
    to.mkdir()
    for file in (source, head_path(source)):
        shutil.copy(file, to)
    with Ledger.open(to / source.name) as copy:
        return len(copy)


ENGINES = pytest.mark.parametrize("engine", ["inline", "pool", "batched"])
VIEWS = pytest.mark.parametrize(("view", "rows"), [("server", 4), ("aggregate", 1)])


@ENGINES
@VIEWS
def test_a_whole_run(engine: str, view: str, rows: int, tmp_path: Path) -> None:
    train(tmp_path / "run", engine, view)
    assert rows_of_a_copy(tmp_path / "run", tmp_path / "copy") == 3 * rows


@ENGINES
@VIEWS
def test_a_run_that_an_exception_ends(engine: str, view: str, rows: int, tmp_path: Path) -> None:
    def fail(record: Row) -> None:
        if record["round"] == 1:
            raise RuntimeError("a listener failed")

    with pytest.raises(RuntimeError, match="a listener failed"):
        train(tmp_path / "run", engine, view, fail)
    assert rows_of_a_copy(tmp_path / "run", tmp_path / "copy") == 2 * rows


@ENGINES
@VIEWS
def test_a_run_that_its_budget_ends(engine: str, view: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charge = BudgetedLedger.charge_all

    def charged(self: BudgetedLedger, entries: Any) -> None:
        if entries[0].round == 1:
            raise BudgetExhausted("spent")
        charge(self, entries)

    monkeypatch.setattr(BudgetedLedger, "charge_all", charged)
    train(tmp_path / "run", engine, view)
    assert rows_of_a_copy(tmp_path / "run", tmp_path / "copy") == rows


@pytest.mark.parametrize("engine", ["inline", "pool"])
def test_a_crash_between_the_clients_and_the_charge_of_a_round_charges_and_releases_nothing(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a round is charged at once, after its last client: until then no row is written, and no model has moved."""
    charge, charges = BudgetedLedger.charge_all, list[int]()

    def charged(self: BudgetedLedger, entries: Any) -> None:
        charges.append(len(entries))
        if len(charges) == 2:
            raise KeyboardInterrupt
        charge(self, entries)

    monkeypatch.setattr(BudgetedLedger, "charge_all", charged)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", engine, "server")
    assert charges == [4, 4]
    assert rows_of_a_copy(tmp_path / "run", tmp_path / "copy") == 4
