"""Figures of the examples: the kept results have every run that is shown, and drawing them needs no training and no data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from example_runs import ROOT, figures


@pytest.mark.parametrize("name", ["finetune", "flights", "shakespeare", "wages", "yeast"])
def test_a_figure_is_drawn_from_the_committed_results(name: str, tmp_path: Path) -> None:
    program, folder = figures(), ROOT / "examples" / name
    shown, found = program.SHOWN[name], json.loads((folder / "figure.json").read_text())
    assert tuple(found["runs"]) == shown.series
    for runs in found["runs"].values():
        assert {level: tuple(map(int, seeds)) for level, seeds in runs.items()} == dict.fromkeys(
            program.levels(shown), shown.seeds
        )
    program.picture(shown, found, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    assert shown.axis in text
    assert all(label in text for label in (*found["runs"], *found["baselines"]))
