"""The server's side of secure aggregation: it checks who is ready, names a set, and adds up the whole set or nothing.

A round, bytes in and bytes out:

    coordinator.begin(round, told, plans)                    # told: sent to all clients, the same bytes
    coordinator.ready(client, answer)                        # for each answer; returns why it is refused, or ""
    while request := coordinator.name_set():                 # None: too few are left, or the attempts are used up
        coordinator.masked(client, answer)                   # for each of coordinator.members; or .failed(client, reason)
        if (total := coordinator.total()) is not None: ...   # None: somebody failed; name another set

Clients that fail are left out of the round, and after their second round with a failure out of the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedveil.secure_aggregation.attempt_file import AttemptFile
from fedveil.secure_aggregation.encoding import (
    ProtocolError,
    Terms,
    read_masked,
    read_ready,
    round_digest,
    set_digest,
    set_request,
    signed_key,
    signed_vector,
)
from fedveil.secure_aggregation.masks import Integers, Words, shared_secret, signed, unpacked

STRIKES = 2
"""Rounds with a failure after which a client takes no further part in the run."""


class SharedPlans(Protocol):
    """The plans of a round, which depend on the size of the set."""

    def plan(self, members: int) -> bytes:
        """Return the digest of the plan for a set of this size."""
        ...

    def plausible(self, total: Integers, members: int) -> bool:
        """Return whether the norm of a sum is one that honest clients can reach."""
        ...


class Coordinator:
    """The server in one run.

    Args:
        attempts: the server's file of named attempts and of failures of this run.
    """

    def __init__(self, terms: Terms, attempts: AttemptFile) -> None:
        self.terms, self.attempts = terms, attempts
        self._round, self._seen = -1, b""
        self._plans: SharedPlans | None = None
        self._ready: dict[int, tuple[bytes, bytes]] = {}
        self._failed = set[int]()
        self._set = b""
        self._words: Words | None = None
        self.members: tuple[int, ...] = ()
        self.vectors: dict[int, tuple[bytes, bytes]] = {}
        """Digest and signature of each vector of the attempt, as its client signed it."""

    @property
    def left_out(self) -> Mapping[int, str]:
        """Return the clients that take no further part in the run, each with its last failure."""
        failures: dict[int, dict[int, str]] = {}
        for row in self.attempts.rows:
            if "failed" in row:
                failures.setdefault(row["failed"], {})[row["round"]] = row["reason"]
        return {client: [*rounds.values()][-1] for client, rounds in failures.items() if len(rounds) >= STRIKES}

    @property
    def exhausted(self) -> bool:
        """Return whether all attempts are used up, so that the run ends."""
        return self.attempts.newest >= self.terms.attempts

    @property
    def set_digest(self) -> bytes:
        """Return S, the digest of the attempt."""
        return self._set

    def begin(self, round: int, told: bytes, plans: SharedPlans) -> None:
        """Begin a round; whoever was ready for an earlier one is not ready for this one.

        Args:
            told: the bytes that all clients are sent.
        """
        self._round, self._plans, self._ready, self.members = round, plans, {}, ()
        self._failed = set()
        self._seen = round_digest(self.terms, round, told, plans.plan(self.terms.least))

    def ready(self, client: int, answer: bytes) -> str:
        """Accept a client's answer to the round if the other clients will; return why not, or an empty string."""
        if client in self._failed or client in self.left_out:
            return f"client {client} has failed, and takes no further part in the {'round' if client in self._failed else 'run'}"
        try:
            key, signature = read_ready(answer)
            if not self.terms.roster.signed(client, signature, signed_key(self._seen, client, key)):
                raise ProtocolError(
                    f"client {client} is not on the roster, or did not sign its key for this round as it was told"
                )
            if any(key == other for i, (other, _) in self._ready.items() if i != client):
                raise ProtocolError(f"client {client} has the key of another client")
            shared_secret(X25519PrivateKey.generate(), key)
        except ProtocolError as problem:
            self.failed(client, str(problem))
            return str(problem)
        self._ready[client] = key, signature
        return ""

    def name_set(self) -> bytes | None:
        """Return the request of a new attempt, for all clients that are ready; attempt and set are on the disk before.

        Returns:
            None if fewer than the least set are ready, or all attempts are used up; the round is then skipped.
        """
        assert self._plans is not None, "begin a round first"
        self.members, self.vectors, self._words = (), {}, None
        if len(self._ready) < self.terms.least or self.exhausted:
            return None
        attempt, keys = self.attempts.newest + 1, dict(sorted(self._ready.items()))
        self._set = set_digest(self._seen, attempt, self._plans.plan(len(keys)), keys)
        self.attempts.write(round=self._round, attempt=attempt, members=[*keys], set=self._set.hex())
        self.members = tuple(keys)
        return set_request(attempt, keys)

    def masked(self, client: int, answer: bytes) -> str:
        """Accept a client's masked vector; return why it is refused, or an empty string. Late ones change nothing."""
        if client not in self.members or client not in self._ready or client in self.vectors:
            return f"client {client} was not asked for a vector in this attempt, or has sent it"
        try:
            vector, signature = read_masked(answer)
            if len(vector) != self.terms.count * self.terms.bits // 8:
                raise ProtocolError(f"client {client} sent a vector of {len(vector)} bytes, and the terms have another length")
            if not self.terms.roster.signed(client, signature, signed_vector(self._set, client, vector)):
                raise ProtocolError(f"client {client} did not sign its vector for this attempt")
        except ProtocolError as problem:
            self.failed(client, str(problem))
            return str(problem)
        words = unpacked(vector, self.terms.count, self.terms.bits)
        self._words = words if self._words is None else np.add(self._words, words, out=self._words)
        self.vectors[client] = hashlib.sha256(vector).digest(), signature
        return ""

    def failed(self, client: int, reason: str) -> None:
        """Leave a client out of the round, and record the failure; also for one that refuses, or that does not answer."""
        self._failed.add(client)
        self._ready.pop(client, None)
        self.vectors.pop(client, None)
        self.attempts.write(failed=client, round=self._round, reason=reason)

    def total(self) -> Integers | None:
        """Return the sum [d] of the whole set, or None if there is none: name another set then.

        Members without an answer have failed. A sum that honest clients cannot reach is dropped, and nobody is ready any more:
        it cannot be told who spoiled it.
        """
        assert self._plans is not None, "begin a round first"
        for client in self.members:
            if client in self._ready and client not in self.vectors:
                self.failed(client, "it did not answer the request for its masked vector")
        if not self.members or self.vectors.keys() != set(self.members) or self._words is None:
            return None
        total = signed(self._words, self.terms.bits)
        if not self._plans.plausible(total, len(self.members)):
            self._ready = {}
            self.attempts.write(round=self._round, spoiled=[*self.members])
            return None
        return total
