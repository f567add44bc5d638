"""Secure aggregation over the wire: the bits of `simulate`, whoever vanishes; no attempt is answered twice or uncharged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import fedveil as fv
from federation_runs import bits, config
from fedveil.deploy.consent import check_offer, require_share
from fedveil.deploy.grid_engine import GONE
from fedveil.deploy.join import JoinedClient
from fedveil.deploy.offers import offer_of
from fedveil.deploy.round_messages import kind_of, read_task
from fedveil.deploy.wire_format import Kind
from fedveil.errors import FedveilError
from fedveil.experiment.run import run
from fedveil.experiment.two_ledgers import MASKED
from fedveil.ledger.ledger import Ledger
from joined_clients import KEYS, ROSTER, Machines, consent, rows, served, small
from kill_points import MASKED_CLIENT, MASKED_SERVER, kill_at

CLIENTS, ROUNDS = 4, 3


def masked(secure_aggregation: str = "on", rounds: int = ROUNDS, seeded: bool = True, **privacy: Any) -> Any:
    """A run of four clients with noise in shares."""
    return config(
        {"name": "dp-fedavg"},
        "aggregate",
        data={"partition": {"kind": "iid", "clients": CLIENTS}},
        training={"clients_per_round": CLIENTS, "local_steps": 1, "rounds": rounds},
        privacy={"noise_place": "shares", "min_survivors": 3, **privacy},
        run={"seeded_noise": seeded, "secure_aggregation": secure_aggregation},
    )


def machines(folder: Path, **changes: Any) -> Machines:
    pinned = {"roster": ROSTER.digest.hex(), "secure_aggregation": "required", **changes}
    return Machines(folder, {number: consent(number, **pinned) for number in range(CLIENTS)}, restarts=False)


def attempts(folder: Path, number: int | None = None) -> list[dict[str, Any]]:
    """The attempts that the server has named, or that a client has answered."""
    path = folder / "run/private/attempts.jsonl"
    if number is not None:
        (path,) = (folder / "clients" / str(number) / "runs").glob("*/attempts.jsonl")
    return [row for row in map(json.loads, path.read_text().splitlines()) if "attempt" in row]


def test_the_model_is_that_of_masks_in_one_process(tmp_path: Path) -> None:
    result, _ = served(masked(), tmp_path / "run", machines(tmp_path / "clients"))
    alone = run(masked("simulate"), tmp_path / "alone")
    assert bits(result.model.vector) == bits(alone.model.vector)
    assert [row["participants"] for row in result.history] == [CLIENTS] * ROUNDS
    for number in range(CLIENTS):
        assert [row["set"] for row in attempts(tmp_path, number)] == [row["set"] for row in attempts(tmp_path)]


@dataclass
class Hurt(Machines):
    """Machines of which something happens to one: `hurt` gets its messages with the exchange (1 or 2), may change what it says.

    told: of each client, the answers that left it, by the attempt of the request; b"" for other messages.
    """

    hurt: Callable[[Hurt, int, int, tuple[bytes, ...]], bytes | str | None] = lambda machines, client, exchange, parts: None
    told: dict[tuple[int, int], set[bytes]] = field(default_factory=dict)
    kills: int = 0
    at_work: bool = False

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> dict[int, bytes | str]:
        found: dict[int, bytes | str] = {}
        for client, parts in messages.items():
            exchange = 0 if len(parts) == 1 else 2 if kind_of(parts[0]) is Kind.SET else 1
            said = self.hurt(self, client, exchange, parts) if exchange else None
            while client not in found:
                self.at_work = True
                try:
                    found |= super().answers({client: parts}) if said is None else {client: said}
                except Killed:
                    self.kills += 1
                    del self._running[client]
                finally:
                    self.at_work = False
            if exchange == 2 and kind_of_answer(found[client]) is Kind.MASKED:
                attempt = int.from_bytes(parts[0].split(b'"u1",[')[1].split(b"}", 1)[1][11:19], "little")
                self.told.setdefault((client, attempt), set()).add(found[client])  # type: ignore[arg-type]
        return found

    def restarted(self, client: int) -> None:
        self._running.pop(client, None)


class Killed(KeyboardInterrupt):
    """Ends a program at once."""


def kind_of_answer(answer: bytes | str) -> Kind | None:
    return Kind(answer[6]) if isinstance(answer, bytes) and answer[:4] == b"FDVL" else None


def hurt(tmp_path: Path, act: Any, **privacy: Any) -> tuple[list[int], Hurt]:
    """How many took part in each round, and the machines."""
    there = Hurt(tmp_path / "clients", machines(tmp_path / "clients").consents, restarts=False, hurt=act)
    result, _ = served(masked(**privacy), tmp_path / "run", there)
    return [row["participants"] for row in result.history], there


def at(number: int, exchange: int, act: Callable[[Hurt], bytes | str | None]) -> Any:
    """Do something to client 1 in the exchange of one round."""

    def when(machines: Hurt, client: int, now: int, parts: tuple[bytes, ...]) -> bytes | str | None:
        here = (client, now, read_task(parts[1]).round) == (1, exchange, number)
        return act(machines) if here else None

    return when


SILENT: dict[str, tuple[int, Callable[[Hurt], bytes | str | None], list[int]]] = {
    "before it is ready": (1, lambda machines: GONE, [3]),
    "after it is ready": (2, lambda machines: "no answer within 600 seconds", [4, 3]),
    "started again after it is ready": (2, lambda machines: machines.restarted(1), [4, 3]),
    "garbage for a key": (1, lambda machines: b"garbage", [3]),
    "garbage for a vector": (2, lambda machines: b"garbage", [4, 3]),
}
"""What happens to client 1 in the second round: the exchange, and the sizes of the sets that the server names."""


@pytest.mark.parametrize("name", SILENT)
def test_a_round_goes_on_without_a_client_that_vanishes(name: str, tmp_path: Path) -> None:
    exchange, act, sizes = SILENT[name]
    participants, _ = hurt(tmp_path, at(1, exchange, act))
    assert participants == [4, 3, 4]
    assert [len(row["members"]) for row in attempts(tmp_path)] == [4, *sizes, 4]
    verified = fv.open_run(tmp_path / "run").verify(against=[tmp_path / "clients" / str(n) for n in range(CLIENTS)])
    assert verified.outcome != "contradicted", verified.findings
    with Ledger.open(tmp_path / "run/ledger.sqlite") as ledger:  # a smaller set has larger shares, and costs the same
        assert len({round(entry.event.mu, 9) for _, _, entry in ledger.entries()}) == 1  # type: ignore[union-attr]


def test_below_the_least_set_nothing_is_opened(tmp_path: Path) -> None:
    def act(machines: Hurt, client: int, exchange: int, parts: tuple[bytes, ...]) -> str | None:
        return GONE if client in (1, 2) and read_task(parts[1]).round == 1 else None

    participants, there = hurt(tmp_path, act)
    assert participants == [4, 0, 4]
    assert [row["round"] for row in attempts(tmp_path)] == [0, 2]
    assert {attempt for _, attempt in there.told} == {1, 2}


def test_who_fails_in_two_rounds_is_not_asked_again(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    def act(machines: Hurt, client: int, exchange: int, parts: tuple[bytes, ...]) -> bytes | None:
        asked.append((client, read_task(parts[1]).round))
        return b"garbage" if client == 1 and exchange == 2 else None

    participants, _ = hurt(tmp_path, act, rounds=4)
    assert participants == [3, 3, 3, 3]
    assert {number for client, number in asked if client == 1} == {0, 1}


def test_the_run_ends_when_the_attempts_are_used_up(tmp_path: Path) -> None:
    """Each client spoils one attempt of each round; no more sums are asked for than were priced."""

    def act(machines: Hurt, client: int, exchange: int, parts: tuple[bytes, ...]) -> bytes | None:
        return b"garbage" if exchange == 2 and client == read_task(parts[1]).round else None

    there = Hurt(tmp_path / "clients", machines(tmp_path / "clients").consents, restarts=False, hurt=act)
    result, _ = served(masked(spare_attempts=1), tmp_path / "run", there)
    assert "attempts at sums that privacy.spare_attempts allows are used up" in result.ended
    assert len(attempts(tmp_path)) == ROUNDS + 1
    for number in range(CLIENTS):
        assert len(attempts(tmp_path, number)) <= ROUNDS + 1
        (planned,) = rows(tmp_path / "clients" / str(number) / "lifetime-aggregate.sqlite")
        assert (planned.event.count, planned.note) == (ROUNDS + 1, MASKED)


def kill() -> None:
    raise Killed


def to_the_end(tmp_path: Path, there: Hurt) -> tuple[Any, int]:
    for kills in range(20):
        try:
            return served(masked(seeded=False), tmp_path / "run", there, resume=kills > 0)[0], kills
        except Killed:
            pass
    raise AssertionError("killed without end")


def assert_no_attempt_is_answered_twice_or_uncharged(tmp_path: Path, there: Hurt) -> None:
    assert all(len(answers) == 1 for answers in there.told.values())
    named = {row["attempt"]: row["set"] for row in attempts(tmp_path)}
    assert len(named) <= ROUNDS + 2
    for number in range(CLIENTS):
        own = attempts(tmp_path, number)
        assert len({row["attempt"] for row in own}) == len(own)
        assert {attempt for client, attempt in there.told if client == number} <= {row["attempt"] for row in own}
        assert all(named[row["attempt"]] == row["set"] for row in own)
        (planned,) = rows(tmp_path / "clients" / str(number) / "lifetime-aggregate.sqlite")
        assert planned.event.count == ROUNDS + 2  # two spare attempts
    assert len(rows(tmp_path / "run/ledger.sqlite")) == len(named), "the server charges each attempt, too"
    verified = fv.open_run(tmp_path / "run").verify(against=[tmp_path / "clients" / str(n) for n in range(CLIENTS)])
    assert verified.outcome != "contradicted", verified.findings


@pytest.mark.parametrize("point", MASKED_CLIENT)
def test_a_client_that_is_killed_answers_no_attempt_twice(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Hurt(tmp_path / "clients", machines(tmp_path / "clients", seeded_noise=False).consents, restarts=False)
    number = 3 * CLIENTS + 6 if point == "after the answer" else 6  # of four clients, the second in its second round
    kill_at(monkeypatch, MASKED_CLIENT[point], {number}, kill, lambda: there.at_work)
    result, _ = to_the_end(tmp_path, there)
    assert there.kills == 1
    participants = [row["participants"] for row in result.history]
    assert (participants[0], min(participants)) in ((4, 3), (4, 4))
    assert_no_attempt_is_answered_twice_or_uncharged(tmp_path, there)


@pytest.mark.parametrize("point", MASKED_SERVER)
def test_a_server_that_is_killed_names_no_attempt_twice(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Hurt(tmp_path / "clients", machines(tmp_path / "clients", seeded_noise=False).consents, restarts=False)
    kill_at(monkeypatch, MASKED_SERVER[point], {2}, kill, lambda: not there.at_work)
    result, kills = to_the_end(tmp_path, there)
    assert (kills, there.kills) == (1, 0)
    assert [row["participants"] for row in result.history] == [4, 4, 4]
    assert_no_attempt_is_answered_twice_or_uncharged(tmp_path, there)


@pytest.mark.parametrize("left", [0, 1])
def test_a_client_whose_attempts_are_lost_answers_no_more(left: int, tmp_path: Path) -> None:
    """Of two attempts, `left` rows are there when it starts again; its states and its answers tell that there were more."""

    def cut(machines: Hurt) -> None:
        (path,) = (tmp_path / "clients/1/runs").glob("*/attempts.jsonl")
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:left]))
        machines.restarted(1)

    participants, _ = hurt(tmp_path, at(2, 1, cut))
    assert participants == [4, 4, 3]
    assert len(attempts(tmp_path, 1)) == left
    assert "this client's own record of the run does not allow it" in (tmp_path / "run/private/failures.csv").read_text()


def test_a_set_is_no_larger_than_a_round(tmp_path: Path) -> None:
    """Else a server that has all other clients would face a smaller share of noise than the statement counts with."""
    three = masked().model_copy(update={"training": masked().training.model_copy(update={"clients_per_round": 3})})
    accepted = check_offer(consent(0, roster=ROSTER.digest.hex()), three)
    plan = accepted.method.release(accepted.setting).always
    require_share(accepted, plan, 3)
    with pytest.raises(FedveilError, match="a set of 4 clients, and a round of this run has 3"):
        require_share(accepted, plan, 4)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no masks": (lambda: masked("none"), {}, "over several machines the server would get"),
    "simulated masks": (lambda: masked("simulate"), {}, "run.secure_aggregation = 'simulate'"),
    "a trusted server": (
        lambda: small("aggregate", data={"partition": {"kind": "iid", "clients": 4}}),
        {},
        "its consent asks for masks (secure_aggregation = 'required')",
    ),
    "no roster": (masked, {"roster": None}, "this client's consent pins no roster"),
    "another roster": (masked, {"roster": "1" * 64}, "and this client's consent pins 1111"),
    "a small set": (masked, {"least_set": 4}, "the run opens sums of 3 clients or more (privacy.min_survivors)"),
    "few colluders": (masked, {"least_colluders": 2}, "if at most 1 keys belong to the server"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_client_consents_to_no_less_than_it_asks_for(name: str, tmp_path: Path) -> None:
    configuration, changes, said = REFUSED[name]
    client = machines(tmp_path / "clients", **changes).client(0)
    with pytest.raises(FedveilError, match=re.escape(said)):
        client.consented(offer_of("r", 0, configuration(), "", ROSTER))
    assert not [*(tmp_path / "clients").rglob("*.sqlite")]


def test_a_client_is_on_the_roster_with_its_own_key(tmp_path: Path) -> None:
    there = machines(tmp_path / "clients")
    offer = offer_of("r", 1, masked(), "", ROSTER)
    consent_of_1 = there.consents[1]
    for signing, said in ((None, "has no signing key"), (KEYS[0], "another key for client 1")):
        with pytest.raises(FedveilError, match=said):
            JoinedClient(tmp_path / f"{said[:3]}", consent_of_1, signing=signing).consented(offer)
    assert JoinedClient(tmp_path / "own", consent_of_1, signing=KEYS[1]).consented(offer) > 0
