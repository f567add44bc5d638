"""Receipts: the server's signed record of each round, by which clients can tell that all of them saw one history.

    RUN/receipts.jsonl           a receipt for each round that was asked, each with the digest of the one before
    RUN/private/answers.jsonl    digests of the answers of each round, the leaves of the receipt's Merkle tree (RFC 6962)
    RUN/private/attempts.jsonl   with secure aggregation, the attempts and their sets; at a client, those that it has answered

The message of a round holds the receipt of the round before, and clients keep it (`ClientReceipts`, the same files in their
folder of the run). A server that tells two clients different histories signs two receipts for one round.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedveil.errors import FedveilError, LedgerError
from fedveil.ledger.files import LineFile
from fedveil.secure_aggregation.encoding import encode
from fedveil.verify import Finding

if TYPE_CHECKING:
    from fedveil.methods.setting import Setting

RECEIPTS, ANSWERS, ATTEMPTS = "receipts.jsonl", "answers.jsonl", "attempts.jsonl"
SUBJECT = "receipts"
_DOMAIN = b"fedveil receipt\n"
_HEX = frozenset("0123456789abcdef")
_DAMAGE = (OSError, ValueError, TypeError, KeyError, RecursionError)


class ReceiptError(FedveilError):
    """Raised for a receipt that the server cannot have signed after the rounds that this client took part in."""


@dataclass(frozen=True)
class Answer:
    """Digest of one client's answer in a round (SHA-256) and, under masks, the client's signature, both in hex."""

    client: int
    digest: str
    signature: str = ""


@dataclass(frozen=True)
class Answers:
    """All answers of a round that the server used, in the order of their clients.

    Args:
        attempt, total: number of the masked sum and its SHA-256; 0 and "" without masks.
    """

    round: int
    answers: tuple[Answer, ...]
    attempt: int = 0
    total: str = ""

    @property
    def root(self) -> str:
        """Return the root of the Merkle tree over the answers."""
        return _root([_sha(b"\0" + f"{a.client} {a.digest} {a.signature}".encode()) for a in self.answers]).hex()

    @property
    def line(self) -> str:
        """Return the text that `read` reads."""
        return _line(asdict(self))

    @classmethod
    def read(cls, line: str) -> Answers:
        """Return the answers in a line; raise ValueError if `line` did not write it."""
        fields = json.loads(line)
        answers = cls(**{**fields, "answers": tuple(Answer(**one) for one in fields["answers"])})
        if answers.line != line:
            raise ValueError("not in the form of a round's answers")
        return answers


@dataclass(frozen=True)
class Receipt:
    """Statement about a round that the server signs when it has ended.

    Args:
        attempt, members, total: of the masked sum: its number, its clients, its SHA-256; 0, () and "" without masks.
        root: Merkle root of the answers. model: SHA-256 of the model that the next round starts from. previous: SHA-256 of the
            receipt before, or "". key: the server's Ed25519 public key. signature: over all else. All of them in hex.
    """

    run: str
    round: int
    attempt: int
    members: tuple[int, ...]
    total: str
    root: str
    model: str
    previous: str
    key: str
    signature: str = ""

    @property
    def text(self) -> str:
        """Return the receipt as one line of JSON."""
        return _line(asdict(self))

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the text."""
        return _sha(self.text.encode()).hex()

    def signed(self, key: Ed25519PrivateKey) -> Receipt:
        """Return the receipt with its signature."""
        return replace(self, signature=key.sign(self._content).hex())

    @property
    def _content(self) -> bytes:
        return _DOMAIN + replace(self, signature="").text.encode()

    @classmethod
    def read(cls, text: str) -> Receipt:
        """Return the receipt in a text; raise ValueError if it is no receipt that the holder of its key has signed."""
        fields = json.loads(text)
        receipt = cls(**{**fields, "members": tuple(fields["members"])})
        numbers, texts = (receipt.round, receipt.attempt, *receipt.members), tuple(asdict(receipt).values())
        if receipt.text != text or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError("not in the form of a receipt")
        if any(not isinstance(value, str | int | tuple) for value in texts) or not {*receipt.key} <= _HEX:
            raise ValueError("not in the form of a receipt")
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(receipt.key)).verify(
                bytes.fromhex(receipt.signature), receipt._content
            )
        except InvalidSignature:
            raise ValueError("it was not signed with the key that it names") from None
        return receipt


class ServerReceipts:
    """The receipts of a run, at the server.

    Args:
        run: its directory. name: its id. key: by which the server signs.
    """

    def __init__(self, run: Path, name: str, key: Ed25519PrivateKey) -> None:
        self.name, self._key = name, key
        self.key = key.public_key().public_bytes_raw().hex()
        self._receipts, self._answers = LineFile(run / RECEIPTS), LineFile(run / "private" / ANSWERS)

    @classmethod
    def of(cls, s: Setting, run: Path, name: str, key: Ed25519PrivateKey) -> ServerReceipts | None:
        """Return the receipts of a run, or None if it samples clients in secret.

        Its clients would see from a receipt without answers, or from none, that nobody was drawn in a round.
        """
        return None if s.amplified else cls(run, name, key)

    def record(self, answers: Answers) -> None:
        """Store what was received in a round; a round that is repeated after a crash replaces what was received before it."""
        if self._answers.lines[-1:] != [answers.line]:
            self._answers.append(answers.line)

    def issue(self, round: int | None, model: bytes) -> str:
        """Return the receipt of the last round before `round`, or of the last one at all; an empty text if there is none.

        Args:
            model: bytes of the vector that `round` starts from.

        Raises:
            LedgerError: another receipt was issued for that round.
        """
        last = next((a for a in map(Answers.read, reversed(self._answers.lines)) if round is None or a.round < round), None)
        if last is None:
            return ""
        issued = next(map(Receipt.read, reversed(self._receipts.lines)), None)
        before = next((r for r in map(Receipt.read, reversed(self._receipts.lines)) if r.round < last.round), None)
        receipt = Receipt(
            run=self.name,
            round=last.round,
            attempt=last.attempt,
            members=tuple(answer.client for answer in last.answers) if last.attempt else (),
            total=last.total,
            root=last.root,
            model=_sha(model).hex(),
            previous="" if before is None else before.digest,
            key=self.key,
        ).signed(self._key)
        if issued == before:
            self._receipts.append(receipt.text)
        elif issued != receipt:
            raise LedgerError(
                f"{self._receipts.path}: a receipt for round {last.round} with another model or other answers was given to "
                f"clients before: go on with the newest copy of the run directory and of the network's key, or begin a new run"
            )
        return receipt.text


class ClientReceipts:
    """The receipts that a client has got in a run, and digests of its answers.

    Args:
        folder: of the run, at the client. run: its id. key: by which its server signs, from the offer (hex).
    """

    def __init__(self, folder: Path, run: str, key: str) -> None:
        self.run, self.key = run, key
        self._receipts, self._answers = LineFile(folder / RECEIPTS), LineFile(folder / ANSWERS)

    def keep(self, text: str, round: int, model: bytes) -> None:
        """Check and store the receipt that comes with a round.

        Args:
            text: the receipt, or an empty text. model: bytes of the vector that the round starts from.

        Raises:
            ReceiptError: it is missing or wrong, or contradicts an earlier one.
        """
        answered = json.loads(self._answers.lines[-1])["round"] if self._answers.lines else -1
        if not text and min(answered, round - 1) < 0 and not self._receipts.lines:
            return
        try:
            receipt = Receipt.read(text)
        except _DAMAGE as problem:
            raise ReceiptError(f"the message of round {round} holds no receipt of an earlier one ({problem})") from None
        last = next(map(Receipt.read, reversed(self._receipts.lines)), receipt)
        wrong = {
            "of another run": receipt.run != self.run,
            "signed with another key than the offer names": receipt.key != self.key,
            "older than this client's last answer": not min(answered, round - 1) <= receipt.round < round,
            "of another model": receipt.model != _sha(model).hex(),
            "other than an earlier one": receipt.round <= last.round and receipt != last,
        }
        if reasons := [reason for reason, is_wrong in wrong.items() if is_wrong]:
            raise ReceiptError(
                f"the message of round {round} holds a receipt {', '.join(reasons)}: the server tells this client another "
                f"history than before; compare with other clients (fedveil verify RUN --against FOLDER)"
            )
        if text not in self._receipts.lines[-1:]:
            self._receipts.append(text)

    @property
    def answered(self) -> frozenset[str]:
        """Return the digests of all answers so far."""
        return frozenset(json.loads(line)["digest"] for line in self._answers.lines)

    def answer(self, round: int, digest: str) -> None:
        """Store the SHA-256 of an answer (hex), before it leaves."""
        line = _line({"round": round, "digest": digest})
        if line not in self._answers.lines[-2:]:
            self._answers.append(line)


def check_receipts(run: Path, closed: bool) -> list[Finding]:
    """Check the receipts in a run directory: their signatures, their chain, and the answers that they stand for.

    Args:
        closed: whether the run has ended.
    """
    if not (run / RECEIPTS).exists():
        return []
    try:
        receipts = _chain((run / RECEIPTS).read_text(encoding="ascii"))
        path = run / "private" / ANSWERS  # a published copy has none
        answers = _answers(path) if path.exists() else {r.round: None for r in receipts}
    except _DAMAGE as problem:
        return [Finding("contradicted", SUBJECT, f"not what a server writes ({problem})")]
    for receipt in receipts:
        given = answers.get(receipt.round, Answers(receipt.round, ()))
        members = () if given is None or not given.attempt else tuple(a.client for a in given.answers)
        if given is not None and (given.root, given.attempt, given.total, members) != (
            receipt.root,
            receipt.attempt,
            receipt.total,
            receipt.members,
        ):
            return [Finding("contradicted", SUBJECT, f"round {receipt.round}: the receipt stands for other answers")]
    missing = sorted(answers.keys() - {r.round for r in receipts})
    if missing[:-1] or (missing and receipts and missing[0] < receipts[-1].round):
        return [Finding("contradicted", SUBJECT, f"there is none for round {missing[0]}, whose answers are there")]
    if missing and closed:
        return [Finding("unknown", SUBJECT, f"the last one is not there (round {missing[0]}): the server's end was cut off")]
    key = f", all signed with the key {receipts[0].key[:16]}..." if receipts else ""
    return [Finding("verified", SUBJECT, f"{len(receipts)} in one chain{key}")]


def compare_receipts(run: Path, clients: Sequence[Path]) -> list[Finding]:
    """Check that the receipts and answers which clients have kept are those of the run.

    Args:
        clients: their folders (`fedveil join --dir`).
    """
    try:
        receipts = _chain(_text(run / RECEIPTS))
        path = run / "private" / ANSWERS
        answers = _answers(path) if path.exists() else {}
        sets = _sets(run / "private" / ATTEMPTS)
    except _DAMAGE:  # `check_receipts` says so
        return []
    return [finding for folder in clients for finding in _compared(receipts, answers, sets, folder)]


def _compared(issued: list[Receipt], answers: dict[int, Answers | None], sets: dict[int, str], folder: Path) -> Iterator[Finding]:
    name, receipts = issued[0].run if issued else "*", {receipt.round: receipt for receipt in issued}
    place = next(folder.glob(f"runs/{name}/offer.json" if issued else f"runs/*/{RECEIPTS}"), None)
    if place is None:  # the run has none either, or `compared` says that the client was not in it
        return
    whose = folder.name
    try:
        offer = json.loads(place.with_name("offer.json").read_text(encoding="utf-8"))
        whose, pinned = f"client {offer['client']}", offer["receipt_key"]
        kept = [Receipt.read(line) for line in _text(place.with_name(RECEIPTS)).splitlines()]
        named, keys = _sets(place.with_name(ATTEMPTS)), {number: bytes.fromhex(key) for number, _, key in offer["roster"]}
        sent = {(line["round"], line["digest"]) for line in map(json.loads, _text(place.with_name(ANSWERS)).splitlines())}
    except _DAMAGE as problem:
        yield Finding("contradicted", SUBJECT, f"{whose}: its receipts or answers were changed or damaged ({problem})")
        return
    others = [r.round for r in kept if receipts.get(r.round) != r]
    if others:
        yield Finding("contradicted", SUBJECT, f"{whose} was given another receipt for round {others[0]} than the run has")
        return
    if issued and issued[0].key != pinned:
        text = f"{whose} consented to a run with the key {pinned[:16]}..., and this one has {issued[0].key[:16]}..."
        yield Finding("contradicted", SUBJECT, text)
        return
    if others := [attempt for attempt, digest in named.items() if sets and sets.get(attempt) != digest]:
        yield Finding("contradicted", SUBJECT, f"{whose} answered attempt {others[0]} with another set than the run has")
        return
    if unsigned := [a for a in answers.values() if a is not None and a.attempt and not _signed(a, sets, keys)]:
        yield Finding("contradicted", SUBJECT, f"round {unsigned[0].round}: vectors that the clients of the roster did not sign")
        return
    counted = {(a.round, one.digest) for a in answers.values() if a for one in a.answers if one.client == offer["client"]}
    if strange := sorted(counted - sent):
        yield Finding(
            "contradicted", SUBJECT, f"the run counts an answer of {whose} in round {strange[0][0]} that it did not give"
        )
        return
    if sent and not kept:
        yield Finding("unknown", SUBJECT, f"{whose} has received none yet")
        return
    late = sorted({round for round, _ in sent} - {round for round, _ in counted}) if answers else []
    lost = f"; lost or late: its answers of rounds {', '.join(map(str, late))}" if late else ""
    yield Finding("verified", SUBJECT, f"{whose} was given the same {len(kept)}; {len(counted)} of its answers are in them{lost}")


def _chain(text: str) -> list[Receipt]:
    """Return the receipts in a text of lines; raise ValueError if they are not one chain."""
    receipts = [Receipt.read(line) for line in text.splitlines()]
    for before, receipt in zip([None, *receipts], receipts, strict=False):
        previous, first = ("", receipt) if before is None else (before.digest, before)
        if receipt.previous != previous or (before is not None and receipt.round <= before.round):
            raise ValueError(f"the receipt of round {receipt.round} does not follow the one before it")
        if (receipt.run, receipt.key) != (first.run, first.key):
            raise ValueError(f"the receipt of round {receipt.round} has another run or key than the one before it")
    if text and not text.endswith("\n"):
        raise ValueError("the last line is cut off")
    return receipts


def _answers(path: Path) -> dict[int, Answers | None]:
    """Return the last answers of each round."""
    return {answers.round: answers for answers in map(Answers.read, path.read_text(encoding="ascii").splitlines())}


def _sets(path: Path) -> dict[int, str]:
    """Return the digest of the set of each attempt in a file of attempts; of a client's own file, of those that it answered."""
    rows = map(json.loads, _text(path).splitlines())
    return {row["attempt"]: row["set"] for row in rows if "attempt" in row}


def _signed(answers: Answers, sets: dict[int, str], keys: dict[int, bytes]) -> bool:
    """Return whether each client of a set signed its vector for it."""
    of_set = bytes.fromhex(sets.get(answers.attempt, ""))
    try:
        for one in answers.answers:
            content = encode("masked", of_set, one.client, bytes.fromhex(one.digest))
            Ed25519PublicKey.from_public_bytes(keys[one.client]).verify(bytes.fromhex(one.signature), content)
    except (InvalidSignature, ValueError, KeyError):
        return False
    return True


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii") if path.exists() else ""


def _root(leaves: list[bytes]) -> bytes:
    if len(leaves) < 2:
        return leaves[0] if leaves else _sha(b"")
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return _sha(b"\1" + _root(leaves[:half]) + _root(leaves[half:]))


def _sha(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _line(fields: object) -> str:
    return json.dumps(fields, separators=(",", ":"))
