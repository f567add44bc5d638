"""The wire format: messages as bytes, without pickle, with integers packed to the bits that they need; carried by Flower's.

A block is 9 bytes, the least value (int64, little endian) and a number of bits b (0 to 64), then the differences to the least
value, b bits each, most significant bit first, padded with zeros to a whole byte. Least value and width follow from bounds that
both sides have from the plan: so the length reveals nothing about the integers.

A message is read strictly: anything not exactly as `encoded` writes it raises `WireError`, and nothing else.

Parts that several messages share, such as the model of a round, are sent once: Flower stores what it carries by content.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import FedveilError

BLOCK = 2**16
MOST = 2**63
"""Bound of any int64."""
_BLOCK_HEAD = struct.Struct("<qB")

Integers = NDArray[np.int64]
Bounds = Sequence[tuple[int, int]]
"""Groups of consecutive integers: the end of each, and the largest absolute value in it."""


def packed(integers: Integers, bounds: Bounds) -> bytes:
    """Return int64 [n] as bytes.

    Raises:
        ValueError: an integer exceeds its bound, or the bounds do not cover all.
    """
    count = len(integers)
    return b"".join(
        _packed_block(integers[start:stop], bound) for start, (stop, bound) in _blocks(count, by_block(bounds, count))
    )


def unpacked(content: bytes | memoryview, count: int) -> tuple[Integers, Bounds]:
    """Return the `count` integers that were passed to `packed`, and the bounds of their blocks.

    Raises:
        ValueError: the bytes are too few or too many, or not as `packed` writes them.
    """
    integers, bounds, place = np.empty(count, np.int64), list[tuple[int, int]](), 0
    for start in range(0, count, BLOCK):
        n = min(BLOCK, count - start)
        if len(content) < place + _BLOCK_HEAD.size:
            raise ValueError("packed integers end early")
        least, bits = _BLOCK_HEAD.unpack_from(content, place)
        if least > 0 or bits != _width(-least):
            raise ValueError("a block of packed integers whose width is not that of its bound")
        place += _BLOCK_HEAD.size
        size = -(-n * bits // 8)
        if len(content) < place + size:
            raise ValueError("packed integers end early")
        integers[start : start + n] = _unpacked_block(content[place : place + size], n, bits, least)
        bounds.append((start + n, -least))
        place += size
    if place != len(content):
        raise ValueError("there are more bytes than the packed integers take")
    return integers, bounds


def by_block(bounds: Bounds, count: int) -> list[tuple[int, int]]:
    """Return the bound of each block of `count` integers: the largest bound of the groups that overlap it.

    Raises:
        ValueError: the groups do not cover `count` integers.
    """
    stops = [0, *(stop for stop, _ in bounds)]
    if stops != sorted(stops) or stops[-1] != count:
        raise ValueError(f"the bounds are for {stops[-1]} integers, and there are {count}")
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
    return _BLOCK_HEAD.pack(-bound, bits) + np.packbits(needed).tobytes()


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


VERSION = 2
LARGEST = 2**32
"""Largest size of a message in bytes."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAGIC = b"FDVL"
_HEAD = struct.Struct("<4sHBBI")
_MOST_HEADER = 2**22
_TYPES: Mapping[str, np.dtype[Any]] = {
    "f4": np.dtype("<f4"),
    "f8": np.dtype("<f8"),
    "i4": np.dtype("<i4"),
    "i8": np.dtype("<i8"),
    "u1": np.dtype("u1"),
    "b1": np.dtype("bool"),
}
_PACKED = "packed"


class WireError(FedveilError):
    """Raised for a message that is not in this format, or lacks a required value."""


class Kind(IntEnum):
    """Kind of a message."""

    ROUND = 1
    TASK = 2
    RELEASE = 3
    REFUSAL = 4
    OFFER = 5
    CONSENT = 6
    READY = 7
    SET = 8
    MASKED = 9


@dataclass(frozen=True)
class WireMessage:
    """A message: plain JSON values by name, and arrays by name.

    Args:
        packed: the bounds that determine the widths of packed arrays (int64), by name.
    """

    kind: Kind
    fields: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    packed: Mapping[str, Bounds] = field(default_factory=dict)


def encoded(message: WireMessage) -> bytes:
    """Return the message as bytes."""
    listed, parts = [], []
    for name, array in message.arrays.items():
        if name in message.packed:
            parts.append(packed(array.ravel(), message.packed[name]))
            listed.append([name, _PACKED, list(array.shape), len(parts[-1])])
        else:
            kind = next(kind for kind, dtype in _TYPES.items() if dtype == array.dtype)
            parts.append(np.ascontiguousarray(array).tobytes())
            listed.append([name, kind, list(array.shape), len(parts[-1])])
    header = _header({"fields": dict(message.fields), "arrays": listed})
    return b"".join([_HEAD.pack(_MAGIC, VERSION, message.kind, 0, len(header)), header, *parts])


def decoded(content: bytes, *expected: Kind, most_packed: int = 0) -> WireMessage:
    """Return the message that was passed to `encoded`, if it is of one of the expected kinds.

    Args:
        most_packed: largest size of a packed array; nine bytes can stand for 65,536 integers.

    Raises:
        WireError: it is invalid, of another version, or of another kind.
    """
    try:
        return _decoded(content, expected, most_packed)
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, MemoryError, AttributeError) as problem:
        raise WireError(f"a damaged message ({type(problem).__name__})") from None


def _decoded(content: bytes, expected: tuple[Kind, ...], most_packed: int) -> WireMessage:
    if not _HEAD.size <= len(content) <= LARGEST:
        raise WireError(f"a message has {_HEAD.size} to {LARGEST} bytes, this one has {len(content)}")
    magic, version, number, zero, size = _HEAD.unpack_from(content)
    if magic != _MAGIC or zero:
        raise WireError("not a message of fedveil")
    if version != VERSION:
        raise WireError(f"a message of protocol version {version}; this side speaks version {VERSION}: install the same fedveil")
    if number not in expected:
        raise WireError(f"a message of kind {number} where {' or '.join(kind.name.lower() for kind in expected)} was due")
    body = _HEAD.size + size
    if size > _MOST_HEADER or body > len(content):
        raise WireError("a message that ends early")
    header = json.loads(content[_HEAD.size : body].decode())
    if _header(header) != content[_HEAD.size : body]:
        raise WireError("a header that is not written as this format writes it")
    if type(header) is not dict or sorted(header) != ["arrays", "fields"] or type(header["fields"]) is not dict:
        raise WireError("a message without fields and arrays")
    arrays: dict[str, NDArray[Any]] = {}
    bounds: dict[str, Bounds] = {}
    place, view = body, memoryview(content)
    for name, kind, shape, length in header["arrays"]:
        if type(name) is not str or name in arrays or type(length) is not int or length < 0 or place + length > len(content):
            raise WireError("a message with arrays that do not fit")
        shape, part = _checked_shape(shape), view[place : place + length]
        if kind == _PACKED:
            if math.prod(shape) > most_packed:
                raise WireError(f"more than {most_packed} packed integers")
            integers, bounds[name] = unpacked(part, math.prod(shape))
            arrays[name] = integers.reshape(shape)
        else:
            arrays[name] = _array(kind, shape, part)
        place += length
    if place != len(content):
        raise WireError("a message with more bytes than it lists")
    return WireMessage(Kind(number), header["fields"], arrays, bounds)


def _header(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is not list or len(shape) > 32 or any(type(n) is not int or not 0 <= n <= LARGEST for n in shape):
        raise WireError("an array of impossible shape")
    return tuple(shape)


def _array(kind: Any, shape: tuple[int, ...], content: memoryview) -> NDArray[Any]:
    dtype = _TYPES[kind]
    if math.prod(shape) * dtype.itemsize != len(content):
        raise WireError("an array that does not fit its bytes")
    if kind == "b1" and any(value > 1 for value in set(bytes(content))):
        raise WireError("truth values other than 0 and 1")
    return np.frombuffer(content, dtype).reshape(shape).copy()


def require_parts(message: WireMessage, fields: Collection[str], arrays: Collection[str] = ()) -> None:
    """Refuse a message whose fields are not exactly these, or with other arrays than these; raise WireError."""
    if wrong := sorted({*fields} ^ message.fields.keys()):
        raise WireError(f"a {message.kind.name.lower()} has the fields {', '.join(fields)}; too many or missing: {_named(wrong)}")
    if unknown := sorted(message.arrays.keys() - {*arrays}):
        raise WireError(f"a {message.kind.name.lower()} with unknown arrays: {_named(unknown)}")


def _named(names: Sequence[str]) -> str:
    return ", ".join(ascii(name[:40]) for name in names[:5])


def whole_number(message: WireMessage, name: str, least: int = 0, most: int = 2**62) -> int:
    """Return a field that is a whole number in that range; raise WireError otherwise."""
    value = message.fields.get(name)
    if type(value) is not int or not least <= value <= most:
        raise WireError(f"the field {name!r} must be a whole number from {least} to {most}")
    return value


def run_name(message: WireMessage) -> str:
    """Return the field `run`, a name that is valid for a folder; raise WireError otherwise."""
    value = text(message, "run", 100)
    if not value or not all(c.isalnum() or c in "-_" for c in value):
        raise WireError("the name of a run has letters, digits, - and _ only")
    return value


def text(message: WireMessage, name: str, most: int = 1000) -> str:
    """Return a field that is a printable text with at most `most` characters; raise WireError otherwise."""
    value = message.fields.get(name)
    if type(value) is not str or len(value) > most or not value.isprintable():
        raise WireError(f"the field {name!r} must be a printable text of at most {most} characters")
    return value


def digest(message: WireMessage, name: str) -> str:
    """Return a field of 64 lower-case hex digits; raise WireError otherwise."""
    value = message.fields.get(name)
    if type(value) is not str or not _DIGEST.fullmatch(value):
        raise WireError(f"the field {name!r} must be 64 lower-case hex digits")
    return value


_RECORD, _STYPE = "fedveil", "fedveil.wire"


def record(parts: Sequence[bytes]) -> Any:
    """Return a RecordDict with these parts."""
    from flwr.app import Array, ArrayRecord, RecordDict

    arrays = {str(i): Array("uint8", (len(part),), _STYPE, part) for i, part in enumerate(parts)}
    return RecordDict({_RECORD: ArrayRecord(arrays)})


def parts_of(content: Any) -> list[bytes]:
    """Return the parts of a RecordDict; raise WireError if fedveil did not make it."""
    if list(content) != [_RECORD] or type(content[_RECORD]).__name__ != "ArrayRecord":
        raise WireError("a message that does not come from fedveil")
    arrays = list(content[_RECORD].items())
    if [name for name, _ in arrays] != [str(i) for i in range(len(arrays))] or any(a.stype != _STYPE for _, a in arrays):
        raise WireError("a message that does not come from fedveil")
    return [bytes(array.data) for _, array in arrays]


def instruction(node: int, parts: Sequence[bytes]) -> Any:
    """Return a message to a node."""
    from flwr.app import Message

    return Message(record(parts), dst_node_id=node, message_type="train")


def content_of(answer: Any) -> bytes | str:
    """Return the one part of an answer, or an error string."""
    if answer.has_error():
        return f"its machine answered with an error (code {answer.error.code}): {printable(answer.error.reason)}"
    try:
        (part,) = parts_of(answer.content)
    except ValueError:
        return "it answered with more or fewer parts than one"
    except WireError as problem:
        return str(problem)
    return part


def printable(text: object) -> str:
    """Return the beginning of an untrusted text, fit for a log."""
    return "".join(c if c.isprintable() else " " for c in str(text))[:500]
