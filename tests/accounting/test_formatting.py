"""Numbers as text: what a bound prints stays a bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.accounting.formatting import percent_at_least
from fedveil.accounting.types import Adjacency, Audit, Scope, Unit, View

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
