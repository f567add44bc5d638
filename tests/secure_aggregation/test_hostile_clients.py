"""Clients that lie or vanish: who is named and left out, and when there is a sum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedveil.errors import LedgerError
from fedveil.secure_aggregation.attempt_file import AttemptFile
from fedveil.secure_aggregation.encoding import masked_answer, read_masked, read_ready, ready_answer, signed_key, signed_vector
from masked_clients import ROUND, TOLD, D, N, Played, signing_key, terms_of

ALL = range(N)


def test_the_sum_of_a_whole_set_is_the_plain_sum() -> None:
    play = Played()
    server = play.begun()
    request = server.name_set()
    assert request is not None
    assert play.answered(request, ALL) == [""] * N
    total = server.total()
    assert total is not None
    assert (total == play.plain_sum(ALL)).all()
    assert server.members == tuple(ALL)
    assert len(server.vectors) == N


# --- answers to a round that are refused ---


def _other_signature(play: Played) -> bytes:
    key, signature = play.keys()[2]
    return ready_answer(key, signature[:-1] + bytes([signature[-1] ^ 1]))


def _key_of_another(play: Played) -> bytes:
    key = play.keys()[1][0]
    return ready_answer(key, signing_key(2).sign(signed_key(play.server._seen, 2, key)))


def _low_order(play: Played) -> bytes:
    return ready_answer(bytes(32), signing_key(2).sign(signed_key(play.server._seen, 2, bytes(32))))


READY: dict[str, tuple[Callable[[Played], bytes], str]] = {
    "another signature": (_other_signature, "did not sign its key for this round"),
    "the key of another client": (_key_of_another, "the key of another client"),
    "a key of low order": (_low_order, "low order"),
    "another round": (lambda play: play.ready([2], told=b"an older model")[2], "did not sign its key for this round"),
    "another client's answer": (lambda play: play.ready([3])[3], "did not sign its key for this round"),
    "garbage": (lambda play: b"\xff" * 200, "ends within a part"),
    "nothing": (lambda play: b"", "another kind"),
}


@pytest.mark.parametrize("case", READY)
def test_a_client_that_is_ready_with_something_wrong_is_named_and_left_out(case: str) -> None:
    play = Played()
    server = play.begun([0, 1, 3, 4])
    answer, reason = READY[case]
    assert reason in server.ready(2, answer(play))
    assert "has failed" in server.ready(2, play.ready([2])[2]), "it is left out of the round"
    request = server.name_set()
    assert request is not None
    assert server.members == (0, 1, 3, 4)
    assert play.answered(request, server.members) == [""] * 4
    total = server.total()
    assert total is not None
    assert (total == play.plain_sum(server.members)).all()
    assert server.left_out == {}


# --- masked vectors that are refused ---


def _signed_by(play: Played, vector: bytes) -> bytes:
    return masked_answer(vector, signing_key(2).sign(signed_vector(play.server.set_digest, 2, vector)))


MASKED: dict[str, tuple[Callable[[Played, bytes], bytes], str]] = {
    "a bit changed": (lambda play, answer: answer[:20] + bytes([answer[20] ^ 1]) + answer[21:], "did not sign its vector"),
    "too short": (lambda play, answer: _signed_by(play, read_masked(answer)[0][:-4]), "another length"),
    "too long": (lambda play, answer: _signed_by(play, read_masked(answer)[0] + bytes(4)), "another length"),
    "garbage": (lambda play, answer: b"\xff" * 100, "ends within a part"),
    "a key instead": (lambda play, answer: play.ready([2])[2], "another kind"),
}


@pytest.mark.parametrize("case", [*MASKED, "silence", "refusal"])
def test_a_client_that_fails_after_a_set_was_named_costs_an_attempt(case: str) -> None:
    play = Played()
    server = play.begun()
    request = server.name_set()
    assert request is not None
    play.answered(request, [0, 1])
    if case == "refusal":
        server.failed(2, "the plan costs too much")
    elif case != "silence":
        make, reason = MASKED[case]
        assert reason in server.masked(2, make(play, play.members[2].masked(request)))
    play.answered(request, [3, 4])
    assert server.total() is None, "the whole set or nothing"
    again = server.name_set()
    assert again is not None
    assert server.members == (0, 1, 3, 4)
    assert play.answered(again, server.members) == [""] * 4
    total = server.total()
    assert total is not None
    assert (total == play.plain_sum(server.members)).all()
    rows = [row for row in server.attempts.rows if "failed" in row]
    assert [(row["failed"], row["round"]) for row in rows] == [(2, ROUND)]
    assert server.attempts.newest == 2


def test_the_second_round_with_a_failure_leaves_a_client_out_of_the_run(tmp_path: Path) -> None:
    play = Played(folder=tmp_path)
    for round in (0, 1):
        play.server.begin(round, TOLD, play.releases[0])
        assert "another kind" in play.server.ready(2, b"")
        play.server = play.coordinator()  # it does not forget
    assert [*play.server.left_out] == [2]
    play.server.begin(2, TOLD, play.releases[0])
    assert "takes no further part in the run" in play.server.ready(2, play.members[2].ready(2, TOLD, play.releases[2]))


def test_a_late_vector_changes_nothing() -> None:
    play = Played()
    server = play.begun()
    first = server.name_set()
    assert first is not None
    play.answered(first, [0, 1, 3, 4])
    late = play.members[2].masked(first)
    assert server.total() is None
    second = server.name_set()
    assert second is not None
    assert "was not asked" in server.masked(2, late)
    play.answered(second, [0, 1, 3])
    assert "was not asked" in server.masked(2, late)
    play.answered(second, [4])
    total = server.total()
    assert total is not None
    assert (total == play.plain_sum([0, 1, 3, 4])).all()


POINTS = ("before it is ready", "after it is ready", "after it is masked", "late")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("gone", [(2,), (0, 4)])
def test_clients_vanish_at_any_point(point: str, gone: tuple[int, ...]) -> None:
    play, stay = Played(), [i for i in ALL if i not in gone]
    server = play.begun(stay if point == "before it is ready" else ALL)
    attempts = 0
    late: dict[int, bytes] = {}
    while (request := server.name_set()) is not None:
        attempts += 1
        for i in server.members:
            answer = play.members[i].masked(request)
            if i in gone and point == "late":
                late[i] = answer
            elif i not in gone or point == "after it is masked":
                assert server.masked(i, answer) == ""
        if (total := server.total()) is not None:
            break
        for i, answer in late.items():
            assert "was not asked" in server.masked(i, answer)
    assert total is not None
    whole = point == "after it is masked"
    assert attempts == (1 if point in (POINTS[0], POINTS[2]) else 2)
    assert (total == play.plain_sum(ALL if whole else stay)).all()


@pytest.mark.parametrize("point", POINTS[:2])
def test_below_the_least_set_there_is_no_sum(point: str) -> None:
    play = Played(terms_of(least=4))
    server = play.begun(range(3) if point == POINTS[0] else ALL)
    if point == POINTS[0]:
        assert server.name_set() is None
    else:
        request = server.name_set()
        assert request is not None
        play.answered(request, range(3))
        assert server.total() is None
        assert server.name_set() is None
    assert server.total() is None
    assert not server.exhausted


def test_attempts_are_used_up() -> None:
    play = Played(terms_of(attempts=2))
    for _ in range(2):
        play.begun()
        assert play.server.name_set() is not None
        assert play.server.total() is None
    play.begun()
    assert play.server.exhausted
    assert play.server.name_set() is None


def test_a_sum_that_honest_clients_cannot_reach_is_dropped_without_a_name() -> None:
    play = Played()
    server = play.begun()
    play.releases[2].vector = play.releases[2].vector + 2**22
    request = server.name_set()
    assert request is not None
    assert play.answered(request, ALL) == [""] * N
    assert server.total() is None
    assert server.name_set() is None, "another attempt would be spoiled, too"
    assert server.left_out == {}
    assert [row for row in server.attempts.rows if "failed" in row] == []


# --- what is on the disk ---


def test_attempt_and_set_are_on_the_disk_before_they_are_sent(tmp_path: Path) -> None:
    play = Played(folder=tmp_path)
    server = play.begun()
    assert server.name_set() is not None
    (row,) = [json.loads(line) for line in (tmp_path / "server.jsonl").read_text().splitlines()]
    assert (row["attempt"], row["members"], row["set"]) == (1, [*ALL], server.set_digest.hex())
    play.server = play.coordinator()
    assert play.begun().name_set() is not None
    assert play.server.attempts.newest == 2, "a server that restarts names no attempt twice"


def test_a_client_without_room_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Played(folder=tmp_path)
    request = play.request()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(LedgerError, match="No space left"):
            play.members[0].masked(request)
    assert play.members[0].attempts.newest == 0
    assert read_masked(play.members[0].masked(request))
    assert len(AttemptFile(tmp_path / "client-0.jsonl").rows) == 1


def test_a_row_that_a_crash_cut_off_was_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    AttemptFile(path).write(attempt=1)
    path.write_bytes(path.read_bytes() + b'{"attempt": 2')
    file = AttemptFile(path)
    assert file.newest == 1
    file.write(attempt=2)
    assert [row["attempt"] for row in AttemptFile(path).rows] == [1, 2]
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(b"[1]\n")
    with pytest.raises(LedgerError, match="damaged"):
        AttemptFile(path)


def test_a_row_names_what_was_sent(tmp_path: Path) -> None:
    play = Played(folder=tmp_path)
    server = play.begun()
    request = server.name_set()
    assert request is not None
    answer = play.members[1].masked(request)
    (row,) = play.members[1].attempts.rows
    vector, _ = read_masked(answer)
    assert row["vector"] == hashlib.sha256(vector).hexdigest()
    assert (row["round"], row["attempt"], row["set"]) == (ROUND, 1, server.set_digest.hex())
    assert row["plan"] == play.releases[1].plan(N).hex()
    assert len(vector) == D * play.terms.bits // 8
    assert np.frombuffer(vector, "<u4").max() > 2**24, "it looks like nothing"
    assert read_ready(play.ready([1])[1])
