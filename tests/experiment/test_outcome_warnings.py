"""Warnings judged from the public history: chance, a rising loss, updates that are all cut to the clip."""

from __future__ import annotations

from typing import Any

import pytest

import fedveil as fv
from fedveil.experiment.result import outcome_warnings
from fedveil.federation.history import columns_of

BINARY = columns_of(fv.Binary())
GOOD = {"test_auc": 0.8, "test_balanced_accuracy": 0.7}


def warned(losses: tuple[float, ...], last: dict[str, float] = GOOD, **more: float) -> tuple[str, ...]:
    rows: list[dict[str, Any]] = [{"round": i, "test_loss": loss, "test_auc": 0.6, **more} for i, loss in enumerate(losses)]
    rows[-1] |= last
    return outcome_warnings(rows, BINARY, None)


def test_a_run_that_learned_is_not_warned_of() -> None:
    assert warned((0.7, 0.6, 0.5, 0.51)) == ()


@pytest.mark.parametrize(
    ("last", "text"),
    [
        ({"test_auc": 0.503, "test_balanced_accuracy": 0.6}, "area under the ROC curve 0.503 is that of one answer for all"),
        ({"test_auc": 0.7, "test_balanced_accuracy": 0.5}, "set another threshold on the probabilities"),
    ],
)
def test_scores_of_chance_are_named(last: dict[str, float], text: str) -> None:
    (warning,) = warned((0.7, 0.6, 0.5), last)
    assert text in warning


def test_a_regression_that_explains_nothing_is_named() -> None:
    rows = [{"round": 0, "test_rmse": 3.0, "test_r2": -0.2, "test_loss": 1.0}]
    (warning,) = outcome_warnings(rows, columns_of(fv.Regression()), None)
    assert "R²" in warning


@pytest.mark.parametrize(
    ("losses", "text"), [((0.5, 0.6, 0.9), "rose from 0.5 to 0.9"), ((0.9, 0.5, 0.8), "fell to 0.5 and rose again to 0.8")]
)
def test_a_rising_loss_is_named(losses: tuple[float, ...], text: str) -> None:
    (warning,) = warned(losses)
    assert text in warning


@pytest.mark.parametrize(("norm", "cut"), [(1.09, True), (0.7, False)])
def test_updates_that_are_all_cut_to_the_clip_are_named(norm: float, cut: bool) -> None:
    """The mean has norm 1 with noise of 0.5 removed from 1.118."""
    warnings = warned((0.7, 0.6, 0.5), update_norm=norm, noise_norm=0.5, clip=1.0)
    assert [text.startswith("in most rounds every update was cut to the clip") for text in warnings] == [True] * cut


def test_the_judgement_needs_no_private_figure() -> None:
    public = {name for name in ("test_loss", "test_auc", "update_norm", "noise_norm", "clip") if BINARY[name].public}
    assert len(public) == 5
