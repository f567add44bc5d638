"""Tasks that cannot work are refused before a run, and say why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedveil.data.dataset import Dataset
from fedveil.errors import ConfigError, DataError
from fedveil.experiment.assembly import check_targets
from fedveil.models.probe import check_output
from fedveil.tasks.classification import Binary
from fedveil.tasks.regression import Regression
from fedveil.tasks.task import Column, Task
from fedveil.tasks.task_check import check_task
from fedveil.tasks.task_registry import TASKS, register_task, task_from
from method_kit import model_of
from own_names import forgotten_after
from task_runs import CLASSES, info, made
from task_runs import TASKS as SECTIONS

OUTPUT = torch.randn(4, 1, generator=torch.Generator().manual_seed(1))
TARGET = torch.tensor([1.0, -2.0, 0.5, 3.0])


class Squared(Task):
    """Right."""

    name: str = "squared"
    metrics: ClassVar = (Column("mse"),)

    def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output[:, 0] - target).square()

    def scores(self, *evidence: torch.Tensor) -> dict[str, float]:
        return {"mse": float(self.losses(*evidence).mean())}


class Pairwise(Task):
    """A loss of a whole batch, which says so by having no `losses`."""

    name: str = "pairwise"

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - output.T) - (target[:, None] - target)).square().mean()


with pytest.warns(UserWarning, match="shadows an attribute"):

    class Annotated(Squared):
        """Its metrics are a constant for pydantic."""

        name: str = "annotated"
        metrics: tuple[Column, ...] = ()  # type: ignore[misc]


def changed(**functions: Any) -> Task:
    """The right task, but for some of its functions."""
    kind = type("Changed", (Squared,), {**functions, "__module__": __name__})
    task = kind()
    assert isinstance(task, Task)
    return task


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - target).square()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "one number": (
        {"losses": lambda _, o, t: squares(o, t).mean()},
        r"`losses` gives \[\] of float32; it has to be.*one for each",
    ),
    "spread": ({"losses": lambda _, o, t: (o - t).square()}, r"`losses` gives \[4, 4\]"),
    "no tensor": ({"losses": lambda _, o, t: [1.0]}, "`losses` gives list; it has to be a tensor"),
    "NaN": ({"losses": lambda _, o, t: squares(o, t).sub(100).log()}, "not finite"),
    "no gradient": ({"losses": lambda _, o, t: squares(o.detach(), t)}, "has a gradient"),
    "sum": ({"loss": lambda self, o, t: squares(o, t).sum()}, "the mean of `losses` is"),
    "metric": ({"scores": lambda *_: {"mae": 1.0}}, "`scores` gives mae, and `metrics` declares mse"),
    "error": ({"losses": lambda _, o, t: o @ t}, r"network gives \[4, 1\] of float32 and targets are \[4\].*RuntimeError"),
    "text": ({"scores": lambda *_: {"mse": "low"}}, "ValueError"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_wrong_is_said(bad: str) -> None:
    functions, message = BAD[bad]
    with pytest.raises(ConfigError, match=message):
        check_task(changed(**functions), OUTPUT, TARGET)


@pytest.mark.parametrize("task", [Squared(), Pairwise(), Regression(), changed(metrics=(), scores=Task.scores)])
def test_what_is_right_passes(task: Task) -> None:
    check_task(task, OUTPUT, TARGET)


def test_a_loss_of_whole_batches_has_to_be_one_number() -> None:
    with pytest.raises(ConfigError, match=r"`loss` gives \[4, 4\] of float32; it has to be a tensor of floats, one number"):
        check_task(type("All", (Pairwise,), {"loss": lambda _, o, t: o - t})(), OUTPUT, TARGET)


def test_a_network_that_does_not_fit_the_task_is_refused_with_what_is_needed() -> None:
    x, y = torch.zeros(3, 6), torch.zeros(3, 4, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"network gives \[3, 3\].*targets are \[3, 4, 4\].*needs \[n, C, H, W\], a score"):
        check_output(model_of(torch.nn.Linear(6, 3)), x, y, task_from({"name": "segmentation"}))


# --- data -------------------------------------------------------------------------------------------------------------

MISFITS = {
    ("binary", "classification"): "learns 2 classes, and made has 3",
    ("binary", "regression"): "targets of made are quantities",
    ("regression", "binary"): "targets of made are 2 classes",
    ("multi-label", "regression"): r"targets of shape \(labels,\); made has \(\)",
    ("multi-label", "binary"): "a 0 or 1 for each label, and the targets of made are 2 classes",
    ("segmentation", "token-prediction"): r"a picture of classes for each example; those of made have \(5,\)",
    ("token-prediction", "classification"): "a sequence of classes",
    ("classification", "segmentation"): "one class for each example",
    ("cox", "regression"): r"\(time, event\) of shape \(2,\)",
    ("cox", "binary"): r"learns \(time, event\)",
}


@pytest.mark.parametrize(("task", "data"), MISFITS)
def test_data_of_another_task_are_refused(task: str, data: str) -> None:
    with pytest.raises(ConfigError, match=MISFITS[task, data]):
        task_from(SECTIONS[task]).check(made(data).info)


@pytest.mark.parametrize(
    ("task", "wrong", "message"),
    [
        ("cox", [-1.0, 1.0], "negative times"),
        ("cox", [1.0, 2.0], "events other than"),
        ("multi-label", [0, 0, 3, 0], "labels other"),
    ],
)
def test_targets_without_a_meaning_are_refused(task: str, wrong: list[float], message: str) -> None:
    whole = made(task)
    check_targets(task_from(SECTIONS[task]), whole)
    y = whole.y_train.copy()
    y[5] = np.array(wrong)
    with pytest.raises(DataError, match=f"made, train split: .* cannot learn from {message}"):
        check_targets(task_from(SECTIONS[task]), Dataset(whole.info, whole.x_train, y, whole.x_test, whole.y_test))


def test_weights_are_as_many_as_labels() -> None:
    with pytest.raises(ConfigError, match=r"task\.positive_weights has 2 weights; made has 4 labels"):
        task_from({"name": "multi-label", "positive_weights": [1, 2]}).check(made("multi-label").info)
    with pytest.raises(ConfigError, match=r"task\.class_weights has 1 weights; made has 3 classes"):
        task_from({"name": "segmentation", "class_weights": [1]}).check(made("segmentation").info)
    with pytest.raises(ConfigError, match=r"task\.class_weights has 2 weights; made has 3 classes"):
        task_from({"name": "classification", "class_weights": [1, 2]}).check(info((6,), CLASSES, made("binary").info.target))


@pytest.mark.parametrize("given", [[1.0, -1.0, 1.0, 1.0], [1.0, 3.0, 1.0, 1.0], [1.0, 1.0]])
def test_weights_of_examples_are_positive_and_at_most_the_largest(given: list[float]) -> None:
    class Weighing(Binary):
        def example_weights(self, target: torch.Tensor) -> torch.Tensor:
            return torch.tensor(given)

    with pytest.raises(ConfigError, match=r"`example_weights` gives .* \[4\], at most `largest_weight` = 2"):
        check_task(Weighing(positive_weight=2.0), torch.randn(4, 1), torch.tensor([0, 1, 0, 1]))


@pytest.mark.parametrize(
    "section",
    [
        {"name": "survival", "likelihood": "hazards"},
        {"name": "survival", "edges": [1.0]},
        {"name": "survival", "likelihood": "hazards", "edges": [2.0, 1.0]},
        {"name": "survival", "likelihood": "hazards", "edges": [0.0, 1.0]},
        {"name": "segmentation", "cross_entropy": 0, "dice": 0},
        {"name": "binary", "positive_weight": math.inf},
    ],
)
def test_impossible_constants_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"task\."):
        task_from(section)


# --- registration -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with forgotten_after(TASKS):
        yield


def test_what_is_no_task_is_not_registered() -> None:
    named = {"__annotations__": {"name": str}, "name": "x", "losses": squares}
    unnamed: dict[str, Any] = {"losses": Squared.losses}
    lacking: dict[str, tuple[type[Task], dict[str, Any]]] = {
        "lacks `losses`": (Task, named | {"losses": Task.losses}),
        "lacks name": (Task, unnamed),
        "belongs to Regression of fedveil": (Regression, {}),
        "has to return them": (Task, named | {"metrics": (Column("a"),)}),
        "have to be of fedveil.Column": (Squared, {"metrics": ("mse",)}),
        "leave its annotation out": (Annotated, {}),
    }
    for message, (base, body) in lacking.items():
        kind = type("Lacking", (base,), body | {"__module__": __name__})
        with pytest.raises(ConfigError, match=message):
            register_task(kind)
