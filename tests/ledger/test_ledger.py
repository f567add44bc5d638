"""The ledger in one process: rows, schema, append-only, chain, errors, summary."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.accounting.types import Adjacency, Event, Gaussian, SampledGaussian, Unbounded, Unit, View
from fedveil.errors import ConfigError, LedgerError
from fedveil.ledger.budgeted_ledger import Total, summary
from fedveil.ledger.entry import COLUMNS, Entry, from_row, to_row
from fedveil.ledger.ledger import Ledger, publish_ledger

UPLOAD = Entry(
    run="r1",
    round=3,
    client=5,
    unit=Unit.CLIENT,
    adjacency=Adjacency.REPLACE_ONE,
    view=View.SERVER,
    event=Gaussian(0.25),
    clip=(1.0, math.inf, 0.0),
    noise_std=(8.0, 4.0, 0.0),
    coordinates=70,
    dimension=100,
    participants=10,
    note="first",
)
SUM = replace(UPLOAD, client=-1, view=View.AGGREGATE, event=SampledGaussian(0.1, 1.5, 2))
EXACT = replace(UPLOAD, clip=(1.0, 0.5), noise_std=(8.0, 0.5), grid=(-21, -25), mechanism="independent", extras=("within",))
RAW = replace(UPLOAD, event=Unbounded("the policy read gradients"), reads=("gradient norms", "loss"))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / "ledger.db", "r1", {"epsilon": 2.0, "layers": ["a", "b"]}) as ledger:
        yield ledger


def test_releases_come_back_equal_and_in_order(ledger: Ledger) -> None:
    assert [ledger.charge(UPLOAD), *ledger.charge_many([SUM, EXACT])] == [1, 2, 3]
    assert ledger.charge_many([]) == []
    with Ledger.open(ledger.path) as again:
        rows = list(again.entries())
        assert [seq for seq, _, _ in rows] == [1, 2, 3]
        assert [entry for _, _, entry in rows] == [UPLOAD, SUM, EXACT]
        assert [seq for seq, _, _ in again.entries(since=2)] == [3]
        assert len(again) == 3
        assert (again.run, again.meta) == ("r1", {"epsilon": 2.0, "layers": ["a", "b"]})
    times = [time for _, time, _ in rows]
    assert times == sorted(times)


def test_iteration_crosses_pages_and_sees_rows_added_meanwhile(ledger: Ledger) -> None:
    ledger.charge_many([replace(UPLOAD, round=i) for i in range(2500)])
    seen = []
    for seq, _, entry in ledger.entries(since=10):
        assert entry.round == seq - 1
        seen.append(seq)
        if seq == 100:
            ledger.charge(replace(UPLOAD, round=2500))
    assert seen == list(range(11, 2502))


def test_plain_sql_reads_costs_and_layers(ledger: Ledger) -> None:
    ledger.charge_many([UPLOAD, SUM, RAW])
    with closing(sqlite3.connect(ledger.path)) as db:
        assert db.execute("SELECT sum(count * mu * mu) FROM release WHERE event = 'gaussian'").fetchone() == (0.0625,)
        assert db.execute("SELECT rate, noise_multiplier, count FROM release WHERE mu IS NULL AND rate > 0").fetchone() == (
            0.1,
            1.5,
            2,
        )
        assert db.execute("SELECT reason, reads FROM release WHERE event = 'unbounded'").fetchone() == (
            "the policy read gradients",
            '["gradient norms", "loss"]',
        )
        layers = db.execute(
            "SELECT json_extract(clip, '$[0]'), json_extract(clip, '$[1]'), noise_std FROM release WHERE seq = 1"
        ).fetchone()
        assert layers == (1.0, None, "[8.0, 4.0, 0.0]")
        assert [name for _, name, *_ in db.execute("PRAGMA table_info(release)")] == [*COLUMNS, "digest"]


def test_every_commit_is_synced_in_write_ahead_mode(ledger: Ledger) -> None:
    connection = ledger._connection
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_the_chain_is_the_documented_one(ledger: Ledger) -> None:
    """A second implementation of docs/ledger.md, section Chain, from plain SQL."""
    ledger.charge_many([UPLOAD, SUM, RAW])
    with closing(sqlite3.connect(ledger.path)) as db:
        meta = [text for pair in db.execute("SELECT key, value FROM meta ORDER BY key") for text in pair]
        chain = hashlib.sha256(("\n" + json.dumps(meta)).encode()).hexdigest()
        for *values, digest in db.execute("SELECT * FROM release ORDER BY seq"):
            row = dict(zip(COLUMNS, values, strict=True))
            time, participants, nonce = (row.pop(name) for name in ("time", "participants", "nonce"))
            assert row["sealed"] == hashlib.sha256((nonce + "\n" + json.dumps([time, participants])).encode()).hexdigest()
            chain = hashlib.sha256((chain + "\n" + json.dumps(list(row.values()))).encode()).hexdigest()
            assert digest == chain
        closing_digest = ledger.conclude({"files": {"config.toml": "0" * 64}})
        assert (
            closing_digest
            == hashlib.sha256(
                (chain + "\n" + json.dumps(["closing", 3, '{"files": {"config.toml": "' + "0" * 64 + '"}}'])).encode()
            ).hexdigest()
        )


def test_a_concluded_ledger_takes_nothing_more(ledger: Ledger) -> None:
    ledger.charge(UPLOAD)
    assert ledger.closing is None
    digest = ledger.conclude({"rounds": 1})
    for write in (lambda: ledger.charge(UPLOAD), lambda: ledger.conclude({"rounds": 1})):
        with pytest.raises(LedgerError, match=r"append-only|UNIQUE"):
            write()
    ledger.close()
    with Ledger.open(ledger.path) as again:
        assert again.closing == ({"rounds": 1}, digest)
        assert len(again) == 1


def test_a_published_ledger_tells_neither_times_nor_counts_and_has_the_same_digests(ledger: Ledger, tmp_path: Path) -> None:
    ledger.charge_many([SUM, replace(SUM, round=9, participants=77)])
    target = tmp_path / "published.sqlite"
    with pytest.raises(LedgerError, match="not concluded"):
        publish_ledger(ledger.path, target)
    closing_entry = ledger.conclude({"rounds": 2})
    publish_ledger(ledger.path, target)
    with Ledger.open(target) as copy:
        assert copy.closing == ({"rounds": 2}, closing_entry)
        assert [(time, entry) for _, time, entry in copy.entries()] == [
            (None, replace(entry, participants=None)) for _, _, entry in ledger.entries()
        ]
        assert copy.last_digest == ledger.last_digest
    content = target.read_bytes() + Path(f"{target}-head").read_bytes()
    with closing(sqlite3.connect(ledger.path)) as db:
        nonces = [nonce for (nonce,) in db.execute("SELECT nonce FROM release")]
    assert not any(nonce.encode() in content for nonce in nonces)
    with pytest.raises(LedgerError, match="never overwritten"):
        publish_ledger(ledger.path, target)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE release SET mu = 0",
        "DELETE FROM release",
        "DELETE FROM release WHERE seq = 2",
        "INSERT OR REPLACE INTO release SELECT * FROM release WHERE seq = 1",
        "REPLACE INTO release SELECT * FROM release WHERE seq = 2",
        f"INSERT INTO release SELECT 4, {', '.join(COLUMNS[1:])}, digest FROM release WHERE seq = 1",
        "UPDATE meta SET value = '2' WHERE key = 'run'",
        "DELETE FROM meta",
        "REPLACE INTO meta VALUES ('run', 'other')",
    ],
)
def test_sql_cannot_change_what_is_written(ledger: Ledger, statement: str) -> None:
    ledger.charge_many([UPLOAD, SUM])
    with closing(sqlite3.connect(ledger.path)) as db, pytest.raises(sqlite3.IntegrityError, match="append-only"):
        db.execute(statement)
    assert [entry for _, _, entry in ledger.entries()] == [UPLOAD, SUM]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE release SET mu = 0.1 WHERE seq = 1",
        "UPDATE release SET note = '' WHERE seq = 2",
        "UPDATE release SET time = time + 1e-6 WHERE seq = 3",
        "DELETE FROM release WHERE seq = 3",
        "DELETE FROM release",
        "UPDATE meta SET value = '{}' WHERE key = 'meta'",
        "UPDATE sqlite_sequence SET seq = 4",
        "SELECT 1",
    ],
)
def test_edits_after_dropping_the_triggers_are_refused(ledger: Ledger, statement: str) -> None:
    ledger.charge_many([UPLOAD, SUM, RAW])
    ledger.close()
    with closing(sqlite3.connect(ledger.path)) as db:
        triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            db.execute(f"DROP TRIGGER {name}")
        db.execute(statement)
        if (
            statement != "SELECT 1"
        ):  # restored triggers must not hide the edit; without an edit, missing triggers are themselves refused
            for _, sql in triggers:
                db.execute(sql)
        db.commit()
    with pytest.raises(LedgerError, match="backup"):
        Ledger.open(ledger.path)


def test_create_never_overwrites(ledger: Ledger) -> None:
    ledger.charge(UPLOAD)
    with pytest.raises(LedgerError, match="never overwritten"):
        Ledger.create(ledger.path, "r2")
    ledger.close()
    ledger.path.unlink()
    with pytest.raises(LedgerError, match="held 1 releases"):
        Ledger.create(ledger.path, "r2")
    with pytest.raises(LedgerError, match="lost"):
        Ledger.open(ledger.path)


def test_create_refuses_a_stray_log(tmp_path: Path) -> None:
    (tmp_path / "ledger.db-wal").write_bytes(b"x" * 5000)
    with pytest.raises(LedgerError, match="may hold releases"):
        Ledger.create(tmp_path / "ledger.db", "r1")


def test_create_after_an_interrupted_creation(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    Ledger.create(path, "r1").close()
    path.unlink()
    with Ledger.create(path, "r2") as ledger:
        assert (ledger.run, len(ledger)) == ("r2", 0)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ledger.db", "ledger.db-head"]


def test_create_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="as JSON"):
        Ledger.create(tmp_path / "a.db", "r1", {"x": math.nan})
    with pytest.raises(LedgerError, match="as JSON"):
        Ledger.create(tmp_path / "a.db", "r1", {"x": object()})
    with pytest.raises(LedgerError, match="writable folder"):
        Ledger.create(tmp_path / "missing" / "a.db", "r1")
    with pytest.raises(LedgerError, match="create one"):
        Ledger.open(tmp_path / "a.db")
    with pytest.raises(LedgerError, match="path of the file"):
        Ledger.open(tmp_path)


def test_a_closed_ledger_is_one_plain_file_and_refuses_work(ledger: Ledger) -> None:
    ledger.charge(UPLOAD)
    ledger.close()
    ledger.close()
    assert not Path(f"{ledger.path}-wal").exists()
    for use in (lambda: ledger.charge(UPLOAD), lambda: list(ledger.entries()), lambda: len(ledger), lambda: summary(ledger)):
        with pytest.raises(LedgerError, match="closed"):
            use()


@pytest.mark.parametrize("suffix", ["", "-wal", "-head"])
def test_removing_a_file_under_an_open_ledger_stops_the_next_release(ledger: Ledger, suffix: str) -> None:
    ledger.charge(UPLOAD)
    os.unlink(f"{ledger.path}{suffix}")
    with pytest.raises(LedgerError, match="removed or replaced"):
        ledger.charge(UPLOAD)


def test_a_forked_child_must_open_its_own(ledger: Ledger) -> None:
    child = os.fork()
    if child == 0:
        try:
            ledger.charge(UPLOAD)
        except LedgerError as error:
            os._exit(7 if "each process opens its own" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert ledger.charge(UPLOAD) == 1


def test_threads_may_share_a_ledger(ledger: Ledger) -> None:
    threads = [threading.Thread(target=lambda: [ledger.charge(UPLOAD) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ledger) == 200
    Ledger.open(ledger.path).close()


def test_a_failed_transaction_leaves_nothing_and_the_ledger_usable(ledger: Ledger) -> None:
    ledger.charge(UPLOAD)

    def refuse() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        ledger.charge_many([UPLOAD, SUM], admit=refuse)
    ledger._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(LedgerError, match="nothing may be released"):
        ledger.charge(UPLOAD)
    ledger._connection.execute("PRAGMA query_only = OFF")
    assert len(ledger) == 1
    assert ledger.charge(SUM) == 2


def test_a_full_disk_is_an_error_before_the_release(ledger: Ledger) -> None:
    ledger.charge(UPLOAD)
    pages = ledger._connection.execute("PRAGMA page_count").fetchone()[0]
    ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerError, match="free space"):
        ledger.charge(replace(UPLOAD, note="x" * 100_000))
    assert [entry for _, _, entry in ledger.entries()] == [UPLOAD]


def test_summary_totals_per_client_and_scope(ledger: Ledger) -> None:
    ledger.charge_many([UPLOAD, replace(UPLOAD, round=9, event=Gaussian(0.5, 3)), SUM, replace(RAW, client=6)])
    whole, one, two = summary(ledger)
    assert whole == Total(-1, Unit.CLIENT, Adjacency.REPLACE_ONE, View.AGGREGATE, 2, 0.0, 2, 3, 3, None)
    assert one == Total(5, Unit.CLIENT, Adjacency.REPLACE_ONE, View.SERVER, 4, 0.0625 + 0.75, 0, 3, 9, None)
    assert (two.client, two.sum_mu_squared, two.unbounded) == (6, 0.0, "the policy read gradients")


# --- entries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"round": -1}, "round"),
        ({"round": 1.5}, "wrong type"),
        ({"client": -2}, "client"),
        ({"client": -1}, "server view"),
        ({"participants": 0}, "participants"),
        ({"coordinates": 101}, "coordinates <= dimension"),
        ({"clip": ()}, "one clip"),
        ({"clip": (1.0,)}, "one clip"),
        ({"clip": (1.0, -1.0, 0.0)}, "clip"),
        ({"clip": (1.0, math.nan, 0.0)}, "clip"),
        ({"noise_std": (1.0, math.inf, 1.0)}, "noise_std"),
        ({"noise_std": (1.0, math.nan, 1.0)}, "noise_std"),
        ({"noise_std": (1.0, 0.0, 1.0)}, "noise_std = 0"),
        ({"reads": ("loss",)}, "read raw data"),
        ({"reads": "loss"}, "tuple of names"),
        ({"run": 5}, "wrong type"),
        ({"note": "\ud800"}, "wrong type"),
        ({"view": "everyone"}, "wrong type"),
        ({"event": Gaussian(0.1, 0)}, "at least once"),
        ({"event": Gaussian(0.1, 2**63)}, "at least once"),
        ({"event": SampledGaussian(0.5, 2.0)}, r"no amplification.*mu = 0.5"),
        ({"event": Unbounded("")}, "must say why"),
        ({"event": "laplace"}, "unknown mechanism"),
    ],
)
def test_entries_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(UPLOAD, **change)


def test_sampling_that_the_server_does_not_see_may_be_charged() -> None:
    """Records sampled inside a client stay secret from the server; an empty Poisson round of clients still releases its noise."""
    assert replace(UPLOAD, unit=Unit.RECORD, event=SampledGaussian(0.5, 2.0)).scope.view is View.SERVER
    assert replace(SUM, participants=0).participants == 0


def test_numpy_numbers_become_plain_ones(ledger: Ledger) -> None:
    entry = replace(
        UPLOAD,
        round=np.int64(3),
        client=np.int32(5),
        clip=tuple(np.array([1.0, np.inf, 0.0])),
        event=Gaussian(np.float64(0.25), np.int64(1)),
    )
    ledger.charge(entry)
    assert next(ledger.entries())[2] == UPLOAD
    assert type(entry.round) is int


positive = st.floats(1e-100, 1e100)
counts = st.integers(1, 2**63 - 1)
finite_events = st.builds(Gaussian, st.floats(0, 1e100), counts) | st.builds(SampledGaussian, st.floats(0, 1), positive, counts)
text = st.text(st.characters(exclude_categories=["Cs"]))


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    layers = draw(st.integers(1, 4))
    event: Event = draw(finite_events | st.builds(Unbounded, text.filter(bool)))
    server = draw(st.booleans()) and not isinstance(event, SampledGaussian)
    return Entry(
        *(draw(text), draw(st.integers(0, 2**63 - 1)), draw(st.integers(0 if server else -1, 2**63 - 1))),
        *(draw(st.sampled_from(Unit)), draw(st.sampled_from(Adjacency)), View.SERVER if server else View.AGGREGATE, event),
        clip=tuple(draw(st.lists(st.floats(0, allow_nan=False), min_size=layers, max_size=layers))),
        noise_std=tuple(draw(st.lists(positive, min_size=layers, max_size=layers))),
        coordinates=draw(st.integers(0, 10)),
        dimension=10,
        participants=draw(st.integers(1, 2**63 - 1)),
        reads=tuple(draw(st.lists(text))) if isinstance(event, Unbounded) else (),
        note=draw(text),
    )


@settings(max_examples=30, deadline=None)
@given(batch=st.lists(entries(), min_size=1, max_size=5))
def test_any_entry_survives_the_disk(tmp_path_factory: pytest.TempPathFactory, batch: list[Entry]) -> None:
    path = tmp_path_factory.mktemp("ledger") / "l.db"
    with Ledger.create(path, batch[0].run) as ledger:
        ledger.charge_many(batch)
    with Ledger.open(path) as ledger:
        assert [entry for _, _, entry in ledger.entries()] == batch


def test_a_row_that_is_no_release_is_an_error() -> None:
    row = dict(zip(COLUMNS, to_row(1, 0.0, UPLOAD), strict=True))
    assert from_row(list(row.values())) == (1, 0.0, UPLOAD)
    for name, value in (("event", "laplace"), ("mu", -1.0), ("clip", "[1"), ("view", "all"), ("count", 0)):
        with pytest.raises(LedgerError, match="not a release"):
            from_row(list((row | {name: value}).values()))
