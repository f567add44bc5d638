"""The ledger under SIGKILL and under several writers: no handed-over release is ever missing."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from fedveil.accounting.types import Adjacency, Gaussian, Unit, View
from fedveil.errors import LedgerError
from fedveil.ledger.ledger import Entry, Ledger


def entry(client: int, round: int) -> Entry:
    return Entry(
        *("r1", round, client, Unit.CLIENT, Adjacency.REPLACE_ONE, View.SERVER, Gaussian(0.1)),
        clip=(1.0,) * 5,
        noise_std=(10.0,) * 5,
        coordinates=9,
        dimension=9,
        participants=2,
    )


def charge_and_hand_over(path: Path, out: int, client: int, start: int, pause: float) -> NoReturn:
    """A process that opens the ledger, then charges and hands over (writes "client round seq" to a pipe) until it is killed."""
    try:
        with Ledger.open(path) as ledger:
            for round in range(start, start + 1_000_000):
                if round % 5 == 4:
                    sequence = ledger.charge_many([entry(client, round), entry(client, round)])[-1]
                else:
                    sequence = ledger.charge(entry(client, round))
                os.write(out, b"%d %d %d\n" % (client, round, sequence))
                time.sleep(pause)
    finally:
        os._exit(1)


def start_writer(path: Path, client: int, start: int, pause: float = 0.0) -> tuple[int, int]:
    """Fork a writer that rests so many seconds between charges; returns its process id and the pipe's end to read from."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        charge_and_hand_over(path, write, client, start, pause)
    os.close(write)
    return child, read


def wait_for(pipe: int, lines: int) -> bytes:
    """What came out of a writer by the time it has handed over this often."""
    content = b""
    while content.count(b"\n") < lines:
        chunk = os.read(pipe, 1 << 16)
        assert chunk, "the writer died by itself"
        content += chunk
    return content


def handed_over(pipe: int, content: bytes = b"") -> list[tuple[int, int, int]]:
    """All that came out of a writer, until its end of the pipe is closed by its death."""
    while chunk := os.read(pipe, 1 << 16):
        content += chunk
    os.close(pipe)
    return [(int(a), int(b), int(c)) for a, b, c in (line.split() for line in content.splitlines())]


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def check(path: Path, handed: list[tuple[int, int, int]]) -> int:
    """Open the ledger as a resumed run would and find every handed-over release in it; returns how many it holds."""
    with Ledger.open(path) as ledger:
        rows = {seq: (row.client, row.round) for seq, _, row in ledger.entries()}
    assert sorted(rows) == list(range(1, len(rows) + 1))
    assert [rows.get(seq) for _, _, seq in handed] == [(client, round) for client, round, _ in handed]
    return len(rows)


@pytest.mark.parametrize("kills", [pytest.param(15, marks=pytest.mark.heavy), pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_moments_no_handed_over_release_is_missing(kills: int, tmp_path: Path) -> None:
    """Moments spread over opening, the first charge and steady charging; ten kills a ledger, so that logs are recovered, too."""
    generator = random.Random(20)
    total, mid_charge = 0, 0
    for kill_number in range(20 * kills):
        if kill_number >= kills and kill_number % 10 == 0 and mid_charge:
            break
        path = tmp_path / f"{kill_number // 10}.db"
        if kill_number % 10 == 0:
            Ledger.create(path, "r1").close()
            handed: list[tuple[int, int, int]] = []
        child, pipe = start_writer(path, 0, start=1000 * kill_number)
        content = wait_for(pipe, generator.randrange(5))
        time.sleep(generator.choice([0.0005, 0.002, 0.01]) * generator.random())
        kill(child)
        handed += handed_over(pipe, content)
        rows = check(path, handed)
        mid_charge += rows > (handed[-1][2] if handed else 0)
        total += len(handed) if kill_number % 10 == 9 else 0
    assert total >= kills  # the writers did get to charge
    assert mid_charge > 0  # and some died between the commit and the hand-over, the moment that matters


@pytest.mark.heavy
def test_a_survivor_keeps_charging_when_another_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    Ledger.create(path, "r1").close()
    survivor, survivor_pipe = start_writer(
        path, 0, 0, pause=0.002
    )  # so that the ledger stays small: all of it is read after each kill
    generator = random.Random(3)
    handed: list[tuple[int, int, int]] = []
    for number in range(8):
        child, pipe = start_writer(path, 1, 10_000 * number)
        content = wait_for(pipe, number % 3)
        time.sleep(0.005 * generator.random())
        kill(child)
        handed += handed_over(pipe, content)
        check(path, handed)
    kill(survivor)
    handed += handed_over(survivor_pipe)
    check(path, handed)
    assert {client for client, _, _ in handed} == {0, 1}


def test_three_processes_write_one_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    Ledger.create(path, "r1").close()
    children = []
    for client in range(3):
        child = os.fork()
        if child == 0:
            try:
                with Ledger.open(path) as ledger:
                    for round in range(60):
                        ledger.charge_many([entry(client, round)] * (1 + round % 2))
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    with Ledger.open(path) as ledger:
        rows = [(row.client, row.round) for _, _, row in ledger.entries()]
    assert len(rows) == 3 * 90
    for client in range(3):
        assert [round for who, round in rows if who == client] == [round for round in range(60) for _ in range(1 + round % 2)]


def test_only_one_of_many_creators_wins(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            try:
                Ledger.create(path, f"r{number}").charge(entry(number, 0))
                os._exit(0)
            except LedgerError:
                os._exit(2)
            finally:
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(codes) == [0, 2, 2, 2]
    with Ledger.open(path) as ledger:
        assert ledger.run == f"r{codes.index(0)}"
        assert [row.client for _, _, row in ledger.entries()] == [codes.index(0)]


def test_a_copy_taken_right_after_the_hand_over_holds_it(tmp_path: Path) -> None:
    """What a power cut leaves: the files as they are, no connection ever closed."""
    with Ledger.create(tmp_path / "ledger.db", "r1") as ledger:
        for round in range(5):
            ledger.charge(entry(0, round))
            folder = tmp_path / str(round)
            folder.mkdir()
            for suffix in ("", "-wal", "-head"):
                shutil.copy(f"{ledger.path}{suffix}", folder)
            with Ledger.open(folder / "ledger.db") as copy:
                assert len(copy) == round + 1


@pytest.mark.parametrize("missing", [(0, 1, 2), (0, 1, 1), (1, 0, 1)])
def test_the_check_notices_a_missing_release(tmp_path: Path, missing: tuple[int, int, int]) -> None:
    path = tmp_path / "ledger.db"
    with Ledger.create(path, "r1") as ledger:
        ledger.charge(entry(0, 0))
    with pytest.raises(AssertionError):
        check(path, [(0, 0, 1), missing])


def test_a_child_forked_while_the_ledger_is_open_opens_its_own(tmp_path: Path) -> None:
    """SQLite's locks do not survive a fork: a child would trust in locks that it does not hold and lose its log to the parent."""
    with Ledger.create(tmp_path / "ledger.db", "r1") as parents:
        parents.charge(entry(0, 0))
        go, told = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with Ledger.open(parents.path) as own:
                    own.charge(entry(1, 0))
                    os.read(go, 1)
                    for round in range(1, 10):
                        own.charge(entry(1, round))
                os._exit(0)
            finally:
                os._exit(1)
        while len(parents) < 2:
            time.sleep(0.001)
        assert parents.charge(entry(0, 1)) == 3
        parents.close()
        os.write(told, b"!")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(go)
    os.close(told)
    assert check(tmp_path / "ledger.db", [(0, 0, 1), (1, 0, 2), (0, 1, 3), (1, 9, 12)]) == 12


@pytest.mark.parametrize("suffix", ["", "-head"])
def test_files_swapped_around_a_fork_stop_the_parent(tmp_path: Path, suffix: str) -> None:
    with Ledger.create(tmp_path / "ledger.db", "r1") as ledger:
        ledger.charge(entry(0, 0))
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        file = Path(f"{ledger.path}{suffix}")
        shutil.copy(file, tmp_path / "copy")
        (tmp_path / "copy").replace(file)
        for _ in range(2):
            with pytest.raises(LedgerError, match="removed or replaced"):
                ledger.charge(entry(0, 1))


def test_releases_lost_around_a_fork_stop_the_parent(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.db", "r1") as ledger:
        older = (tmp_path / "ledger.db").read_bytes()
        ledger.charge(entry(0, 0))
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        ledger.path.write_bytes(older)
        for _ in range(2):
            with pytest.raises(LedgerError, match="removed or replaced"):
                ledger.charge(entry(0, 1))


@pytest.mark.heavy
def test_opening_it_twice_in_one_process_keeps_the_locks_of_the_first(tmp_path: Path) -> None:
    """A process that closes any file descriptor of a file loses all its locks on it; another one would then remove the log."""
    with Ledger.create(tmp_path / "ledger.db", "r1") as ledger:
        ledger.charge(entry(0, 0))
        for round in range(1, 3):
            Ledger.open(ledger.path).close()
            code = f"from fedveil.ledger.ledger import Ledger; Ledger.open({str(ledger.path)!r}).close()"
            subprocess.run([sys.executable, "-c", code], check=True)
            assert ledger.charge(entry(0, round)) == round + 1
    assert check(tmp_path / "ledger.db", [(0, 2, 3)]) == 3
