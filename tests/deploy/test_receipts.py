"""Receipts: every client sees the same history, and whatever is forged afterwards, at the server or at a client, is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import fedveil as fv
from fedveil.deploy.round_messages import RoundMessage, read_round, read_task, round_bytes
from fedveil.experiment.receipts import Answer, Answers, ClientReceipts, Receipt, ReceiptError, ServerReceipts
from joined_clients import Machines, machines, served, small

ROUNDS = 4
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
"""The key by which the tests' server signs."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three clients, `run`, beside their folders in `clients`; no round needs the clients to be told of the last."""
    folder = tmp_path_factory.mktemp("receipts")
    there = machines(folder / "clients", seeded_noise=False)
    served(small(training={"rounds": ROUNDS}, run={"seeded_noise": False}), folder / "run", there)
    return folder


@pytest.fixture
def copy(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "copy"))


def found(folder: Path, *clients: int) -> tuple[bool, list[str]]:
    """Whether all is verified against these clients, and the findings about receipts."""
    verified = fv.open_run(folder / "run").verify(against=[folder / "clients" / str(number) for number in clients])
    return bool(verified), [f"{f.kind}: {f.text}" for f in verified.findings if f.subject == "receipts"]


def kept(folder: Path, number: int) -> Path:
    (path,) = (folder / "clients" / str(number) / "runs").glob("*/receipts.jsonl")
    return path


def test_all_clients_saw_one_history(honest: Path) -> None:
    right, (own, *others) = found(honest, 0, 1, 2)
    assert right
    assert own.startswith(
        f"verified: {ROUNDS} in one chain, all signed with the key {KEY.public_key().public_bytes_raw().hex()[:16]}"
    )
    told = f"was given the same {ROUNDS - 1}; {ROUNDS} of its answers are in them"
    assert others == [f"verified: client {number} {told}" for number in range(3)]


def lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))


def field(number: int, name: str, value: Any, sign: bool = False) -> Callable[[list[str]], list[str]]:
    """Change a field of one receipt; `sign`: the server itself does, and signs it and all that follow anew."""

    def change(before: list[str]) -> list[str]:
        after = before[:number]
        for line in before[number:]:
            fields = json.loads(line)
            if len(after) == number:
                fields[name] = value
            if sign:
                fields["previous"] = Receipt.read(after[-1]).digest if after else ""
                line = Receipt(**{**fields, "members": tuple(fields["members"])}).signed(KEY).text
            else:
                line = json.dumps(fields, separators=(",", ":"))
            after.append(line)
        return after

    return change


def other_key(before: list[str]) -> list[str]:
    key, after = Ed25519PrivateKey.generate(), list[str]()
    for line in before:
        previous = Receipt.read(after[-1]).digest if after else ""
        public = key.public_key().public_bytes_raw().hex()
        fields = {**json.loads(line), "members": (), "previous": previous, "key": public}
        after.append(Receipt(**fields).signed(key).text)
    return after


def receipts(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    return lambda folder: lines(folder / "run/receipts.jsonl", change)


def answers(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    return lambda folder: lines(folder / "run/private/answers.jsonl", change)


def client(name: str, change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    return lambda folder: lines(kept(folder, 1).with_name(name), change)


def replaced_answer(folder: Path) -> None:
    """The server puts another answer in a client's place, and signs its whole history anew."""

    def swapped(before: list[str]) -> list[str]:
        fields = json.loads(before[1])
        fields["answers"][1]["digest"] = "5" * 64
        return [before[0], json.dumps(fields, separators=(",", ":")), *before[2:]]

    answers(swapped)(folder)
    root = Answers.read((folder / "run/private/answers.jsonl").read_text().splitlines()[1]).root
    receipts(field(1, "root", root, sign=True))(folder)
    for number in range(3):  # and the clients' copies, by which only a client's own answers are left to tell
        count = len(kept(folder, number).read_text().splitlines())
        kept(folder, number).write_text("".join((folder / "run/receipts.jsonl").read_text().splitlines(keepends=True)[:count]))


def another_history(folder: Path) -> None:
    """Client 1 was told of another model after round 1, in a chain that is signed as well."""
    lines(kept(folder, 1), field(1, "model", "7" * 64, sign=True))


FORGERIES: dict[str, Callable[[Path], None]] = {
    "another run": receipts(field(1, "run", "other")),
    "another round": receipts(field(1, "round", 7)),
    "an attempt": receipts(field(1, "attempt", 1)),
    "a set of clients": receipts(field(1, "members", [0, 2])),
    "another root": receipts(field(1, "root", "0" * 64)),
    "a sum": receipts(field(1, "total", "0" * 64)),
    "another model": receipts(field(2, "model", "0" * 64)),
    "another chain": receipts(field(1, "previous", "")),
    "another signature": receipts(field(0, "signature", "0" * 128)),
    "no signature": receipts(field(0, "signature", "")),
    "a key that did not sign": receipts(field(0, "key", "0" * 64)),
    "another server's key": receipts(other_key),
    "one less": receipts(lambda all: [all[0], *all[2:]]),
    "the first is gone": receipts(lambda all: all[1:]),
    "the last is gone": receipts(lambda all: all[:-1]),
    "all are gone": lambda folder: (folder / "run/receipts.jsonl").unlink(),
    "two in another order": receipts(lambda all: [all[0], all[2], all[1], all[3]]),
    "one twice": receipts(lambda all: [*all[:2], *all[1:]]),
    "another form": receipts(lambda all: [all[0].replace(",", ", "), *all[1:]]),
    "signed anew with another model": receipts(field(1, "model", "0" * 64, sign=True)),
    "signed anew with other answers": receipts(field(1, "root", "0" * 64, sign=True)),
    "an answer in a client's place": replaced_answer,
    "answers of a round are gone": answers(lambda all: [*all[:1], *all[2:]]),
    "answers of another round": answers(lambda all: [all[0].replace('"round":0', '"round":1'), *all[1:]]),
    "a client was told another history": another_history,
    "a client's receipt with another model": client("receipts.jsonl", field(0, "model", "0" * 64)),
    "a client's answer was another": client("answers.jsonl", lambda all: [all[0][:-10] + '00000000"}', *all[1:]]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_found(name: str, copy: Path) -> None:
    FORGERIES[name](copy)
    right, findings = found(copy, 0, 1)
    assert not right
    expected = "unknown" if name == "the last is gone" else "contradicted"  # a server's end that was cut off looks the same
    assert any(text.startswith(expected) for text in findings), findings
    if name.startswith("a client's") or name == "a client was told another history":
        assert any("client 1" in text for text in findings if text.startswith("contradicted")), findings
        assert found(copy, 0)[0]


class Lying(Machines):
    """Changes what client 1 is told from the third round on."""

    lie: Callable[[RoundMessage], RoundMessage]

    def answers(self, messages: Any) -> Any:
        changed = dict(messages)
        if len(messages.get(1, ())) == 2 and read_task(messages[1][1]).round == 2:
            told = read_round(messages[1][0], 610)
            changed[1] = (round_bytes(self.lie(told)), messages[1][1])
        return super().answers(changed)


def other_model(told: RoundMessage) -> RoundMessage:
    told.released.model[0] += 1
    return told


def other_receipt(told: RoundMessage) -> RoundMessage:
    (line,) = field(0, "model", Receipt.read(told.receipt).model, sign=True)([told.receipt])
    return RoundMessage(told.run, told.released, told.plan_state, told.buffers, line.replace("1", "2", 1))


LIES: dict[str, tuple[Callable[[RoundMessage], RoundMessage], str]] = {
    "another model": (other_model, "a receipt of another model: the server tells this client another history"),
    "no receipt": (lambda told: RoundMessage(told.run, told.released, told.plan_state, told.buffers), "holds no receipt"),
    "a forged one": (other_receipt, "holds no receipt of an earlier one"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_client_does_not_answer_a_server_that_lies(name: str, tmp_path: Path) -> None:
    lie, said = LIES[name]
    there = Lying(tmp_path / "clients", machines(tmp_path / "clients").consents)
    there.lie = lie
    result, _ = served(small(training={"rounds": ROUNDS}), tmp_path / "run", there)
    assert [row["participants"] for row in result.history] == [3, 3, 2, 3]
    errors = json.dumps([row.get("errors", "") for row in result.history]) + (tmp_path / "run/private/failures.csv").read_text()
    assert said in errors


def test_a_server_gives_one_receipt_a_round(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    server, client = (
        ServerReceipts(tmp_path, "r", KEY),
        ClientReceipts(tmp_path / "private", "r", KEY.public_key().public_bytes_raw().hex()),
    )
    assert server.issue(0, b"m0") == ""
    client.keep("", 0, b"m0")
    client.answer(0, "aa")
    server.record(Answers(0, (Answer(0, "aa"),)))
    server.record(Answers(0, (Answer(0, "bb"),)))  # the round is repeated after a crash
    first = server.issue(1, b"m1")
    assert ServerReceipts(tmp_path, "r", KEY).issue(1, b"m1") == first
    with pytest.raises(fv.FedveilError, match="a receipt for round 0 with another model"):
        ServerReceipts(tmp_path, "r", KEY).issue(1, b"m2")
    client.keep(first, 1, b"m1")
    for round in (0, 1):  # the first round has none, but is over
        with pytest.raises(ReceiptError, match="no receipt of an earlier one"):
            client.keep("", round, b"m1")
    path = tmp_path / "receipts.jsonl"
    path.write_text(path.read_text() + '{"run":"r"')  # killed while it was written
    assert ServerReceipts(tmp_path, "r", KEY).issue(1, b"m1") == first


def test_a_run_that_samples_in_secret_has_no_receipts(tmp_path: Path) -> None:
    """A receipt without answers, or none for a round, would tell the clients that nobody was drawn."""
    there = machines(tmp_path / "clients", lifetime={"aggregate": {"epsilon": 60.0, "delta": 0.01, "order": 6}})
    wanted = small("aggregate", training={"rounds": 8, "sampling": "poisson", "clients_per_round": 1})
    result, _ = served(wanted, tmp_path / "run", there)
    assert 0 in {row["participants"] for row in result.history}, "the case that receipts would show"
    assert not [*tmp_path.rglob("receipts.jsonl"), *tmp_path.rglob("answers.jsonl")]
    assert found(tmp_path, 0, 1, 2) == (True, [])
