"""The roster of a federation: number, name and Ed25519 key of each client.

Institutions compare its digest without the server's help: whoever could put keys of its own on it could pose as clients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedveil.errors import ConfigError


@dataclass(frozen=True)
class RosterClient:
    """One client of a roster. key: its Ed25519 public key, 32 raw bytes."""

    number: int
    name: str
    key: bytes


@dataclass(frozen=True)
class Roster:
    """All clients of a federation, in ascending order of their numbers."""

    clients: tuple[RosterClient, ...]

    def __post_init__(self) -> None:
        numbers = [client.number for client in self.clients]
        if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 0:
            raise ConfigError(f"the clients of a roster are numbered from 0 and ascend, each number once; got {numbers}")
        for what in ("key", "name"):
            values = [getattr(client, what) for client in self.clients]
            if twice := [number for number, value in zip(numbers, values, strict=True) if values.count(value) > 1]:
                raise ConfigError(f"the clients {twice} of the roster have the same {what}: each client needs its own")
        if wrong := [client.number for client in self.clients if len(client.key) != 32 or not client.name]:
            raise ConfigError(f"the clients {wrong} of the roster need a name and a key of 32 bytes")

    @property
    def text(self) -> str:
        """Return the content of the roster's file."""
        lines = [f"# Digest, to compare with the other institutions: {self.digest.hex()}"]
        for client in self.clients:
            name = "".join(rf"\U{ord(c):08x}" if c in '"\\' or not c.isprintable() else c for c in client.name)
            lines += ["", "[[client]]", f"number = {client.number}", f'name = "{name}"', f'key = "{client.key.hex()}"']
        return "\n".join([*lines, ""])

    @cached_property
    def digest(self) -> bytes:
        """Return the SHA-256 that institutions compare: of number, name and key of each client."""
        parts = [p for c in self.clients for p in (c.number.to_bytes(8, "little"), c.name.encode(), c.key)]
        return hashlib.sha256(b"".join(len(p).to_bytes(4, "little") + p for p in (b"roster", *parts))).digest()

    @cached_property
    def keys(self) -> Mapping[int, bytes]:
        """Return the key of each client, ascending by number."""
        return {client.number: client.key for client in self.clients}

    def signed(self, client: int, signature: bytes, content: bytes) -> bool:
        """Return whether this client of the roster signed the content."""
        if client not in self.keys:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(self.keys[client]).verify(signature, content)
        except (InvalidSignature, ValueError):
            return False
        return True
