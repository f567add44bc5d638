"""Numbers as text: what a bound prints stays a bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.accounting.types import (
    Adjacency,
    Audit,
    Claim,
    Guarantee,
    Scope,
    Unit,
    View,
    at_least,
    at_most,
    epsilon,
    number,
    percent_at_least,
)

SCOPE = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.95, "95%"),
        (1 - 0.05 / 2, "97.5%"),
        (1 - 0.05 / 3, "98.33%"),
        (1 - 0.05 / 4, "98.75%"),
        (1 - 0.01 / 3, "99.66%"),
        (1 - 1e-6, "99.9999%"),
        (0.99996, "99.996%"),
        (1.0, "100%"),
    ],
)
def test_a_confidence_is_never_printed_larger(share: float, text: str) -> None:
    assert percent_at_least(share) == text
    assert text in Audit(0.5, 1e-5, SCOPE, "a test", share, 100).how


@given(st.floats(0.5, 1 - 1e-9))
def test_any_confidence_is_rounded_down(share: float) -> None:
    shown = float(percent_at_least(share).rstrip("%")) / 100
    assert shown <= share + 1e-10
    assert shown < 1
    assert share - shown < 1.001e-4


@pytest.mark.parametrize(
    ("value", "most", "least"),
    [
        (1.00049, "1.001", "1"),
        (0.123456, "0.1235", "0.1234"),
        (1.0, "1", "1"),
        (0.99999998, "1", "0.9999"),
        (1 + 1e-10, "1", "1"),  # a target that is met but for floating-point error
        (1 - 1e-10, "1", "1"),
        (2.00001, "2.001", "2"),
        (123456.0, "1.235e+05", "1.234e+05"),
        (3e-7, "3e-07", "3e-07"),
        (0.0, "0", "0"),
        (math.inf, "inf", "inf"),
    ],
)
def test_bounds_are_rounded_outwards(value: float, most: str, least: str) -> None:
    assert (at_most(value), at_least(value)) == (most, least)


@given(st.floats(1e-12, 1e12), st.integers(2, 7))
def test_what_is_printed_holds(value: float, digits: int) -> None:
    low, high = float(at_least(value, digits)), float(at_most(value, digits))
    assert low <= value * (1 + 1.001e-9)
    assert high >= value * (1 - 1.001e-9)
    assert (high - low) / value <= 10.0 ** (1 - digits) * 1.001
    assert at_most(float(f"{value:.{digits}g}"), digits) == at_least(float(f"{value:.{digits}g}"), digits)


def test_each_kind_of_number_is_rounded_its_own_way() -> None:
    assert str(Guarantee(1.00049, 1e-5, SCOPE, "gdp")).startswith("epsilon = 1.001 at")
    assert str(Claim(1.00049, 1e-5, SCOPE, "a paper")).startswith("epsilon = 1 at")
    assert str(Audit(0.123456, 1e-5, SCOPE, "a test", 0.95, 100)).startswith("at least epsilon = 0.1234 at")
    assert [epsilon(0.123456), epsilon(0.123456, shown=number), epsilon(math.inf, "no bound")] == ["0.1235", "0.1235", "no bound"]
