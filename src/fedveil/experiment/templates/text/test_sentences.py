"""The model learns which word comes next."""

from __future__ import annotations

from fedveil.experiment.result import Result


def test_it_learns(result: Result) -> None:
    assert result.score < 4  # perplexity; of 19 tokens, none more likely than another: 19
