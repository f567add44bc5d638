"""The bytes of secure aggregation, version 1: what is hashed, signed and sent (docs/secure-aggregation.md).

Everything has one form: a name and parts, each after its length. So two different lists of parts never have the same bytes,
and a signature for one purpose is never one for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from fedveil.errors import ConfigError, FedveilError
from fedveil.secure_aggregation.roster import Roster

Part = bytes | str | int
Keys = Mapping[int, tuple[bytes, bytes]]
"""The X25519 key of each client that is ready, and its signature; clients ascend."""


class ProtocolError(FedveilError):
    """A message of secure aggregation that is refused; its text says why, and nothing about anybody's data."""


def encode(name: str, *parts: Part) -> bytes:
    """Return the bytes of a name and its parts: for each its length (4 bytes, little endian), then its bytes.

    An integer has 8 bytes, little endian.
    """
    return b"".join(piece for part in (name, *parts) for piece in _piece(part))


def _piece(part: Part) -> Iterator[bytes]:
    content = part.encode() if isinstance(part, str) else part.to_bytes(8, "little") if isinstance(part, int) else part
    yield len(content).to_bytes(4, "little")
    yield content


def digest(name: str, *parts: Part) -> bytes:
    """Return the SHA-256 of a name and its parts."""
    return hashlib.sha256(encode(name, *parts)).digest()


def decode(message: bytes, name: str) -> list[bytes]:
    """Return the parts of a message with this name.

    Raises:
        ProtocolError: it is of another kind, or its lengths do not add up.
    """
    parts, start, view = [], 0, memoryview(message)
    while start < len(view):
        end = start + 4 + int.from_bytes(view[start : start + 4], "little")
        if start + 4 > len(view) or end > len(view):
            raise ProtocolError(f"a message of {len(view)} bytes ends within a part: send it again as it was made")
        parts.append(bytes(view[start + 4 : end]))
        start = end
    if not parts or parts[0] != name.encode():
        raise ProtocolError(f"a message of another kind than {name!r}, or none")
    return parts[1:]


@dataclass(frozen=True)
class Terms:
    """Terms that all parties of a run agree on; a client that is told other terms shares no mask with the others.

    Args:
        run: name of the run. offer: SHA-256 of the configuration, without the client's own number.
        least: m, the smallest set whose sum may be opened. colluders: c, the number of keys of the roster that may belong to
            the server, or to a client that works with it; at least 1, since each client knows its own noise.
        attempts: how often a client answers with a masked vector in the whole run, at most.
        bits: b, the size of a masked coordinate; sums are modulo 2^b. count: d, the number of coordinates.
    """

    run: str
    offer: bytes
    roster: Roster
    least: int
    colluders: int
    attempts: int
    bits: int
    count: int

    def __post_init__(self) -> None:
        if self.colluders < 1:
            raise ConfigError(f"colluders = {self.colluders}: each client knows its own noise, so give at least 1")
        if not self.colluders + 2 <= self.least <= len(self.roster.keys):
            raise ConfigError(
                f"the least set of {self.least} clients must lie between colluders + 2 = {self.colluders + 2}, so that two "
                f"honest clients hide each other, and the {len(self.roster.keys)} clients of the roster"
            )
        if self.attempts < 1 or self.count < 1:
            raise ConfigError(f"a run needs at least 1 attempt and 1 coordinate, got {self.attempts} and {self.count}")
        if self.bits not in range(8, 72, 8):
            raise ConfigError(f"a masked coordinate has 8, 16, ... or 64 bits, got {self.bits}")

    @cached_property
    def digest(self) -> bytes:
        """Return the digest of the terms."""
        keys = [part for client, key in self.roster.keys.items() for part in (client, key)]
        bounds = self.least, self.colluders, self.attempts, 0, self.bits, self.count  # 0: no double masks
        return digest("terms", self.run, self.offer, *bounds, *keys)


def round_digest(terms: Terms, round: int, told: bytes, plan: bytes) -> bytes:
    """Return W, the digest of a round as one client sees it.

    Args:
        told: the server's bytes of the round. plan: digest of the plan for the least set.
    """
    return digest("round", terms.digest, round, hashlib.sha256(told).digest(), plan)


def set_digest(seen: bytes, attempt: int, plan: bytes, keys: Keys) -> bytes:
    """Return S, the digest of an attempt. seen: W. plan: digest of the plan for a set of this size."""
    return digest("set", seen, attempt, plan, *[part for i, (key, _) in keys.items() for part in (i, key)])


def signed_key(seen: bytes, client: int, key: bytes) -> bytes:
    """Return what a client signs when it is ready. seen: W."""
    return encode("key", seen, client, key)


def signed_vector(of_set: bytes, client: int, vector: bytes) -> bytes:
    """Return what a client signs with its masked vector. of_set: S."""
    return encode("masked", of_set, client, hashlib.sha256(vector).digest())


def ready_answer(key: bytes, signature: bytes) -> bytes:
    """Return a client's answer to a round."""
    return encode("ready", key, signature)


def read_ready(message: bytes) -> tuple[bytes, bytes]:
    """Return the key and the signature of a client's answer to a round."""
    parts = decode(message, "ready")
    if [len(part) for part in parts] != [32, 64]:
        raise ProtocolError("an answer to a round is a key of 32 bytes and a signature of 64")
    return parts[0], parts[1]


def set_request(attempt: int, keys: Keys) -> bytes:
    """Return the server's request for masked vectors: an attempt, and its set."""
    return encode("set", attempt, *[part for i, (key, signature) in keys.items() for part in (i, key, signature)])


def read_set(message: bytes) -> tuple[int, dict[int, tuple[bytes, bytes]]]:
    """Return the attempt and the set of a request.

    Raises:
        ProtocolError: it is no request, or clients do not ascend.
    """
    attempt, *parts = decode(message, "set") or [b""]
    if len(attempt) != 8 or len(parts) % 3 or [len(part) for part in parts] != [8, 32, 64] * (len(parts) // 3):
        raise ProtocolError("a request for masked vectors is an attempt, and a number, a key and a signature for each client")
    numbers = [int.from_bytes(part, "little") for part in parts[::3]]
    if numbers != sorted(set(numbers)):
        raise ProtocolError("the clients of a set must ascend, and each is in it once")
    return int.from_bytes(attempt, "little"), dict(zip(numbers, zip(parts[1::3], parts[2::3], strict=True), strict=True))


def masked_answer(vector: bytes, signature: bytes) -> bytes:
    """Return a client's answer to a request for masked vectors."""
    return encode("masked", vector, signature)


def read_masked(message: bytes) -> tuple[bytes, bytes]:
    """Return the masked vector and the signature of an answer."""
    parts = decode(message, "masked")
    if len(parts) != 2 or len(parts[1]) != 64:
        raise ProtocolError("an answer with a masked vector is the vector and a signature of 64 bytes")
    return parts[0], parts[1]
