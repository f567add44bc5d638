"""The model learns who comes back."""

from __future__ import annotations

from fedveil.experiment.result import Result


def test_it_learns(result: Result) -> None:
    assert result.score > 0.75  # area under the ROC curve; chance is one half
