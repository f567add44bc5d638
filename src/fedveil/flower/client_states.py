"""What one client keeps of a run on its own disk: two generations, each by the round that it was made in.

    ROUND.safetensors   after the client's answer to that round: its private state, its policy state, the request, the answer

A server that lost a round asks for it again. The same request gets the same answer, to the bit, so nothing new leaves; another
request of the same round starts from the generation before. A server that lost more than that is refused, for the client would
have to begin anew without anybody noticing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fedveil.errors import FedveilError
from fedveil.federation.plain_state import read_tree, sync, sync_folder, tree_parts
from fedveil.ledger.owner_only import owner_only_folder
from fedveil.ledger.whole_files import DRAFT, replace_reserved, reserve
from fedveil.training.local import State

_DAMAGE = (OSError, KeyError, ValueError, TypeError, SafetensorError)


_CHARGE = 2**18
"""Bytes that the ledgers of run and lifetime take at most for one release."""


class NoRoom(FedveilError):
    """A disk that is full; its words name no file."""


class DamagedState(FedveilError):
    """A file of states that cannot be read; its words name the file."""


@dataclass(frozen=True)
class Generation:
    """A client's states after a round.

    Args:
        request, answer: of that round. rounds: how many rounds led to these states. answers: how many answers the client gave so
            far, those included that led to states which were dropped.
    """

    private: State = field(default_factory=dict)
    policy: State = field(default_factory=dict)
    request: str = ""
    answer: bytes = b""
    rounds: int = 0
    answers: int = 0


class ClientStates:
    """The states of one client in one run.

    Args:
        folder: of its own, made when something is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answered(self, round: int, request: str) -> bytes | None:
        """The answer that this very request got before."""
        if round not in self._rounds():
            return None
        kept = self._read(round)
        return kept.answer if kept.request == request else None

    @property
    def newest(self) -> int:
        """The last round that was answered; -1 before the first."""
        return max(self._rounds(), default=-1)

    def before(self, round: int) -> Generation:
        """The states with which the client enters that round.

        Raises:
            FedveilError: the server has gone back further than this client can. DamagedState: a file is damaged.
        """
        rounds = self._rounds()
        earlier = [r for r in rounds if r < round]
        kept = {r: self._read(r) for r in rounds}
        answers = max((generation.answers for generation in kept.values()), default=0)
        if earlier:
            return replace(kept[earlier[-1]], answers=answers)
        if rounds and kept[rounds[0]].rounds > 1:
            raise FedveilError(
                f"the server asks for round {round} again, and this client, which keeps two rounds, has gone on to round "
                f"{rounds[-1]}: go on with a newer checkpoint of the server, or begin a new run"
            )
        return Generation(answers=answers)

    @contextmanager
    def room_for(self, round: int, generation: Generation) -> Iterator[None]:
        """Take the room on the disk that `keep` needs for such states, and that a charge needs, before anything is charged.

        Raises:
            FedveilError: there is none.
        """
        self._made()
        path, of_the_charge = self._path(round), self.folder / "charge"
        try:
            reserve(path, sum(memoryview(part).nbytes for part in tree_parts(_tree(generation))))
            reserve(of_the_charge, _CHARGE)
        except OSError as problem:
            _draft(path).unlink(missing_ok=True)
            raise NoRoom(
                "this client's disk has no room for what it keeps of a round: nothing was charged, and nothing leaves"
            ) from problem
        _draft(of_the_charge).unlink()
        try:
            yield
        finally:
            _draft(path).unlink(missing_ok=True)

    def keep(self, round: int, generation: Generation) -> None:
        """Write the states after that round, in the room that was taken; when this returns, they are on the disk. Two stay."""
        self._made()
        replace_reserved(self._path(round), tree_parts(_tree(generation)), sync)
        sync_folder(self.folder)
        stay = [r for r in self._rounds() if r <= round][-2:]
        for other in set(self._rounds()) - set(stay):
            self._path(other).unlink(missing_ok=True)

    def _made(self) -> None:
        for folder in (self.folder.parent, self.folder):
            owner_only_folder(folder)

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.safetensors"))

    def _path(self, round: int) -> Path:
        return self.folder / f"{round}.safetensors"

    def _read(self, round: int) -> Generation:
        try:
            tree = read_tree(self._path(round))
            return Generation(**{**tree, "answer": tree["answer"].numpy().tobytes()})
        except _DAMAGE as problem:
            raise DamagedState(
                f"the client's state in {self._path(round)} is damaged ({type(problem).__name__}): put a copy of it back, or "
                f"take no further part in this run"
            ) from problem


def _tree(generation: Generation) -> dict[str, Any]:
    return {**vars(generation), "answer": torch.frombuffer(bytearray(generation.answer), dtype=torch.uint8)}


def _draft(path: Path) -> Path:
    return path.with_name(path.name + DRAFT)


def request_name(*messages: bytes) -> str:
    """A digest of what a client was asked."""
    found = hashlib.sha256()
    for message in messages:
        found.update(hashlib.sha256(message).digest())
    return found.hexdigest()
