"""Integers packed to the bits that their bounds need: blocks of 65,536, each with its least value and a width.

A block is 9 bytes, the least value (int64, little endian) and a number of bits b (0 to 64), and then the differences to the
least value, b bits each, most significant bit first, filled up with zeros to a whole byte. Least value and width follow from
bounds that both sides have from the plan: the length of what is sent tells nothing of the integers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK = 2**16
MOST = 2**63
"""Bound of any int64."""
_HEAD = struct.Struct("<qB")

Integers = NDArray[np.int64]
Bounds = Sequence[tuple[int, int]]
"""Groups of consecutive integers: where each ends, and the largest absolute value in it."""


def packed(integers: Integers, bounds: Bounds) -> bytes:
    """int64 [n] as bytes.

    Raises:
        ValueError: an integer beyond its bound, or bounds that do not cover all.
    """
    count = len(integers)
    return b"".join(
        _packed_block(integers[start:stop], bound) for start, (stop, bound) in _blocks(count, by_block(bounds, count))
    )


def unpacked(content: bytes | memoryview, count: int) -> tuple[Integers, Bounds]:
    """The `count` integers that `packed` was given, and the bounds of their blocks.

    Raises:
        ValueError: the bytes are too few or too many, or not what `packed` writes.
    """
    found, bounds, place = np.empty(count, np.int64), list[tuple[int, int]](), 0
    for start in range(0, count, BLOCK):
        n = min(BLOCK, count - start)
        if len(content) < place + _HEAD.size:
            raise ValueError("packed integers end early")
        least, bits = _HEAD.unpack_from(content, place)
        if least > 0 or bits != _width(-least):
            raise ValueError("a block of packed integers whose width is not that of its bound")
        place += _HEAD.size
        size = -(-n * bits // 8)
        if len(content) < place + size:
            raise ValueError("packed integers end early")
        found[start : start + n] = _unpacked_block(content[place : place + size], n, bits, least)
        bounds.append((start + n, -least))
        place += size
    if place != len(content):
        raise ValueError("more bytes than packed integers")
    return found, bounds


def by_block(bounds: Bounds, count: int) -> list[tuple[int, int]]:
    """The bound of each block of `count` integers: the largest of those of the groups that it touches.

    Raises:
        ValueError: the groups do not cover `count` integers.
    """
    stops = [0, *(stop for stop, _ in bounds)]
    if stops != sorted(stops) or stops[-1] != count:
        raise ValueError(f"bounds for {stops[-1]} integers, and there are {count}")
    groups = list(zip(stops, stops[1:], (bound for _, bound in bounds), strict=False))
    ends = [min(start + BLOCK, count) for start in range(0, count, BLOCK)]
    return [(end, max(b for a, z, b in groups if a < end and z > (end - 1) // BLOCK * BLOCK)) for end in ends]


def _blocks(count: int, bounds: Bounds) -> Iterator[tuple[int, tuple[int, int]]]:
    return zip(range(0, count, BLOCK), bounds, strict=True)


def _width(bound: int) -> int:
    return min((2 * bound).bit_length(), 64)


def _packed_block(block: Integers, bound: int) -> bytes:
    if int(block.max()) > bound or int(block.min()) < -bound:
        raise ValueError("an integer beyond the bound that its plan gives")
    bits = _width(bound)
    differences = block.view(np.uint64) - np.uint64(-bound % 2**64)
    whole = differences.astype(">u8").view(np.uint8).reshape(-1, 8)
    needed = np.unpackbits(whole, axis=1)[:, 64 - bits :]
    return _HEAD.pack(-bound, bits) + np.packbits(needed).tobytes()


def _unpacked_block(content: bytes | memoryview, count: int, bits: int, least: int) -> Integers:
    whole = np.zeros((count, 64), np.uint8)
    if bits:
        needed = np.unpackbits(np.frombuffer(content, np.uint8))
        if needed[count * bits :].any():
            raise ValueError("packed integers that are not filled up with zeros")
        whole[:, 64 - bits :] = needed[: count * bits].reshape(count, bits)
    differences = np.packbits(whole, axis=1).view(">u8").ravel().astype(np.uint64)
    if differences.size and int(differences.max()) > -2 * least:
        raise ValueError("a packed integer beyond its bound")
    return (differences + np.uint64(least % 2**64)).view(np.int64)
