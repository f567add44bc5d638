"""Integers packed to the bits that they need: blocks of 65,536, each with its least value and the differences to it.

A block is 9 bytes, the least value (int64, little endian) and the number of bits b of the largest difference (0 to 64), and then
the differences, b bits each, most significant bit first, filled up with zeros to a whole byte. The width of a block follows from
the integers that leave, so it tells nothing beyond them.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

BLOCK = 2**16
_HEAD = struct.Struct("<qB")

Integers = NDArray[np.int64]


def packed(integers: Integers) -> bytes:
    """int64 [n] as bytes."""
    return b"".join(_packed_block(integers[start : start + BLOCK]) for start in range(0, len(integers), BLOCK))


def unpacked(content: bytes | memoryview, count: int) -> Integers:
    """The `count` integers that `packed` was given.

    Raises:
        ValueError: the bytes are too few or too many, or a width is impossible.
    """
    found, place = np.empty(count, np.int64), 0
    for start in range(0, count, BLOCK):
        n = min(BLOCK, count - start)
        if len(content) < place + _HEAD.size:
            raise ValueError("packed integers end early")
        least, bits = _HEAD.unpack_from(content, place)
        place += _HEAD.size
        size = -(-n * bits // 8)
        if bits > 64 or len(content) < place + size:
            raise ValueError("packed integers end early, or are wider than 64 bits")
        found[start : start + n] = _unpacked_block(content[place : place + size], n, bits, least)
        place += size
    if place != len(content):
        raise ValueError("more bytes than packed integers")
    return found


def _packed_block(block: Integers) -> bytes:
    least = int(block.min())
    differences = block.view(np.uint64) - np.uint64(least % 2**64)
    bits = int(differences.max()).bit_length()
    whole = differences.astype(">u8").view(np.uint8).reshape(-1, 8)
    needed = np.unpackbits(whole, axis=1)[:, 64 - bits :]
    return _HEAD.pack(least, bits) + np.packbits(needed).tobytes()


def _unpacked_block(content: bytes | memoryview, count: int, bits: int, least: int) -> Integers:
    whole = np.zeros((count, 64), np.uint8)
    if bits:
        whole[:, 64 - bits :] = np.unpackbits(np.frombuffer(content, np.uint8), count=count * bits).reshape(count, bits)
    differences = np.packbits(whole, axis=1).view(">u8").ravel().astype(np.uint64)
    return (differences + np.uint64(least % 2**64)).view(np.int64)
