"""A second implementation of the bytes of secure aggregation, in whole numbers of Python, from their description alone.

The description is the section "Bytes" of docs/secure-aggregation.md. Ed25519 and AES come from `cryptography`; key agreement
(RFC 7748), key derivation (RFC 5869), masks and sums are written out.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

PRIME = 2**255 - 19


def enc(name: str, *parts: bytes | str | int) -> bytes:
    result = b""
    for part in (name, *parts):
        if isinstance(part, int):
            part = bytes(part >> 8 * k & 255 for k in range(8))
        raw = part.encode() if isinstance(part, str) else part
        result += len(raw).to_bytes(4, "little") + raw
    return result


def sha(name: str, *parts: bytes | str | int) -> bytes:
    return hashlib.sha256(enc(name, *parts)).digest()


def x25519(private: bytes, public: bytes) -> bytes:
    """Montgomery ladder on Curve25519."""
    k = int.from_bytes(private, "little") & ~7 & ~(1 << 255) | 1 << 254
    u = int.from_bytes(public, "little") & ~(1 << 255)
    x2, z2, x3, z3, swap = 1, 0, u, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, z2, x3, z3 = x3, z3, x2, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a, b * b, d * a, c * b
        x3, z3 = (da + cb) ** 2 % PRIME, u * (da - cb) ** 2 % PRIME
        x2, z2 = aa * bb % PRIME, (aa - bb) * (aa + 121665 * (aa - bb)) % PRIME
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, PRIME - 2, PRIME) % PRIME).to_bytes(32, "little")


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    key = hmac.digest(salt, secret, "sha256")
    return hmac.digest(key, info + b"\x01", "sha256")


def stream(key: bytes, count: int, bits: int) -> list[int]:
    size = 4 if bits <= 32 else 8
    content = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(size * count))
    return [int.from_bytes(content[k : k + size], "little") % 2**bits for k in range(0, size * count, size)]


class SecondClient:
    """A client that follows the description, and checks nothing.

    Args:
        key, signing: raw private keys, X25519 of the round and Ed25519. roster: public keys. bounds: least, colluders, attempts,
            bits, count.
    """

    def __init__(
        self, client: int, key: bytes, signing: bytes, run: str, offer: bytes, roster: Mapping[int, bytes], bounds: Sequence[int]
    ) -> None:
        self.client, self.key, self.signing = client, key, Ed25519PrivateKey.from_private_bytes(signing)
        least, colluders, attempts, self.bits, self.count = bounds
        keys = [part for i in sorted(roster) for part in (i, roster[i])]
        self.terms = sha("terms", run, offer, least, colluders, attempts, 0, self.bits, self.count, *keys)

    def ready(self, round: int, told: bytes, plan: bytes) -> bytes:
        self.seen = sha("round", self.terms, round, hashlib.sha256(told).digest(), plan)
        public = x25519(self.key, (9).to_bytes(32, "little"))
        return enc("ready", public, self.signing.sign(enc("key", self.seen, self.client, public)))

    def set_digest(self, attempt: int, plan: bytes, keys: Mapping[int, bytes]) -> bytes:
        return sha("set", self.seen, attempt, plan, *[part for i in sorted(keys) for part in (i, keys[i])])

    def mask(self, other: int, of_set: bytes, keys: Mapping[int, bytes]) -> list[int]:
        info = enc("mask", min(self.client, other), max(self.client, other))
        return stream(hkdf(x25519(self.key, keys[other]), of_set, info), self.count, self.bits)

    def masked(self, attempt: int, plan: bytes, keys: Mapping[int, bytes], vector: Sequence[int]) -> bytes:
        of_set, total = self.set_digest(attempt, plan, keys), list(vector)
        for other in sorted(keys):
            if other != self.client:
                sign = 1 if other > self.client else -1
                total = [x + sign * m for x, m in zip(total, self.mask(other, of_set, keys), strict=True)]
        content = b"".join((x % 2**self.bits).to_bytes(self.bits // 8, "little") for x in total)
        statement = enc("masked", of_set, self.client, hashlib.sha256(content).digest())
        return enc("masked", content, self.signing.sign(statement))


def opened(vectors: Sequence[bytes], bits: int) -> list[int]:
    """The sum of masked vectors, in [-2^(bits-1), 2^(bits-1))."""
    size = bits // 8
    rows = [[int.from_bytes(v[k : k + size], "little") for k in range(0, len(v), size)] for v in vectors]
    return [(sum(column) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for column in zip(*rows, strict=True)]
