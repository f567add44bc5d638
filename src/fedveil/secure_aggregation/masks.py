"""Masks of secure aggregation: key agreement, streams, vectors modulo 2^b, and the size of b."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedveil.errors import ConfigError
from fedveil.secure_aggregation.encoding import ProtocolError, encode

Integers = NDArray[np.int64]
Words = NDArray[Any]
"""Unsigned integers of 32 bits, or of 64 if a coordinate has more than 32."""

_BLOCK = 2**16
_ZEROS = bytes(8 * _BLOCK)
_PRIME = 2**255 - 19


def shared_secret(private: X25519PrivateKey, public: bytes) -> bytes:
    """Return the X25519 secret of a pair.

    Raises:
        ProtocolError: the public key is of low order, or not in its only form.
    """
    try:
        if int.from_bytes(public, "little") >= _PRIME:
            raise ValueError
        return private.exchange(X25519PublicKey.from_public_bytes(public))  # refuses the secret zero
    except ValueError as problem:
        raise ProtocolError("a key of low order, or one that is no X25519 key, protects nothing") from problem


def mask_key(secret: bytes, of_set: bytes, low: int, high: int) -> bytes:
    """Return the AES key of the mask of two clients, low < high. secret: of the pair. of_set: S, the attempt's digest."""
    return HKDF(SHA256(), 32, of_set, encode("mask", low, high)).derive(secret)


def masked(vector: Integers, keys: Mapping[int, bytes], client: int, bits: int) -> bytes:
    """Return a client's masked vector as it is sent: b / 8 bytes a coordinate, little endian.

    Args:
        vector: [d], noise included. keys: of the masks that the client shares with each other client of the set.
    """
    kind = _word(bits)
    words: Words = vector.astype(kind)  # two's complement, modulo the size of a word, of which 2^b is a divisor
    streams = [(j > client, Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()) for j, key in keys.items()]
    mask = np.empty(kind.itemsize * _BLOCK + 15, np.uint8)  # the cipher asks for one more block
    for start in range(0, len(words), _BLOCK):
        part = words[start : start + _BLOCK]
        size = kind.itemsize * len(part)
        for add, stream in streams:
            stream.update_into(memoryview(_ZEROS)[:size], mask.data)
            (np.add if add else np.subtract)(part, mask[:size].view(kind), out=part)
    return _packed(words, bits)


def unpacked(vector: bytes, count: int, bits: int) -> Words:
    """Return a masked vector [count] as words modulo 2^b, to be added up."""
    kind, size = _word(bits), bits // 8
    content = np.frombuffer(vector, np.uint8).reshape(count, size)
    words = np.zeros((count, kind.itemsize), np.uint8)
    words[:, :size] = content
    return words.reshape(-1).view(kind)


def signed(words: Words, bits: int) -> Integers:
    """Return a sum of words as integers: the representatives modulo 2^b in [-2^(b-1), 2^(b-1))."""
    shift = 8 * words.itemsize - bits
    return ((words << shift).view(words.dtype.str.replace("u", "i")) >> shift).astype(np.int64)


def needed_bits(most: float, std: float, clients: int, draws: float) -> int:
    """Return b, a multiple of 8, such that an honest sum wraps in one of 2^64 runs at most: 2^(b-1) > n C/h + k s sqrt(n) + n.

    Args:
        most: C / h, the largest coordinate of one client before noise, in grid steps. std: s, of one client's noise, in grid
            steps. clients: n. draws: coordinates of all sums of a run.

    Raises:
        ConfigError: more than 64 bits are needed.
    """
    deviations = math.sqrt(2 * math.log(2 * draws * 2.0**64))  # P(|N| > k) <= 2 exp(-k^2 / 2)
    largest = clients * most + deviations * std * math.sqrt(clients) + clients
    bits = 8 * math.ceil((math.log2(largest) + 1 + 1e-9) / 8)
    if bits > 64:
        raise ConfigError(f"a masked coordinate would need {bits} bits, and 64 are the most: lower privacy.grid_bits")
    return max(bits, 8)


def _word(bits: int) -> np.dtype[np.uint32] | np.dtype[np.uint64]:
    return np.dtype("<u4") if bits <= 32 else np.dtype("<u8")


def _packed(words: Words, bits: int) -> bytes:
    return words.view(np.uint8).reshape(len(words), -1)[:, : bits // 8].tobytes()
