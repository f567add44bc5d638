"""The model learns which pumps fail first."""

from __future__ import annotations

from fedveil.experiment.result import Result


def test_it_learns(result: Result) -> None:
    assert result.score > 0.65  # concordance; chance is one half
