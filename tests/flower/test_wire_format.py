"""The wire format: exact round trips; whatever else arrives is refused with `WireError`, and with nothing else."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.flower.bit_packing import BLOCK, packed, unpacked
from fedveil.flower.wire_format import Kind, WireError, WireMessage, decoded, encoded, text, whole_number

INT64 = np.iinfo(np.int64)


@given(st.lists(st.integers(INT64.min, INT64.max), max_size=50))
def test_any_integers_come_back(values: list[int]) -> None:
    integers = np.array(values, np.int64)
    assert np.array_equal(unpacked(packed(integers), len(values)), integers)


def test_a_release_takes_the_bits_that_it_needs() -> None:
    rng = np.random.default_rng(0)
    noise = np.rint(rng.normal(0, 2.0**24, 3 * BLOCK + 7)).astype(np.int64)
    content = packed(noise)
    assert np.array_equal(unpacked(content, len(noise)), noise)
    widths = [int(np.ptp(noise[i : i + BLOCK])).bit_length() for i in range(0, len(noise), BLOCK)]
    assert max(widths) == 28
    assert len(content) == sum(9 + -(-min(BLOCK, len(noise) - i * BLOCK) * w // 8) for i, w in enumerate(widths))


@pytest.mark.parametrize(
    ("content", "count"),
    [(b"", 1), (packed(np.arange(9))[:-1], 9), (packed(np.arange(9)) + b"x", 9), (struct.pack("<qB", 0, 65) + bytes(99), 9)],
)
def test_packed_integers_of_another_length_are_refused(content: bytes, count: int) -> None:
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
MESSAGE = WireMessage(Kind.RELEASE, {"a": 1, "b": ["x", None, 0.1]}, ARRAYS, frozenset({"wide"}))


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
    assert content == b'FDVL\x01\x00\x02\x00\x32\x00\x00\x00{"fields":{"run":"r"},"arrays":[["x","u1",[2],2]]}\x01\x02'


def replaced(content: bytes, old: bytes, new: bytes) -> bytes:
    assert old in content
    found = content.replace(old, new, 1)
    return found[:8] + struct.pack("<I", struct.unpack("<I", content[8:12])[0] + len(new) - len(old)) + found[12:]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has 0"),
        (b"PK" + encoded(MESSAGE)[2:], "not a message of fedveil"),
        (encoded(MESSAGE)[:4] + b"\x02\x00" + encoded(MESSAGE)[6:], "version 2; this side speaks version 1"),
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
    zeros = encoded(WireMessage(Kind.RELEASE, {}, {"x": np.zeros(10 * BLOCK, np.int64)}, frozenset({"x"})))
    assert len(zeros) < 200
    with pytest.raises(WireError, match="more than 100 packed"):
        decoded(zeros, Kind.RELEASE, most_packed=100)
    deep = b'{"fields":' + b"[" * 100_000 + b"]" * 100_000 + b',"arrays":[]}'
    with pytest.raises(WireError):
        decoded(b"FDVL" + struct.pack("<HBBI", 1, 3, 0, len(deep)) + deep, Kind.RELEASE)


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, 2**63])
def test_a_whole_number_is_one(value: Any) -> None:
    with pytest.raises(WireError, match="'n' must be a whole number"):
        whole_number(WireMessage(Kind.TASK, {"n": value}), "n")


@pytest.mark.parametrize("value", [1, None, "a" * 1001, "a\nb", "\x1b[31m"])
def test_a_text_is_short_and_printable(value: Any) -> None:
    with pytest.raises(WireError, match="'t' must be a printable text"):
        text(WireMessage(Kind.TASK, {"t": value}), "t")


@settings(max_examples=200)
@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_whatever_raise_anything_else(content: bytes, headed: bool) -> None:
    with suppress(WireError):
        decoded(b"FDVL\x01\x00\x03\x00" + content if headed else content, Kind.RELEASE, most_packed=1000)
