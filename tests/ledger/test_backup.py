"""Backups of ledgers: taken while runs charge, and restored only where no release is lost."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

import pytest
from typer.testing import CliRunner

from fedveil.accounting.types import Gaussian, Scope
from fedveil.cli.app import app
from fedveil.errors import LedgerError
from fedveil.ledger.files import head_path
from fedveil.ledger.ledger import Entry, Ledger
from fedveil.ledger.population_budget import create_budget

SERVER = Scope("client", "zero_out", "server")  # type: ignore[arg-type]


def entry(round: int) -> Entry:
    numbers = {"clip": (1.0,), "noise_std": (1.0,), "coordinates": 1, "dimension": 1, "participants": 1}
    return Entry("r", round, 0, SERVER.unit, SERVER.adjacency, SERVER.view, Gaussian(0.01), **numbers)  # type: ignore[arg-type]


def charged(path: Path, rounds: range) -> None:
    with Ledger.open(path) as ledger:
        for round in rounds:
            ledger.charge(entry(round))


def command(*words: object) -> str:
    done = CliRunner().invoke(app, ["ledger", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def lost(path: Path, *, head: bool) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        if head or file != head_path(path):
            file.unlink()


@pytest.fixture
def budget(tmp_path: Path) -> Path:
    path = create_budget(tmp_path / "ward.budget", 4.0, 1e-5, SERVER).path
    charged(path, range(3))
    return path


def test_a_lost_ledger_comes_back_from_the_newest_backup_alone(budget: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    command("backup", budget, old)
    charged(budget, range(3, 5))
    printed = command("backup", budget, new)
    assert new.stat().st_mode & 0o777 == head_path(new).stat().st_mode & 0o777 == 0o600
    with pytest.raises(LedgerError, match="move it away"):
        command("restore", new, budget)
    lost(budget, head=False)
    with pytest.raises(LedgerError, match=r"holds 3 releases, and not release 5, which was made: it is older"):
        command("restore", old, budget)
    assert not budget.exists()
    assert command("restore", new, budget).endswith("with 5 releases\n")
    charged(budget, range(5, 6))
    lost(budget, head=True)
    with pytest.raises(LedgerError, match="give --head, which the last backup printed"):
        command("restore", new, budget)
    head = printed.split()[-1]
    with pytest.raises(LedgerError, match="it is older"):
        command("restore", old, budget, "--head", head)
    command("restore", new, budget, "--head", head)
    assert "5" in command(budget)


def test_a_backup_of_another_ledger_restores_nothing(budget: Path, tmp_path: Path) -> None:
    other = create_budget(tmp_path / "other.budget", 9.0, 1e-5, SERVER).path
    charged(other, range(9))
    command("backup", other, tmp_path / "copy")
    lost(budget, head=False)
    with pytest.raises(LedgerError, match="or that of another ledger"):
        command("restore", tmp_path / "copy", budget)


def test_a_backup_of_another_ledger_is_none_of_a_ledger_without_releases(tmp_path: Path) -> None:
    heads = {}
    for name, epsilon in (("strict", 1.0), ("loose", 9.0)):
        path = create_budget(tmp_path / name, epsilon, 1e-5, SERVER).path
        heads[name] = command("backup", path, tmp_path / f"copy-of-{name}").split()[-1]
    lost(tmp_path / "strict", head=True)
    with pytest.raises(LedgerError, match="or that of another ledger"):
        command("restore", tmp_path / "copy-of-loose", tmp_path / "strict", "--head", heads["strict"])
    command("restore", tmp_path / "copy-of-strict", tmp_path / "strict", "--head", heads["strict"])


def test_a_folder_is_backed_up_with_all_its_ledgers_while_they_are_charged(budget: Path, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    (folder / "runs/r").mkdir(parents=True)
    for name in ("lifetime-server.sqlite", "runs/r/ledger.sqlite"):
        Ledger.create(folder / name, "r").close()
    stop = Event()

    def charge() -> None:
        while not stop.is_set():
            charged(folder / "lifetime-server.sqlite", range(3))

    thread = Thread(target=charge)
    thread.start()
    try:
        for copy in ("one", "two"):
            lines = command("backup", folder, tmp_path / copy).splitlines()
            assert [line.split()[1] for line in lines] == [
                str(tmp_path / copy / name) for name in ("lifetime-server.sqlite", "runs/r/ledger.sqlite")
            ]
    finally:
        stop.set()
        thread.join()
    with Ledger.open(tmp_path / "two/lifetime-server.sqlite") as copied:
        copied.charge(entry(0))
    with pytest.raises(LedgerError, match="never overwritten"):
        command("backup", folder, tmp_path / "two")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LedgerError, match="holds no ledger"):
        command("backup", tmp_path / "empty", tmp_path / "three")
