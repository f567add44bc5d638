"""Notes of `from_frame`: ids and unscaled columns among the features, a test set of one client."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import fedveil as fv


def table(clients: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    columns = {"patient_id": np.arange(1000, 1060), "income": draw.normal(4e4, 1e4, 60), "dose": draw.normal(0, 1, 60)}
    return columns | {"site": np.arange(60) % clients, "ill": draw.integers(0, 2, 60)}


def test_doubtful_features_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = fv.from_frame(table(30), target="ill", client="site")
    assert data.origin is not None
    first, second = data.origin.notes
    assert "'patient_id' is another whole number in each row" in first
    assert "'income' is up to" in second
    assert "normalise={'income': (..., ...)}" in second
    assert [record.getMessage() for record in caplog.records] == [f"from_frame: {note}" for note in (first, second)]
    assert first in repr(data)
    assert "notes" not in data.origin.public, "they follow from the values"


def test_a_test_set_of_one_client_is_named() -> None:
    data = fv.from_frame(table(4), target="ill", client="site", features=["dose"])
    assert data.origin is not None
    assert len(data.origin.notes) == 1
    assert data.origin.notes[0].startswith("the test set is one client")


def test_sound_tables_have_no_notes() -> None:
    data = fv.from_frame(table(30), target="ill", client="site", features=["income", "dose"], normalise={"income": (4e4, 1e4)})
    assert data.origin is not None
    assert data.origin.notes == ()
