"""What a finished run hands back: its scores, and how often it was scored."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedveil as fv
from federation_runs import small_digits
from fedveil.experiment.result import Result


def trained(path: Path, **training: int) -> Result:
    config = fv.configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 6}},
        model="linear",
        method="fedavg",
        training={"rounds": 3, "clients_per_round": 2, **training},
        run={"engine": "inline"},
    )
    return fv.train(config, path, data=small_digits())


def test_all_scores_of_the_last_model_by_name(tmp_path: Path) -> None:
    result = trained(tmp_path / "run", evaluate_every=2)
    last = result.history[-1]
    assert result.scores["accuracy"] == result.score == result.accuracy == last["test_accuracy"]
    assert result.scores["loss"] == last["test_loss"]
    assert {f"test_{name}" for name in result.scores} == {name for name in last if name.startswith("test_")}


@pytest.mark.parametrize(("every", "scored"), [(0, [2]), (1, [0, 1, 2]), (2, [1, 2])])
def test_rounds_between_scores(every: int, scored: list[int], tmp_path: Path) -> None:
    result = trained(tmp_path / "run", evaluate_every=every)
    assert [r["round"] for r in result.history if "test_loss" in r] == scored
    assert fv.verification(tmp_path / "run").outcome == "verified"
