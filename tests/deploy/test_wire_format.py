"""The wire format: exact round trips; whatever else arrives is refused with `WireError`, and with nothing else."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.deploy.wire_format import (
    BLOCK,
    MOST,
    Kind,
    WireError,
    WireMessage,
    by_block,
    decoded,
    digest,
    encoded,
    packed,
    require_parts,
    text,
    unpacked,
    whole_number,
)

INT64 = np.iinfo(np.int64)


@given(st.lists(st.integers(INT64.min, INT64.max), max_size=50), st.integers(0, 63))
def test_any_integers_come_back_and_their_length_is_that_of_the_bound(values: list[int], exponent: int) -> None:
    integers, bounds = np.array(values, np.int64), [(len(values), MOST)] * bool(values)
    found, read = unpacked(packed(integers, bounds), len(values))
    assert np.array_equal(found, integers)
    assert read == bounds
    small, bound = integers >> (63 - exponent), 2**exponent
    content = packed(small, [(len(values), bound)])
    assert np.array_equal(unpacked(content, len(values))[0], small)
    assert len(content) == len(packed(np.zeros_like(small), [(len(values), bound)]))


def test_a_block_has_the_width_of_the_largest_bound_in_it() -> None:
    """Two groups meet in the second block; a fourth, short block ends the vector."""
    rng, n = np.random.default_rng(0), 3 * BLOCK + 7
    bounds = [(BLOCK + 5, 2**20), (n, 2**27 + 1)]
    integers = np.rint(rng.normal(0, 2.0**14, n)).astype(np.int64)
    content = packed(integers, bounds)
    found, read = unpacked(content, n)
    assert np.array_equal(found, integers)
    assert read == by_block(bounds, n) == [(BLOCK, 2**20), *((end, 2**27 + 1) for end in (2 * BLOCK, 3 * BLOCK, n))]
    assert len(content) == 4 * 9 + BLOCK * 22 // 8 + 2 * BLOCK * 29 // 8 + -(-7 * 29 // 8)
    assert len(packed(np.zeros(n, np.int64), bounds)) == len(content)


@pytest.mark.parametrize(
    ("integers", "bounds"), [([3, -4], [(2, 3)]), ([4], [(1, 3)]), ([1, 2], [(1, 9)]), ([1, 2], []), ([1], [(2, 9)])]
)
def test_what_is_beyond_its_bound_or_has_none_is_never_sent(integers: list[int], bounds: Any) -> None:
    with pytest.raises(ValueError, match="bound"):
        packed(np.array(integers), bounds)


NINE = packed(np.arange(9), [(9, 8)])


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (b"", 1),
        (NINE[:-1], 9),
        (NINE + b"x", 9),
        (struct.pack("<qB", 0, 65) + bytes(99), 9),
        (struct.pack("<qB", -8, 4) + NINE[9:], 9),
        (struct.pack("<qB", 8, 5) + NINE[9:], 9),
        (NINE[:9] + b"\xff" + NINE[10:], 9),
        (NINE[:-1] + bytes([NINE[-1] | 1]), 9),
    ],
)
def test_packed_integers_in_another_form_are_refused(content: bytes, count: int) -> None:
    """Too few or many bytes; widths that are not those of their bounds; a value beyond its bound; ones for filling."""
    with pytest.raises(ValueError):
        unpacked(content, count)


ARRAYS: dict[str, Any] = {
    "f4": np.array([1.5, -0.0, 3e38], np.float32),
    "f8": np.array([[0.1]]),
    "i8": np.array([INT64.min, 0, INT64.max]),
    "i4": np.array([], np.int32),
    "u1": np.arange(5, dtype=np.uint8),
    "b1": np.array([True, False]),
    "wide": np.array([[1, -(2**40)], [3, 4]]),
}
MESSAGE = WireMessage(Kind.RELEASE, {"a": 1, "b": ["x", None, 0.1]}, ARRAYS, {"wide": [(4, 2**40)]})


def test_a_message_comes_back_as_it_was() -> None:
    found = decoded(encoded(MESSAGE), Kind.TASK, Kind.RELEASE, most_packed=4)
    assert (found.kind, found.fields, found.packed) == (MESSAGE.kind, MESSAGE.fields, MESSAGE.packed)
    for name, array in ARRAYS.items():
        assert found.arrays[name].dtype == array.dtype
        assert found.arrays[name].tobytes() == array.tobytes()
        assert found.arrays[name].shape == array.shape


def test_the_bytes_are_those_of_the_page() -> None:
    """docs/wire-format.md shows this message."""
    content = encoded(WireMessage(Kind.TASK, {"run": "r"}, {"x": np.array([1, 2], np.uint8)}))
    assert content == b'FDVL\x02\x00\x02\x00\x32\x00\x00\x00{"fields":{"run":"r"},"arrays":[["x","u1",[2],2]]}\x01\x02'


def replaced(content: bytes, old: bytes, new: bytes) -> bytes:
    assert old in content
    found = content.replace(old, new, 1)
    return found[:8] + struct.pack("<I", struct.unpack("<I", content[8:12])[0] + len(new) - len(old)) + found[12:]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has 0"),
        (b"PK" + encoded(MESSAGE)[2:], "not a message of fedveil"),
        (encoded(MESSAGE)[:4] + b"\x01\x00" + encoded(MESSAGE)[6:], "version 1; this side speaks version 2"),
        (encoded(WireMessage(Kind.REFUSAL, {})), "kind 4 where release was due"),
        (encoded(MESSAGE)[:40], "ends early"),
        (encoded(MESSAGE)[:-1], "do not fit"),
        (encoded(MESSAGE) + b"\x00", "more bytes"),
        (replaced(encoded(MESSAGE), b'"fields"', b'"others"'), "without fields"),
        (replaced(encoded(MESSAGE), b"[3]", b"[4]"), "does not fit its bytes"),
        (replaced(encoded(MESSAGE), b"[3]", b"[-3]"), "impossible shape"),
        (replaced(encoded(MESSAGE), b"[2,2]", b"[2,2,2]"), "more than 4 packed"),
        (replaced(encoded(MESSAGE), b'"f8",[', b'"O8",['), "damaged message (KeyError)"),
        (replaced(encoded(MESSAGE), b'"f8",[', b'"f4",['), "does not fit its bytes"),
        (replaced(encoded(MESSAGE), b"0.1]", b"[[[]"), "damaged message (JSONDecodeError)"),
        (replaced(encoded(MESSAGE), b"0.1]", b"1e-1]"), "not written as"),
        (replaced(encoded(MESSAGE), b'"a":1', b'"a": 1'), "not written as"),
        (replaced(encoded(MESSAGE), b'"a":1', b'"a":2,"a":1'), "not written as"),
    ],
)
def test_anything_else_is_refused_with_its_reason(content: bytes, said: str) -> None:
    with pytest.raises(WireError, match=said.replace("(", r"\(").replace(")", r"\)")):
        decoded(content, Kind.RELEASE, most_packed=4)


def test_truth_values_are_0_or_1() -> None:
    content = encoded(WireMessage(Kind.ROUND, {}, {"b": np.array([True])}))
    with pytest.raises(WireError, match="other than 0 and 1"):
        decoded(content[:-1] + b"\x02", Kind.ROUND)


def test_a_few_bytes_cannot_ask_for_much_memory() -> None:
    zeros = encoded(WireMessage(Kind.RELEASE, {}, {"x": np.zeros(10 * BLOCK, np.int64)}, {"x": [(10 * BLOCK, 0)]}))
    assert len(zeros) < 200
    with pytest.raises(WireError, match="more than 100 packed"):
        decoded(zeros, Kind.RELEASE, most_packed=100)
    deep = b'{"fields":' + b"[" * 100_000 + b"]" * 100_000 + b',"arrays":[]}'
    with pytest.raises(WireError):
        decoded(b"FDVL" + struct.pack("<HBBI", 2, 3, 0, len(deep)) + deep, Kind.RELEASE)


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, 2**63])
def test_a_whole_number_is_one(value: Any) -> None:
    with pytest.raises(WireError, match="'n' must be a whole number"):
        whole_number(WireMessage(Kind.TASK, {"n": value}), "n")


@pytest.mark.parametrize("value", [1, None, "a" * 1001, "a\nb", "\x1b[31m"])
def test_a_text_is_short_and_printable(value: Any) -> None:
    with pytest.raises(WireError, match="'t' must be a printable text"):
        text(WireMessage(Kind.TASK, {"t": value}), "t")


@pytest.mark.parametrize("value", [1, None, "", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 64 + "\n", "\uff10" * 64])
def test_a_digest_is_64_hex_digits(value: Any) -> None:
    with pytest.raises(WireError, match="'t' must be 64 lower-case hex digits"):
        digest(WireMessage(Kind.TASK, {"t": value}), "t")


def test_a_message_has_its_own_fields_and_arrays_and_no_others() -> None:
    message = WireMessage(Kind.TASK, {"a": 1, "b": 2}, {"x": np.zeros(1)})
    require_parts(message, ("a", "b"), ("x", "y"))
    for fields, arrays, said in (
        (("a",), ("x",), "'b'"),
        (("a", "b", "c"), ("x",), "'c'"),
        (("a", "b"), (), "unknown arrays: 'x'"),
    ):
        with pytest.raises(WireError, match=said):
            require_parts(message, fields, arrays)


@settings(max_examples=200)
@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_whatever_raise_anything_else(content: bytes, headed: bool) -> None:
    with suppress(WireError):
        decoded(b"FDVL\x02\x00\x03\x00" + content if headed else content, Kind.RELEASE, most_packed=1000)
