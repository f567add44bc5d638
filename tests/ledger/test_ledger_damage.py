"""Damaged ledgers: each is refused with advice, or opens with every release; it is never silently shorter, and never repaired."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fedveil.accounting.types import Adjacency, Gaussian, Unit, View
from fedveil.errors import LedgerError
from fedveil.ledger.ledger import Entry, Ledger

ROWS = 120
PAGE = 4096
FRAME = PAGE + 24


def entry(round: int) -> Entry:
    return Entry(
        *("r1", round, 0, Unit.CLIENT, Adjacency.REPLACE_ONE, View.SERVER, Gaussian(0.1)),
        clip=(1.0,) * 8,
        noise_std=(10.0,) * 8,
        coordinates=9,
        dimension=9,
        participants=2,
    )


def copy_ledger(source: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for file in source.parent.glob(f"{source.name}*"):
        if not file.name.endswith("-shm"):
            shutil.copy(file, folder)
    return folder / source.name


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a killed process leaves it: 100 rows in the main file, 20 more in the log, which is longer than they need."""
    folder = tmp_path_factory.mktemp("ledger")
    with Ledger.create(folder / "ledger.db", "r1", {"clients": 10}) as ledger:
        for round in range(ROWS):
            ledger.charge(entry(round))
            if round == 99:
                ledger._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return copy_ledger(ledger.path, folder / "crashed")


@pytest.fixture(scope="module")
def closed(crashed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same ledger after a clean close: no log."""
    path = copy_ledger(crashed, tmp_path_factory.mktemp("closed") / "ledger")
    Ledger.open(path).close()
    assert not Path(f"{path}-wal").exists()
    return path


def opens_in_full(path: Path) -> bool:
    """True if the ledger opens with every release, False if it is refused with advice and left untouched; anything else fails."""
    files = {suffix: Path(f"{path}{suffix}") for suffix in ("", "-wal", "-head")}
    before = {suffix: file.read_bytes() for suffix, file in files.items() if file.exists()}
    try:
        ledger = Ledger.open(path)
    except LedgerError as error:
        advice = str(error)
    else:
        advice = ""
    if advice:
        assert any(words in advice for words in ("backup", "copy it together", "newer one")), advice
        assert {suffix: files[suffix].read_bytes() for suffix in before} == before
        return False
    with ledger:
        assert [row.round for _, _, row in ledger.entries()] == list(range(ROWS))
        assert ledger.charge(entry(ROWS)) == ROWS + 1
    return True


def flip(file: Path, generator: random.Random, below: int | None = None) -> None:
    content = bytearray(file.read_bytes())
    content[generator.randrange(below or len(content))] ^= 1 << generator.randrange(8)
    file.write_bytes(content)


def test_the_undamaged_copies_open(crashed: Path, closed: Path, tmp_path: Path) -> None:
    assert opens_in_full(copy_ledger(crashed, tmp_path / "a"))
    assert opens_in_full(copy_ledger(closed, tmp_path / "b"))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("state", "suffix", "flips"), [("closed", "", 100), ("crashed", "", 100), ("crashed", "-wal", 150), ("closed", "-head", 80)]
)
@pytest.mark.heavy
def test_flipped_bits(state: str, suffix: str, flips: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    generator = random.Random(f"{state}{suffix}")
    refused = 0
    for number in range(flips):
        path = copy_ledger(request.getfixturevalue(state), tmp_path / str(number))
        flip(Path(f"{path}{suffix}"), generator)
        refused += not opens_in_full(path)
    # Free space inside pages and frames that later ones replace may change without loss; nothing in the head file may.
    assert refused == flips if suffix == "-head" else refused > flips / 4, refused


def test_flipped_bits_in_a_release_are_always_noticed(closed: Path, tmp_path: Path) -> None:
    generator = random.Random(5)
    content = closed.read_bytes()
    for number in range(40):
        path = copy_ledger(closed, tmp_path / str(number))
        text = random.Random(number).choice([b"replace_one", b"gaussian", b"server", b"[10.0, 10.0"])
        places = [i for i in range(2 * PAGE, len(content)) if content.startswith(text, i)]
        changed = bytearray(content)
        changed[generator.choice(places) + generator.randrange(len(text))] ^= 1
        path.write_bytes(changed)
        assert not opens_in_full(path)


@pytest.mark.parametrize("state", ["closed", "crashed"])
def test_cut_main_file(state: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """At every page boundary and at random points."""
    source: Path = request.getfixturevalue(state)
    size = source.stat().st_size
    generator = random.Random(6)
    points = [*range(0, size, PAGE), *(generator.randrange(size) for _ in range(40)), 1, 99, 100, size - 1]
    for number, point in enumerate(points):
        path = copy_ledger(source, tmp_path / str(number))
        with path.open("r+b") as file:
            file.truncate(point)
        opened = opens_in_full(path)
        assert not (opened and state == "closed")


def test_a_log_that_is_half_moved_into_the_main_file(crashed: Path, closed: Path, tmp_path: Path) -> None:
    """As another process finds it while the last writer closes, or after a kill there: first pages new, size old."""
    new = closed.read_bytes()
    assert len(new) > crashed.stat().st_size
    for pages in range(1, len(new) // PAGE + 1):
        path = copy_ledger(crashed, tmp_path / str(pages))
        with path.open("r+b") as file:
            file.write(new[: pages * PAGE])
        assert opens_in_full(path)


def test_cut_log(crashed: Path, tmp_path: Path) -> None:
    """At every frame boundary, where SQLite by itself would open a shorter ledger without a word, and at random points."""
    size = Path(f"{crashed}-wal").stat().st_size
    generator = random.Random(7)
    for number, point in enumerate([*range(32, size, FRAME), *(generator.randrange(size) for _ in range(40)), 0, 31]):
        path = copy_ledger(crashed, tmp_path / str(number))
        with Path(f"{path}-wal").open("r+b") as file:
            file.truncate(point)
        assert not opens_in_full(path)


def remove(suffix: str) -> Callable[[Path], None]:
    return lambda path: Path(f"{path}{suffix}").unlink()


def write(content: bytes, suffix: str = "") -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        Path(f"{path}{suffix}").write_bytes(content)

    return damage


def foreign_database(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE release (seq)")


def newer_schema(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[60:64] = (3).to_bytes(4, "big")
    path.write_bytes(content)


def other_journal(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = DELETE")


def other_ledger(path: Path) -> None:
    path.unlink()
    Path(f"{path}-head").rename(path.with_name("kept"))
    Path(f"{path}-wal").unlink(missing_ok=True)
    with Ledger.create(path, "r2") as ledger:
        ledger.charge_many([entry(round) for round in range(ROWS)])
    path.with_name("kept").replace(f"{path}-head")


def shorter_copy(path: Path) -> None:
    with Ledger.create(path.with_name("short"), "r1") as ledger:
        ledger.charge(entry(0))
    path.with_name("short").replace(path)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no main file": (remove(""), "no ledger at"),
    "no log": (remove("-wal"), "lost releases: it holds 100, but 120 were charged"),
    "empty log": (write(b"", "-wal"), "lost releases"),
    "no head": (remove("-head"), "cannot be read"),
    "empty head": (write(b"", "-head"), "head is damaged"),
    "head of zeros": (write(bytes(106), "-head"), "head is damaged"),
    "empty file": (write(b""), "only 0 bytes"),
    "zeros": (write(bytes(10 * PAGE)), "not a fedveil ledger"),
    "text": (write(b"epsilon = 1\n" * 100), "not a fedveil ledger"),
    "foreign database": (foreign_database, "not a fedveil ledger"),
    "newer schema": (newer_schema, "schema 3"),
    "other ledger": (other_ledger, "not the one that was charged"),
    "shorter copy": (shorter_copy, "damaged|lost releases"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damages_are_told_apart(name: str, crashed: Path, tmp_path: Path) -> None:
    damage, message = DAMAGES[name]
    path = copy_ledger(crashed, tmp_path / "copy")
    damage(path)
    with pytest.raises(LedgerError, match=message):
        Ledger.open(path)
    assert not opens_in_full(path)


def test_a_changed_journal_mode_is_refused(closed: Path, tmp_path: Path) -> None:
    path = copy_ledger(closed, tmp_path / "copy")
    other_journal(path)
    with pytest.raises(LedgerError, match="journal mode was changed from wal to delete"):
        Ledger.open(path)


def test_an_older_copy_of_the_database_is_refused(crashed: Path, closed: Path, tmp_path: Path) -> None:
    path = copy_ledger(closed, tmp_path / "copy")
    shutil.copy(crashed, path)
    with pytest.raises(LedgerError, match="holds 100, but 120"):
        Ledger.open(path)


def test_damage_under_an_open_ledger_is_noticed_by_the_next_one(crashed: Path, tmp_path: Path) -> None:
    path = copy_ledger(crashed, tmp_path / "copy")
    with Ledger.open(path):
        flip(Path(f"{path}-head"), random.Random(1))
        with pytest.raises(LedgerError, match="head is damaged"):
            Ledger.open(path)


def test_a_head_that_went_bad_stops_the_release(crashed: Path, tmp_path: Path) -> None:
    path = copy_ledger(crashed, tmp_path / "copy")
    with Ledger.open(path) as ledger:
        Path(f"{path}-head").write_bytes(b"?")
        with pytest.raises(LedgerError, match="head is damaged"):
            ledger.charge(entry(ROWS))
