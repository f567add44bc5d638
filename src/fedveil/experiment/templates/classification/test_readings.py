"""The method does what it says, and the model learns activities."""

from __future__ import annotations

import pytest

from fedveil.experiment.result import Result


def test_the_clip_shrinks_as_the_method_says(result: Result) -> None:
    assert [row["clip"] for row in result.history] == pytest.approx([2.0 * 0.97**t for t in range(15)])


def test_it_learns(result: Result) -> None:
    assert result.accuracy > 0.7  # chance is one in three
