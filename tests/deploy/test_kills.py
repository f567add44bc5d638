"""Processes that are killed at each point of a round: the model is the same to the bit, and no release misses in a ledger.

Here they die in this process, by an exception that nothing catches, and come up anew with what is on their disks.
`test_network_processes` and `benchmarks/kills.py` do it with SIGKILL, TLS and processes.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from federation_runs import bits, config
from fedveil.deploy.round_messages import ReleaseMessage, read_reply, read_task
from fedveil.experiment.result import Result
from fedveil.experiment.run import run
from fedveil.experiment.two_ledgers import compared
from fedveil.ledger.budgeted_ledger import named_bits
from fedveil.ledger.ledger import Ledger
from joined_clients import Machines, consent, served
from kill_points import CLIENT, SERVER, Point, kill_at

pytestmark = pytest.mark.heavy
ROUNDS = 3
METHODS: dict[str, dict[str, Any]] = {
    "with states": {"name": "fedglp-adp", "variant": "proven"},
    "without": {"name": "dp-fedavg"},
}
"""With private and policy states of the clients, and without any."""


class Killed(KeyboardInterrupt):
    """Ends a program at once; any other end of a training is a client's failure."""


def kill() -> None:
    raise Killed


@dataclass
class Mortal(Machines):
    """Clients that may be killed while they are asked, and are asked again when they are back.

    sent: digest of each release that left one, by client and round.
    """

    kills: int = 0
    at_work: bool = False
    sent: list[tuple[int, int, str]] = field(default_factory=list)

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> dict[int, bytes | str]:
        found: dict[int, bytes | str] = {}
        for number, parts in messages.items():
            while number not in found:
                self.at_work = True
                try:
                    found |= super().answers({number: parts})
                except Killed:
                    self.kills += 1
                finally:
                    self.at_work = False
            if len(parts) == 2:
                self._note(found[number], parts)
        return found

    def _note(self, answer: bytes | str, parts: tuple[bytes, ...]) -> None:
        task = read_task(parts[1])
        assert isinstance(answer, bytes)
        reply = read_reply(answer, task, 610)
        if isinstance(reply, ReleaseMessage) and reply.released is not None:
            digest = hashlib.sha256(reply.salt.encode() + reply.released.numpy().tobytes()).hexdigest()
            self.sent.append((task.client, task.round, digest))


def settings(method: dict[str, Any], view: str, seeded: bool, rounds: int = ROUNDS) -> Any:
    sections = {
        "data": {"partition": {"kind": "iid", "clients": 3}},
        "training": {"clients_per_round": 3, "local_steps": 1, "rounds": rounds},
        "run": {"seeded_noise": seeded},
    }
    return config(method, view, **sections)


@pytest.fixture(scope="module")
def inline_bits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], bytes]:
    """The model of a run in which nobody is killed, by method and view."""

    @cache
    def trained(method: str, view: str) -> bytes:
        return bits(run(settings(METHODS[method], view, True), tmp_path_factory.mktemp("inline") / "run").model.vector)

    return trained


def machines(folder: Path, seeded: bool) -> Mortal:
    return Mortal(folder, {number: consent(number, seeded_noise=seeded) for number in range(3)})


def to_the_end(configuration: Any, folder: Path, there: Mortal) -> tuple[Result, int]:
    """The run, and how often its server was killed."""
    for kills in range(100):
        try:
            return served(configuration, folder, there, resume=kills > 0)[0], kills
        except Killed:
            pass
    raise AssertionError("killed without end")


def assert_no_release_is_missing(folder: Path, there: Mortal) -> None:
    assert there.sent
    for number in range(3):
        (path,) = (there.folder / str(number) / "runs").glob("*/ledger.sqlite")
        with Ledger.open(path) as ledger:
            own = {(entry.client, entry.round, named_bits(entry)) for _, _, entry in ledger.entries()}
        assert own >= {row for row in there.sent if row[0] == number}
        kinds = {finding.kind for finding in compared(folder, there.folder / str(number))}
        assert "contradicted" not in kinds


@pytest.mark.few(1)
@pytest.mark.parametrize("point", CLIENT)
def test_a_client_that_is_killed_changes_no_bit(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bits: Callable[[str, str], bytes]
) -> None:
    there, configuration = machines(tmp_path / "clients", True), settings(METHODS["with states"], "server", True)
    number = 9 if CLIENT[point][1] == "answer" else 5  # of three clients, the second in its second round; offers are answers, too
    kill_at(monkeypatch, CLIENT[point], {number}, kill, lambda: there.at_work)
    result, _ = to_the_end(configuration, tmp_path / "server", there)
    assert there.kills == 1
    assert bits(result.model.vector) == inline_bits("with states", "server")
    assert_no_release_is_missing(tmp_path / "server", there)
    for client in range(3):  # the same bits, so each release is charged once everywhere
        assert {finding.kind for finding in compared(tmp_path / "server", there.folder / str(client))} == {"verified"}
        with Ledger.open(there.folder / str(client) / "lifetime-server.sqlite") as lifetime:
            assert len(lifetime) == ROUNDS


FEW = ("after the answers", "after the charge", "the checkpoint's head written")
"""Where a server is killed that sums, or whose clients keep their noise secret; its other points are slow there."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("point", "view"),
    [
        *((point, "server") for point in SERVER),
        *(pytest.param(point, "aggregate", marks=[pytest.mark.slow] * (point not in FEW)) for point in SERVER),
    ],
)
def test_a_server_that_is_killed_changes_no_bit(
    point: str, view: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bits: Callable[[str, str], bytes]
) -> None:
    configuration = settings(METHODS["without"], view, True)
    there = machines(tmp_path / "clients", True)
    kill_at(monkeypatch, SERVER[point], {2}, kill, lambda: not there.at_work)
    result, kills = to_the_end(configuration, tmp_path / "server", there)
    assert kills == 1
    assert bits(result.model.vector) == inline_bits("without", view)
    with Ledger.open(tmp_path / "server/ledger.sqlite") as ledger:
        assert [entry.round for _, _, entry in ledger.entries()] == sorted([*range(ROUNDS)] * (3 if view == "server" else 1))
    for client in range(3):
        assert {finding.kind for finding in compared(tmp_path / "server", there.folder / str(client))} == {"verified"}


WHO = [
    *((name, point, True) for name, point in CLIENT.items()),
    *(pytest.param(name, point, False, marks=[pytest.mark.slow] * (name not in FEW)) for name, point in SERVER.items()),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "point", "client"), WHO, ids=lambda value: value if isinstance(value, str) else "")
def test_with_secret_noise_no_release_misses_in_any_ledger(
    name: str, point: Point, client: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that died after the charge and before its answer was on its disk releases anew: both charges count."""
    configuration, there = settings(METHODS["without"], "server", False), machines(tmp_path / "clients", False)
    number = 2 if not client else 9 if point[1] == "answer" else 5
    kill_at(monkeypatch, point, {number}, kill, lambda: there.at_work == client)
    result, kills = to_the_end(configuration, tmp_path / "server", there)
    assert kills + there.kills == 1
    assert_no_release_is_missing(tmp_path / "server", there)
    charges = []
    for number in range(3):
        with Ledger.open(there.folder / str(number) / "lifetime-server.sqlite") as lifetime:
            charges.append(len(lifetime))
    assert charges == [ROUNDS] * 3  # of the client that charged twice, the last round is refused: its budget is spent
    twice = name in ("between the charges of lifetime and run", "after the charge") and client
    assert [row["participants"] for row in result.history] == [3, 3, 2 if twice else 3]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_kills_lose_no_release_and_no_bit(tmp_path: Path) -> None:
    """Everybody is killed at several points of each run, chosen at random, until there were a hundred kills."""
    configuration, total, rng = settings(METHODS["with states"], "server", True, 6), 0, random.Random(0)
    inline = run(configuration, tmp_path / "inline")
    for number in itertools.count():
        there = machines(tmp_path / f"clients{number}", True)
        with pytest.MonkeyPatch.context() as patch:
            for point in rng.sample(list(CLIENT.values()), 4):
                kill_at(patch, point, set(rng.sample(range(1, 19), 3)), kill, lambda there=there: there.at_work)
            for point in rng.sample(list(SERVER.values()), 2):
                kill_at(patch, point, set(rng.sample(range(1, 7), 2)), kill, lambda there=there: not there.at_work)
            result, kills = to_the_end(configuration, tmp_path / f"server{number}", there)
        total += kills + there.kills
        assert bits(result.model.vector) == bits(inline.model.vector)
        assert_no_release_is_missing(tmp_path / f"server{number}", there)
        if total >= 100:
            break
    print(f"{total} kills in {number + 1} runs")
