"""The wire format: one message as bytes, with a version, without pickle (docs/wire-format.md).

A message is read strictly: whatever is not exactly as `encoded` writes it raises `WireError`, and nothing else.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import FedveilError
from fedveil.flower.bit_packing import Bounds, packed, unpacked

VERSION = 2
LARGEST = 2**32
"""Bytes that a message may have."""

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
    """A message that is not of this format, or does not say what it must."""


class Kind(IntEnum):
    """What a message is."""

    ROUND = 1
    TASK = 2
    RELEASE = 3
    REFUSAL = 4
    OFFER = 5
    CONSENT = 6


@dataclass(frozen=True)
class WireMessage:
    """A message: plain JSON values by name, and arrays by name.

    Args:
        packed: of those arrays (int64) that travel packed, the bounds that give their widths.
    """

    kind: Kind
    fields: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    packed: Mapping[str, Bounds] = field(default_factory=dict)


def encoded(message: WireMessage) -> bytes:
    """The message as bytes."""
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
    """The message that `encoded` was given, of one of the expected kinds.

    Args:
        most_packed: integers that a packed array may have; nine bytes can stand for 65,536 of them.

    Raises:
        WireError: it is none, of another version, or of another kind.
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
    """Refuse a message that has not just these fields, or other arrays than these; raises WireError."""
    if wrong := sorted({*fields} ^ message.fields.keys()):
        raise WireError(f"a {message.kind.name.lower()} has the fields {', '.join(fields)}; too many or missing: {_named(wrong)}")
    if unknown := sorted(message.arrays.keys() - {*arrays}):
        raise WireError(f"a {message.kind.name.lower()} with unknown arrays: {_named(unknown)}")


def _named(names: Sequence[str]) -> str:
    return ", ".join(ascii(name[:40]) for name in names[:5])


def whole_number(message: WireMessage, name: str, least: int = 0, most: int = 2**62) -> int:
    """A field that is a whole number in that range; raises WireError for anything else."""
    value = message.fields.get(name)
    if type(value) is not int or not least <= value <= most:
        raise WireError(f"the field {name!r} must be a whole number from {least} to {most}")
    return value


def run_name(message: WireMessage) -> str:
    """The field `run`: a name that can be that of a folder; raises WireError for anything else."""
    value = text(message, "run", 100)
    if not value or not all(c.isalnum() or c in "-_" for c in value):
        raise WireError("the name of a run has letters, digits, - and _ only")
    return value


def text(message: WireMessage, name: str, most: int = 1000) -> str:
    """A field that is a text of at most so many characters, without control characters; raises WireError for anything else."""
    value = message.fields.get(name)
    if type(value) is not str or len(value) > most or not value.isprintable():
        raise WireError(f"the field {name!r} must be a printable text of at most {most} characters")
    return value


def digest(message: WireMessage, name: str) -> str:
    """A field of 64 lower-case hex digits; raises WireError for anything else."""
    value = message.fields.get(name)
    if type(value) is not str or not _DIGEST.fullmatch(value):
        raise WireError(f"the field {name!r} must be 64 lower-case hex digits")
    return value
