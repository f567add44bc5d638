"""A run under secure aggregation with made-up vectors: all members, the server, and what a hostile one needs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from fedveil.errors import BudgetExhausted
from fedveil.secure_aggregation.attempt_file import AttemptFile
from fedveil.secure_aggregation.coordinator import Coordinator
from fedveil.secure_aggregation.encoding import Terms, read_ready, set_request
from fedveil.secure_aggregation.member import Member
from fedveil.secure_aggregation.roster import Roster, RosterClient

N, D = 5, 7
TOLD = b"the model of round 3"
ROUND = 3


@dataclass
class MadeUpRelease:
    """A release whose noise is a fresh draw in each call; plans of sets above `most` cost too much."""

    vector: NDArray[np.int64]
    name: str = "plan"
    most: int = 100
    trained: int = 0
    drawn: list[NDArray[np.int64]] = field(default_factory=list)

    def plan(self, members: int) -> bytes:
        if members > self.most:
            raise BudgetExhausted("the plan costs more than was agreed to")
        return hashlib.sha256(f"{self.name} {members}".encode()).digest()

    def plausible(self, total: NDArray[np.int64], members: int) -> bool:
        return bool(np.abs(total).max() < 2**20)

    def train(self) -> None:
        self.trained += 1

    def noisy(self, members: int) -> NDArray[np.int64]:
        self.drawn.append(self.vector + np.random.default_rng().integers(-100, 100, len(self.vector)))
        return self.drawn[-1]


def signing_key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"client {number}".encode()).digest())


def roster_of(numbers: Sequence[int]) -> Roster:
    return Roster(tuple(RosterClient(i, f"Hospital {i}", signing_key(i).public_key().public_bytes_raw()) for i in numbers))


def terms_of(**changes: object) -> Terms:
    terms = Terms("r-1", bytes(32), roster_of(range(N)), least=3, colluders=1, attempts=6, bits=32, count=D)
    return replace(terms, **changes)  # type: ignore[arg-type]


class Played:
    """All parties of a run in one process.

    Args:
        kind: class of the members. told: terms that single clients are told, instead of the server's.
    """

    def __init__(
        self,
        terms: Terms | None = None,
        *,
        kind: type[Member] = Member,
        told: Mapping[int, Terms] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.terms = terms or terms_of()
        self.kind, self.told, self.folder = kind, told or {}, folder
        vectors = np.random.default_rng(0).integers(-1000, 1000, (N, self.terms.count))
        self.releases = {i: MadeUpRelease(vectors[i]) for i in range(N)}
        self.members = {i: self.member(i) for i in range(N)}
        self.server = self.coordinator()

    def member(self, client: int) -> Member:
        """A client as after a restart: with what is on its disk, and nothing of its memory."""
        return self.kind(client, signing_key(client), self.told.get(client, self.terms), self._file(f"client-{client}"))

    def coordinator(self) -> Coordinator:
        return Coordinator(self.terms, self._file("server"))

    def _file(self, name: str) -> AttemptFile:
        return AttemptFile(None if self.folder is None else self.folder / f"{name}.jsonl")

    def ready(self, clients: Sequence[int] = range(N), told: bytes = TOLD) -> dict[int, bytes]:
        return {i: self.members[i].ready(ROUND, told, self.releases[i]) for i in clients}

    def keys(self, clients: Sequence[int] = range(N)) -> dict[int, tuple[bytes, bytes]]:
        return {i: read_ready(answer) for i, answer in self.ready(clients).items()}

    def begun(self, clients: Sequence[int] = range(N)) -> Coordinator:
        """The server, with these clients ready."""
        self.server.begin(ROUND, TOLD, self.releases[0])
        for client, answer in self.ready(clients).items():
            assert self.server.ready(client, answer) == ""
        return self.server

    def request(self, clients: Sequence[int] = range(N), attempt: int = 1) -> bytes:
        """A request that an honest server would send."""
        return set_request(attempt, self.keys(clients))

    def answered(self, request: bytes, clients: Sequence[int]) -> list[str]:
        return [self.server.masked(i, self.members[i].masked(request)) for i in clients]

    def plain_sum(self, clients: Sequence[int]) -> NDArray[np.int64]:
        """The sum of what these clients drew last."""
        return np.sum([self.releases[i].drawn[-1] for i in clients], axis=0)
