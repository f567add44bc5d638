"""A client's side of secure aggregation: ready for a round, then masked in attempts; it refuses what would reveal more.

A round of one client, bytes in and bytes out:

    answer = member.ready(round, told, release)     # exchange 1: trains, then answers with a fresh key
    answer = member.masked(request)                 # exchange 2, in each attempt that names a set with this client

Both raise ProtocolError with a reason that may be sent back. The key of a round is in memory only. A client that restarts is
ready anew, with another key; requests with the old one are refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedveil.errors import ConfigError
from fedveil.secure_aggregation.attempt_file import AttemptFile
from fedveil.secure_aggregation.encoding import (
    Keys,
    ProtocolError,
    Terms,
    masked_answer,
    read_set,
    ready_answer,
    round_digest,
    set_digest,
    signed_key,
    signed_vector,
)
from fedveil.secure_aggregation.masks import Integers, mask_key, masked, shared_secret


class SharedRelease(Protocol):
    """One client's release of a round, which carries its share of the noise."""

    def plan(self, members: int) -> bytes:
        """Return the digest of the plan for a set of this size, known before training.

        Raises:
            FedveilError: it costs more than the client agreed to.
        """
        ...

    def train(self) -> None:
        """Train; a client whose training fails releases zero with noise."""
        ...

    def noisy(self, members: int) -> Integers:
        """Return the clipped update [d] on the grid of the plan for a set of this size, with fresh noise in each call."""
        ...


@dataclass
class _OpenRound:
    """Round for which the client is ready. seen: its digest W. newest: the last request, and its answer."""

    number: int
    seen: bytes
    private: X25519PrivateKey
    answer: bytes
    release: SharedRelease
    newest: tuple[bytes, bytes] = (b"", b"")


class Member:
    """One client in one run.

    Args:
        client: its number on the roster. signing: its Ed25519 key. terms: as the client has agreed to them.
        attempts: the client's file of answered attempts of this run.
    """

    def __init__(self, client: int, signing: Ed25519PrivateKey, terms: Terms, attempts: AttemptFile) -> None:
        if terms.roster.keys.get(client) != signing.public_key().public_bytes_raw():
            raise ConfigError(
                f"client {client} has another key on the roster: give the key of which the roster has the public half"
            )
        self.client, self.terms, self.attempts = client, terms, attempts
        self._signing = signing
        self._open: _OpenRound | None = None

    def ready(self, round: int, told: bytes, release: SharedRelease) -> bytes:
        """Train for a round, and return the answer with a fresh key; the same round gets the same answer.

        Args:
            told: the server's bytes of the round, which are the same for all clients.
        """
        seen = round_digest(self.terms, round, told, release.plan(self.terms.least))
        if self._open is None or self._open.seen != seen:
            self._open = None
            release.train()
            private = X25519PrivateKey.generate()
            key = private.public_key().public_bytes_raw()
            answer = ready_answer(key, self._signing.sign(signed_key(seen, self.client, key)))
            self._open = _OpenRound(round, seen, private, answer, release)
        return self._open.answer

    def masked(self, request: bytes) -> bytes:
        """Return the masked vector of an attempt; the attempt is on the disk before. The same request gets the same bytes.

        Raises:
            ProtocolError: the request is refused. FedveilError: the plan costs too much, or the attempt cannot be recorded.
        """
        attempt, keys = read_set(request)
        now = self._open
        if now is None:
            raise ProtocolError("this client is not ready for a round: it may have restarted; ask it to be ready first")
        if now.newest[0] == request:
            return now.newest[1]
        self._check(now, attempt, keys)
        plan = now.release.plan(len(keys))
        of_set = set_digest(now.seen, attempt, plan, keys)
        masks = {}
        for j, (key, _) in keys.items():
            if j != self.client:
                masks[j] = mask_key(shared_secret(now.private, key), of_set, min(self.client, j), max(self.client, j))
        noisy = now.release.noisy(len(keys))
        if noisy.shape != (self.terms.count,):
            raise ConfigError(f"a release of shape {noisy.shape}, and the terms have {self.terms.count} coordinates")
        vector = masked(noisy, masks, self.client, self.terms.bits)
        self.attempts.write(
            round=now.number,
            attempt=attempt,
            members=[*keys],
            set=of_set.hex(),
            plan=plan.hex(),
            vector=hashlib.sha256(vector).hexdigest(),
        )
        now.newest = request, masked_answer(vector, self._signing.sign(signed_vector(of_set, self.client, vector)))
        return now.newest[1]

    def _check(self, now: _OpenRound, attempt: int, keys: Keys) -> None:
        """Refuse an attempt that would reveal more than the sum of a large enough set, or that was not agreed to."""
        terms, newest = self.terms, self.attempts.newest
        if attempt <= newest:
            raise ProtocolError(f"attempt {attempt}: this client has answered attempt {newest}, and answers newer ones only")
        if attempt > terms.attempts:
            raise ProtocolError(f"attempt {attempt}: the run has {terms.attempts} attempts, and they are used up")
        if len(keys) < terms.least:
            raise ProtocolError(f"attempt {attempt}: a set of {len(keys)} clients, and {terms.least} are the least")
        if self.client not in keys or now.answer != ready_answer(*keys[self.client]):
            raise ProtocolError(f"attempt {attempt}: client {self.client} is not in the set with the key of this round")
        if len({key for key, _ in keys.values()}) < len(keys):
            raise ProtocolError(f"attempt {attempt}: two clients of the set have the same key")
        for other, (key, signature) in keys.items():
            if other not in terms.roster.keys:
                raise ProtocolError(f"attempt {attempt}: client {other} of the set is not on the roster")
            if not terms.roster.signed(other, signature, signed_key(now.seen, other, key)):
                raise ProtocolError(
                    f"attempt {attempt}: the key of client {other} is not signed for this round as client {self.client} sees "
                    f"it; the two were told different things, or somebody else made the key"
                )
