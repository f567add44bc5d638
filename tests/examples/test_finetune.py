"""The example of fine-tuning: at a small epsilon a small trainable part beats the whole network, and the runs verify."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import fedveil as fv
from example_runs import figures

FOLDER = Path(__file__).parents[2] / "examples" / "finetune"
PARTS = {"head": [], "whole": ['model.trainable=["*"]'], "lora": ['model.lora={ rank = 2, targets = ["fc1", "fc2"] }']}
pytestmark = pytest.mark.heavy


def trained(part: str, out: Path, *more: str) -> float:
    overrides = [*PARTS[part], 'run.engine="inline"', "run.seeded_noise=true", *more]
    return fv.train(fv.load_config(FOLDER / "finetune.toml", overrides), out).accuracy


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of the example, which the next test imports anew."""
    monkeypatch.syspath_prepend(str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_adapters_learn_beyond_the_public_network(tmp_path: Path) -> None:
    assert trained("lora", tmp_path / "run", "training.rounds=8") > figures().untouched(fv.load("digits")) + 0.1
    assert fv.verification(tmp_path / "run").outcome == "verified"


@pytest.mark.slow
def test_the_small_part_wins_at_a_small_epsilon(tmp_path: Path) -> None:
    small = "privacy.epsilon=0.5"
    head, whole = trained("head", tmp_path / "h", small), trained("whole", tmp_path / "w", small, 'run.engine="stacked"')
    assert head > whole + 0.1


def test_public_pictures_become_those_of_the_scanner(monkeypatch: pytest.MonkeyPatch) -> None:
    small = imported("public_network", monkeypatch).small
    picture = np.zeros((1, 1, 28, 28), np.uint8)
    picture[0, 0, 2:5, 2:5], picture[0, 0, 5, 2] = 255, 255
    assert small(picture)[0, 0, 0, 0] == 1.0
    assert small(picture)[0, 0, 1, 0] == np.float32(2 / 9 - 1)
    assert (small(picture)[0, 0, 2:] == -1).all()


def test_a_newcomer_can_read_it() -> None:
    assert len((FOLDER / "finetune.toml").read_text().splitlines()) <= 40
