"""A server that lies: what a client refuses, and what the others' vectors are worth if they do not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedveil.errors import FedveilError, LedgerError
from fedveil.secure_aggregation import member
from fedveil.secure_aggregation.attempt_file import AttemptFile
from fedveil.secure_aggregation.encoding import ProtocolError, Terms, encode, read_masked, read_ready, set_request, signed_key
from fedveil.secure_aggregation.masks import signed, unpacked
from fedveil.secure_aggregation.member import Member
from masked_clients import ROUND, TOLD, MadeUpRelease, N, Played, roster_of, signing_key, terms_of

Attack = Callable[[type[Member]], bytes]
"""Makes client 0 answer a request that it should refuse, and returns the answer."""


def two_sets_in_an_attempt(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    play.members[0].masked(play.request(range(N)))
    return play.members[0].masked(play.request([0, 1, 2]))


def an_old_attempt(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    play.members[0].masked(play.request(attempt=2))
    return play.members[0].masked(play.request(attempt=1))


def an_old_attempt_after_a_restart(kind: type[Member], folder: Path) -> bytes:
    play = Played(kind=kind, folder=folder)
    play.members[0].masked(play.request(attempt=2))
    play.members[0] = play.member(0)
    return play.members[0].masked(play.request(attempt=2))


def the_key_before_a_restart(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    request = play.request()
    play.members[0] = play.member(0)
    play.ready([0])
    return play.members[0].masked(request)


def the_key_of_another_round(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    request = play.request()
    play.ready(told=b"another model")
    return play.members[0].masked(request)


def a_set_of_one(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    return play.members[0].masked(play.request([0]))


def a_set_below_the_least(kind: type[Member]) -> bytes:
    play = Played(terms_of(least=4), kind=kind)
    return play.members[0].masked(play.request([0, 1, 2]))


def a_set_without_the_client(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    play.ready()
    return play.members[0].masked(play.request([1, 2, 3, 4]))


def a_stranger(kind: type[Member]) -> bytes:
    """With a key that a client of another roster signed for this round."""
    play = Played(kind=kind)
    seen = play.members[0]
    keys = play.keys()
    signature = signing_key(9).sign(signed_key(seen._open.seen, 9, bytes(range(32))))  # type: ignore[union-attr]
    return play.members[0].masked(set_request(1, keys | {9: (bytes(range(32)), signature)}))


def a_key_that_nobody_signed(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    keys = play.keys()
    return play.members[0].masked(set_request(1, keys | {1: (bytes(range(32)), keys[1][1])}))


def swapped_keys(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    keys = play.keys()
    return play.members[0].masked(set_request(1, keys | {1: keys[2], 2: keys[1]}))


def _signed(play: Played, client: int, key: bytes) -> tuple[bytes, bytes]:
    """A key that a client of the roster, who works with the server, signed for this round."""
    return key, signing_key(client).sign(signed_key(play.members[0]._open.seen, client, key))  # type: ignore[union-attr]


def a_key_twice(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    keys = play.keys()
    return play.members[0].masked(set_request(1, keys | {2: _signed(play, 2, keys[1][0])}))


def the_clients_own_key_twice(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    keys = play.keys()
    return play.members[0].masked(set_request(1, keys | {2: _signed(play, 2, keys[0][0])}))


ORDER_8 = 0xB8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0
LOW_ORDER = (0, 1, ORDER_8, 2**255 - 20, 2**255 - 19, 2**255 - 18, 2**255 + 9)


def a_key_of_low_order(kind: type[Member], key: int = 0) -> bytes:
    play = Played(kind=kind)
    keys = play.keys()
    return play.members[0].masked(set_request(1, keys | {2: _signed(play, 2, key.to_bytes(32, "little"))}))


def attempts_without_end(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    for attempt in range(1, 1 + play.terms.attempts):
        play.members[0].masked(play.request(attempt=attempt))
    return play.members[0].masked(play.request(attempt=play.terms.attempts + 1))


def an_attempt_far_ahead(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    return play.members[0].masked(play.request(attempt=2**63))


def a_plan_that_costs_more(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    play.releases[0].most = 4
    return play.members[0].masked(play.request())


def one_side_told_otherwise(kind: type[Member], **changes: object) -> bytes:
    """Client 1 agreed to other terms than client 0: it is not in the set that client 0 accepts."""
    play = Played(kind=kind, told={1: terms_of(**changes)})
    return play.members[0].masked(play.request())


def another_model_to_some(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    keys = play.keys() | {1: read_ready(play.ready([1], told=b"a model that reveals more")[1])}
    return play.members[0].masked(set_request(1, keys))


def another_plan_to_some(kind: type[Member]) -> bytes:
    play = Played(kind=kind)
    play.releases[1].name = "a plan with less noise"
    return play.members[0].masked(play.request())


REFUSED: list[tuple[Attack, str]] = [
    (two_sets_in_an_attempt, "has answered attempt 1"),
    (an_old_attempt, "has answered attempt 2"),
    (the_key_before_a_restart, "not in the set with the key of this round"),
    (the_key_of_another_round, "not in the set with the key of this round"),
    (a_set_of_one, "a set of 1 clients, and 3 are the least"),
    (a_set_below_the_least, "a set of 3 clients, and 4 are the least"),
    (a_set_without_the_client, "client 0 is not in the set"),
    (a_stranger, "client 9 of the set is not on the roster"),
    (a_key_that_nobody_signed, "the key of client 1 is not signed"),
    (swapped_keys, "the key of client 1 is not signed"),
    (a_key_twice, "two clients of the set have the same key"),
    (the_clients_own_key_twice, "two clients of the set have the same key"),
    (a_key_of_low_order, "low order"),
    (attempts_without_end, "6 attempts, and they are used up"),
    (an_attempt_far_ahead, "6 attempts, and they are used up"),
    (another_model_to_some, "the key of client 1 is not signed for this round as client 0 sees it"),
    (another_plan_to_some, "the key of client 1 is not signed for this round as client 0 sees it"),
]


@pytest.mark.parametrize(("attack", "reason"), REFUSED, ids=lambda part: getattr(part, "__name__", ""))
def test_a_client_refuses(attack: Attack, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        attack(Member)


def test_a_client_refuses_an_attempt_that_it_answered_before_a_restart(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="has answered attempt 2"):
        an_old_attempt_after_a_restart(Member, tmp_path)


def test_two_processes_of_a_client_answer_no_more_attempts_than_one(tmp_path: Path) -> None:
    play = Played(folder=tmp_path)
    processes = [play.members[0], play.member(0)]  # as with two names of a server; each has read the file before
    answered = []
    for process in processes:
        play.members[0] = process
        for attempt in range(1, play.terms.attempts + 1):
            with suppress(ProtocolError):
                play.members[0].masked(play.request(attempt=attempt))
                answered.append(attempt)
    assert answered == [*range(1, play.terms.attempts + 1)]
    assert [row["attempt"] for row in AttemptFile(tmp_path / "client-0.jsonl").rows] == answered


def test_a_file_of_attempts_that_became_shorter_stops_its_client(tmp_path: Path) -> None:
    play = Played(folder=tmp_path)
    play.members[0].masked(play.request())
    (tmp_path / "client-0.jsonl").write_bytes(b"")
    with pytest.raises(LedgerError, match=r"client-0\.jsonl became shorter"):
        play.members[0].masked(play.request(attempt=2))


def test_a_client_refuses_a_plan_that_costs_more_than_agreed() -> None:
    with pytest.raises(FedveilError, match="costs more than was agreed to"):
        a_plan_that_costs_more(Member)


@pytest.mark.parametrize("key", LOW_ORDER)
def test_a_client_refuses_every_key_of_low_order(key: int) -> None:
    with pytest.raises(ProtocolError, match="low order"):
        a_key_of_low_order(Member, key)


OTHER_TERMS = [
    {"run": "r-2"},
    {"offer": b"\1" * 32},
    {"roster": roster_of([0, 1, 2, 3, 4, 5])},
    {"least": 4},
    {"least": 4, "colluders": 2},
    {"attempts": 100},
    {"bits": 64},
    {"count": 8},
]


@pytest.mark.parametrize("changes", OTHER_TERMS, ids=lambda changes: "-".join(changes))
def test_clients_that_agreed_to_other_terms_are_in_no_common_set(changes: dict[str, object]) -> None:
    """So a server that lies about m, c, the attempts, the roster or the configuration to some has no set with both."""
    with pytest.raises(ProtocolError, match="the key of client 1 is not signed for this round as client 0 sees it"):
        one_side_told_otherwise(Member, **changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"least": 2}, "least set"), ({"colluders": 0}, "colluders"), ({"least": 6}, "least set"), ({"bits": 12}, "coordinate")],
)
def test_terms_that_hide_nobody_are_no_terms(changes: dict[str, object], what: str) -> None:
    with pytest.raises(FedveilError, match=what):
        terms_of(**changes)


def test_the_same_request_gets_the_same_bytes_and_no_other_noise() -> None:
    play = Played()
    request = play.request()
    first = play.members[0].masked(request)
    assert play.members[0].masked(request) == first
    assert len(play.releases[0].drawn) == 1
    assert [row["attempt"] for row in play.members[0].attempts.rows] == [1]


def test_the_same_round_gets_the_same_answer_and_is_trained_once() -> None:
    play = Played()
    assert play.ready() == play.ready()
    assert play.releases[0].trained == 1
    play.ready(told=b"another model")
    assert play.releases[0].trained == 2


def test_each_attempt_has_noise_and_masks_of_its_own() -> None:
    play = Played()
    vectors = [read_masked(play.members[0].masked(play.request(attempt=t)))[0] for t in (1, 2, 3)]
    assert len(set(vectors)) == 3
    assert len({tuple(drawn) for drawn in play.releases[0].drawn}) == 3


# --- planted faults: each check that is taken away lets its script through ---

PLANTED: list[tuple[str, str, list[Attack]]] = [
    ("if attempt <= newest:", "if False:", [two_sets_in_an_attempt, an_old_attempt]),
    ("if attempt > terms.attempts:", "if False:", [attempts_without_end, an_attempt_far_ahead]),
    ("if len(keys) < terms.least:", "if len(keys) < 1:", [a_set_of_one, a_set_below_the_least]),
    (
        "if self.client not in keys or now.answer != ready_answer(*keys[self.client]):",
        "if False:",
        [a_set_without_the_client, the_key_before_a_restart],
    ),
    ("if len({key for key, _ in keys.values()}) < len(keys):", "if False:", [a_key_twice, the_clients_own_key_twice]),
    (
        "if not terms.roster.signed(other, signature, signed_key(now.seen, other, key)):",
        "if False:",
        [a_key_that_nobody_signed, swapped_keys],
    ),
    ("plan = now.release.plan(len(keys))", "plan = b''", [a_plan_that_costs_more]),
    ("seen = round_digest(self.terms, round, told,", "seen = round_digest(self.terms, round, b'',", [another_model_to_some]),
    ("told, release.plan(self.terms.least))", "told, b'')", [another_plan_to_some]),
]


def with_fault(right: str, wrong: str) -> type[Member]:
    """The class of a client whose code has this fault."""
    source = Path(str(member.__file__)).read_text()
    assert source.count(right) == 1, right
    spec = importlib.util.spec_from_loader("faulty_member", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["faulty_member"] = module  # dataclasses look it up
    exec(compile(source.replace(right, wrong), "faulty_member", "exec"), module.__dict__)
    faulty: type[Member] = module.Member
    return faulty


@pytest.mark.parametrize(("right", "wrong", "attacks"), PLANTED)
def test_a_planted_fault_lets_the_server_through(right: str, wrong: str, attacks: list[Attack]) -> None:
    for attack in attacks:
        assert attack(with_fault(right, wrong))


UNCHECKED = "if not terms.roster.signed(other, signature, signed_key(now.seen, other, key)):"


@pytest.mark.parametrize(
    "told",
    [{"told": b"another model"}, {"name": "another plan"}, *({"terms": terms_of(**changes)} for changes in OTHER_TERMS[:-2])],
    ids=lambda told: "-".join(told),
)
def test_masks_of_clients_that_were_told_different_things_do_not_cancel(told: dict[str, object]) -> None:
    """Even if nobody checks: the sum of clients that differ in what they see is no sum of their vectors."""

    def opened(told: dict[str, object]) -> bool:
        terms = told.get("terms")
        play = Played(kind=with_fault(UNCHECKED, "if False:"), told={1: terms} if isinstance(terms, Terms) else None)
        play.releases[1].name = str(told.get("name", "plan"))
        keys = play.keys()
        keys[1] = read_ready(play.ready([1], told=bytes(told.get("told", TOLD)))[1])  # type: ignore[arg-type, call-overload]
        vectors = [read_masked(play.members[i].masked(set_request(1, keys)))[0] for i in range(N)]
        words = [unpacked(vector, play.terms.count, play.terms.bits) for vector in vectors]
        total = signed(np.sum(words, axis=0, dtype=np.uint32), play.terms.bits)
        return bool((total == play.plain_sum(range(N))).any())

    assert opened({})
    assert not opened(told)


def test_what_a_wrong_set_would_cost() -> None:
    """Why a set of one is refused: the server would have the vector with a single share of the noise."""
    play = Played(kind=with_fault("if len(keys) < terms.least:", "if len(keys) < 1:"))
    vector, _ = read_masked(play.members[0].masked(play.request([0])))
    alone = signed(unpacked(vector, play.terms.count, play.terms.bits), play.terms.bits)
    assert (alone == play.releases[0].drawn[-1]).all()
    whole, _ = read_masked(play.members[0].masked(play.request(attempt=2)))
    hidden = signed(unpacked(whole, play.terms.count, play.terms.bits), play.terms.bits)
    assert np.abs(hidden - play.releases[0].drawn[-1]).min() > 2**10


def test_a_request_that_is_none_is_refused() -> None:
    play = Played()
    play.ready()
    for request in (b"", b"\0", encode("set"), encode("set", 1), encode("set", 1, b"x"), encode("ready", bytes(32), bytes(64))):
        with pytest.raises(ProtocolError):
            play.members[0].masked(request)


def test_a_client_that_is_not_ready_answers_nothing() -> None:
    play = Played()
    request = play.request()
    with pytest.raises(ProtocolError, match="not ready for a round"):
        play.member(0).masked(request)


def test_a_failed_training_leaves_no_key_behind() -> None:
    play = Played()
    request = play.request()

    class Broken(MadeUpRelease):
        def train(self) -> None:
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        play.members[0].ready(ROUND + 1, TOLD, Broken(play.releases[0].vector))
    with pytest.raises(ProtocolError, match="not ready"):
        play.members[0].masked(request)


def test_a_client_has_the_key_of_the_roster() -> None:
    terms = terms_of()
    with pytest.raises(FedveilError, match="another key on the roster"):
        Member(0, signing_key(1), terms, Played().members[0].attempts)
    with pytest.raises(FedveilError, match="another key on the roster"):
        Member(7, signing_key(7), replace(terms), Played().members[0].attempts)
