"""Reading a ledger needs no write access to anything, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedveil as fv
from fedveil.accounting.types import Adjacency, Gaussian, Unit, View
from fedveil.cli.app import app
from fedveil.errors import LedgerError
from fedveil.ledger.budgeted_ledger import summary
from fedveil.ledger.files import head_path
from fedveil.ledger.ledger import Entry, Ledger
from fedveil.ledger.ledger_store import wal_path

UPLOAD = Entry(
    *("r1", 0, 1, Unit.CLIENT, Adjacency.REPLACE_ONE, View.SERVER, Gaussian(0.1)),
    clip=(1.0,),
    noise_std=(20.0,),
    coordinates=9,
    dimension=9,
    participants=2,
)
NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can reach, which those of pytest are not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    for part in (path, *path.rglob("*")):
        part.chmod(0o755)
    shutil.rmtree(path)


@pytest.fixture
def ledger(folder: Path) -> Path:
    path = folder / "book" / "ledger.sqlite"
    path.parent.mkdir()
    with Ledger.create(path, "r1") as book:
        book.charge_many([UPLOAD] * 5)
    return path


def locked(folder: Path) -> None:
    """Nothing in this folder may be written any more."""
    for part in (folder, *folder.rglob("*")):
        part.chmod(0o555 if part.is_dir() else 0o444)


def as_another_user(action: Callable[[], object]) -> None:
    """Run it where modes of files hold: in a child process, which is nobody's where the tests are root's."""
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "see what the child printed"


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.stat().st_mtime_ns, file.stat().st_size) for file in (folder, *folder.rglob("*"))}


def test_a_read_only_folder_of_another_user(ledger: Path) -> None:
    locked(ledger.parent)

    def read() -> None:
        assert not os.access(ledger.parent, os.W_OK)
        with Ledger.open(ledger, read_only=True) as book:
            assert [seq for seq, _, _ in book.entries()] == [1, 2, 3, 4, 5]
            assert [total.releases for total in summary(book)] == [5]
            assert book.holds(*book._last())
        with pytest.raises(LedgerError, match="cannot open the ledger"):
            Ledger.open(ledger)

    as_another_user(read)


def test_nothing_changes_and_nothing_appears(ledger: Path) -> None:
    before = listing(ledger.parent)
    with Ledger.open(ledger, read_only=True) as book:
        assert len(list(book.entries())) == len(book) == 5
        assert listing(ledger.parent) == before
        with pytest.raises(LedgerError, match="was opened for reading"):
            book.charge(UPLOAD)
    assert listing(ledger.parent) == before


def test_commands_that_show_a_run_need_no_write_access(folder: Path) -> None:
    run, out = folder / "run", folder / "out"
    out.mkdir()
    out.chmod(0o777)
    config = fv.configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 4}},
        model={"name": "linear"},
        method={"name": "dp-fedavg"},
        training={"rounds": 2, "clients_per_round": 4, "sampling": "fixed"},
        privacy={"noise_multiplier": 1.0, "delta": 1e-2, "view": "server"},
        run={"engine": "inline"},
    )
    fv.train(config, run)
    before = listing(run)

    def show() -> None:
        page = out / f"{os.getuid()}.html"
        for command in (["ledger", run], ["ledger", run, "--json"], ["certify", run], ["report", run, "--out", page]):
            done = CliRunner().invoke(app, [str(argument) for argument in command])
            assert done.exit_code == 0, (done.output, done.exception)
        assert '"most":[[1,' in page.read_text()

    show()  # and imports what the other user's process may not find
    assert listing(run) == before
    locked(run)
    before = listing(run)
    as_another_user(show)
    assert listing(run) == before


def test_a_log_with_rows_is_read_where_sqlite_may_write_beside_it(ledger: Path) -> None:
    with Ledger.open(ledger) as writer:
        writer.charge(UPLOAD)
        assert wal_path(ledger).stat().st_size
        with Ledger.open(ledger, read_only=True) as reader:
            assert len(reader) == 6
            writer.charge(UPLOAD)
            assert len(list(reader.entries())) == 7


def test_a_log_with_rows_in_a_read_only_folder_is_told_and_not_skipped(ledger: Path) -> None:
    copy = ledger.parent.with_name("copy")
    copy.mkdir()
    with Ledger.open(ledger) as writer:
        writer.charge(UPLOAD)
        for file in (ledger, wal_path(ledger), head_path(ledger)):
            shutil.copy(file, copy)
    locked(copy)

    def read() -> None:
        with pytest.raises(LedgerError, match=r"ledger.sqlite-wal holds releases .* copy ledger.sqlite, ledger.sqlite-wal and"):
            Ledger.open(copy / ledger.name, read_only=True)

    as_another_user(read)


def test_a_ledger_that_is_written_while_it_is_read_is_not_half_read(ledger: Path) -> None:
    with Ledger.open(ledger, read_only=True) as reader:
        rows = reader.entries()
        next(rows)
        with Ledger.open(ledger) as writer:
            writer.charge(UPLOAD)
        with pytest.raises(LedgerError, match="was written or replaced while it was read: read it again"):
            len(reader)
    with Ledger.open(ledger, read_only=True) as reader:
        assert len(reader) == 6


def test_progress_counts_all_rows(ledger: Path) -> None:
    seen: list[tuple[int, int]] = []
    Ledger.open(ledger, read_only=True, progress=lambda done, total: seen.append((done, total))).close()
    assert seen == [(0, 5), (5, 5)]


def test_a_long_list_of_clients_is_cut_and_says_so(folder: Path) -> None:
    path = folder / "ledger.sqlite"
    with Ledger.create(path, "r1") as book:
        book.charge_many([Entry(**{**vars(UPLOAD), "client": client}) for client in range(1200)])
    done = CliRunner().invoke(app, ["ledger", str(path)])
    assert "the first 1000 of 1200 rows (--json gives all)" in done.output
