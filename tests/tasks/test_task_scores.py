"""Metrics of every task: against scikit-learn, and against hand mathematics."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from fedveil.data.catalogue import IGNORED
from fedveil.tasks.scores import auc, average_precision, concordance, macro_auc
from fedveil.tasks.task import Task
from fedveil.tasks.task_registry import task_from


def scores(options: dict[str, Any], output: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """The metrics, by what evaluation keeps of two batches."""
    task = task_from(options)
    half = len(target) // 2
    parts = [task.evidence(output[part], target[part]) for part in (slice(half), slice(half, None))]
    found = dict(task.scores(*(torch.cat(each) for each in zip(*parts, strict=True))))
    assert set(found) == {metric.name for metric in task.metrics}
    return found


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Normals, rounded so that there are ties."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 8).round() / 8


@pytest.mark.parametrize("seed", range(3))
def test_classification(seed: int) -> None:
    output, y = drawn(seed, 200, 4), (torch.arange(200) * 7 % 11) % 4
    found, p, predicted = scores({"name": "classification"}, output, y), output.softmax(1), output.argmax(1)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(y, predicted))
    assert found["recall"] == pytest.approx(sk.balanced_accuracy_score(y, predicted))
    assert found["precision"] == pytest.approx(sk.precision_score(y, predicted, average="macro"))
    assert found["f1"] == pytest.approx(sk.f1_score(y, predicted, average="macro"))
    expected = [sk.roc_auc_score(y == c, p[:, c]) for c in set(y.tolist())]
    assert found["auc"] == pytest.approx(np.mean(expected))
    assert found["majority"] == pytest.approx(max((y == c).float().mean().item() for c in range(4)))


@pytest.mark.parametrize("seed", range(3))
def test_binary(seed: int) -> None:
    output, y = drawn(seed, 200, 1), (torch.arange(200) % 9 == 0).long()
    found, logit = scores({"name": "binary"}, output, y), output[:, 0]
    assert found["auc"] == pytest.approx(sk.roc_auc_score(y, logit))
    assert found["average_precision"] == pytest.approx(sk.average_precision_score(y, logit))
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(y, logit >= 0))
    assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, logit >= 0))
    assert found["majority"] == pytest.approx(1 - 23 / 200)


def test_of_one_kind_alone_nothing_is_ranked() -> None:
    assert math.isnan(auc(torch.zeros(3), torch.ones(3, dtype=torch.bool)))
    assert math.isnan(average_precision(torch.zeros(3), torch.zeros(3, dtype=torch.bool)))
    assert math.isnan(macro_auc(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)))
    assert auc(torch.zeros(4), torch.tensor([True, False, False, True])) == 0.5
    task = task_from({"name": "binary"})
    offsets = np.array([0, 2, 2, 4])
    assert task.client_scores(offsets, torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0, 1, 1, 1])) == [
        1.0,
        None,
        None,
    ]


@pytest.mark.parametrize("seed", range(3))
def test_multi_label(seed: int) -> None:
    output, y = drawn(seed, 100, 5), (drawn(seed + 9, 100, 5) > 0.6).float()
    y[:, 4] = 0  # a label that never occurs has no AUC
    found, predicted = scores({"name": "multi-label"}, output, y), (output >= 0).float()
    assert found["f1"] == pytest.approx(sk.f1_score(y, predicted, average="micro"))
    assert found["hamming"] == pytest.approx(sk.hamming_loss(y, predicted))
    assert found["all_zero"] == pytest.approx(sk.hamming_loss(y, np.zeros((100, 5))))
    assert found["auc"] == pytest.approx(np.mean([sk.roc_auc_score(y[:, c], output[:, c]) for c in range(4)]))


def test_without_labels_f1_is_zero() -> None:
    assert scores({"name": "multi-label"}, -torch.ones(4, 2), torch.zeros(4, 2))["f1"] == 0.0


@pytest.mark.parametrize("columns", [(), (3,)])
def test_regression_is_in_the_unit_of_the_target(columns: tuple[int, ...]) -> None:
    output, y = drawn(1, 50, *(columns or (1,))), 10 + 4 * drawn(2, 50, *columns)
    found = scores({"name": "regression", "mean": 10.0, "scale": 4.0}, output, y)
    predicted = (output * 4 + 10).reshape(y.shape)
    assert found["rmse"] == pytest.approx(math.sqrt(sk.mean_squared_error(y, predicted)))
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(y, predicted))
    error, spread = (y - predicted).square().sum().item(), (y - y.mean(0)).square().sum().item()
    assert found["r2"] == pytest.approx(sk.r2_score(y, predicted) if not columns else 1 - error / spread)


def test_segmentation() -> None:
    """Of class 1, 2 places are right, 3 found, 3 actual: 2 / 4; of class 0 3 / 5; class 2 is nowhere; one place is IGNORED."""
    found = torch.tensor([[[0, 0, 1], [1, 0, 0]], [[0, 1, 1], [1, 1, 1]]])
    actual = torch.tensor([[[0, 0, 1], [1, 0, 1]], [[1, 1, 1], [IGNORED, 0, 0]]])
    output = torch.nn.functional.one_hot(found, 3).movedim(3, 1).float()
    values = scores({"name": "segmentation"}, output, actual)
    known = actual != IGNORED
    assert values["iou"] == pytest.approx(sk.jaccard_score(actual[known], found[known], average="macro"))
    assert values["pixel_accuracy"] == pytest.approx(sk.accuracy_score(actual[known], found[known]))
    assert values["majority"] == pytest.approx(6 / 11)


def test_token_prediction() -> None:
    """Three places count: -log of 1/2, 1/4 and 1/4 makes 5/3 bits; a place that is IGNORED counts nowhere."""
    output = torch.tensor([[[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], [[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]]).log()
    target = torch.tensor([[0, 2], [IGNORED, 1]])
    found = scores({"name": "token-prediction"}, output, target)
    assert found["bits"] == pytest.approx(5 / 3)
    assert found["perplexity"] == pytest.approx(2 ** (5 / 3))
    assert found["accuracy"] == pytest.approx(1 / 3)
    nothing = scores({"name": "token-prediction"}, output, torch.full((2, 2), IGNORED))
    assert all(math.isnan(value) for value in nothing.values())


def test_what_is_kept_of_texts_and_pictures_does_not_grow_with_vocabulary_or_places() -> None:
    def kept(name: str, output: torch.Tensor, target: torch.Tensor) -> int:
        return sum(part[0].numel() for part in task_from({"name": name}).evidence(output, target))

    assert kept("token-prediction", torch.zeros(2, 50, 90), torch.zeros(2, 50, dtype=torch.long)) == 3
    assert kept("segmentation", torch.zeros(2, 4, 30, 30), torch.zeros(2, 30, 30, dtype=torch.long)) == 1 + 3 * 4


def concordance_by_hand(risk: list[float], time: list[float], event: list[int]) -> float:
    found, pairs = 0.0, 0
    for i in range(len(time)):
        for j in range(len(time)):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                pairs += 1
                found += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return found / pairs


@pytest.mark.parametrize("seed", range(5))
def test_concordance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    risk, time, event = rng.integers(0, 9, 700) / 1.0, rng.integers(1, 9, 700) / 1.0, rng.integers(0, 2, 700)
    found = concordance(torch.tensor(risk), torch.tensor(time), torch.tensor(event) == 1)
    assert found == pytest.approx(concordance_by_hand(risk.tolist(), time.tolist(), event.tolist()))


def test_concordance_of_three() -> None:
    """The first dies first: he is compared with both, the second, who is lost, with nobody."""
    time, event = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True])
    assert concordance(torch.tensor([2.0, 1.0, 3.0]), time, event) == 0.5
    assert concordance(torch.tensor([3.0, 1.0, 1.0]), time, event) == 1.0
    assert math.isnan(concordance(torch.ones(3), time, torch.zeros(3, dtype=torch.bool)))


def test_who_survives_fewest_intervals_has_the_highest_risk() -> None:
    target = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 0.0]])
    likely = torch.tensor([[2.0, 2.0], [0.0, 0.0], [-2.0, -2.0]])
    assert scores({"name": "survival", "likelihood": "hazards", "edges": [1, 2]}, likely, target)["concordance"] == 1.0
    assert scores({"name": "survival"}, likely[:, :1], target)["concordance"] == 1.0


@pytest.mark.parametrize("name", ["binary", "regression", "survival"])
def test_a_client_is_scored_on_its_own_examples(name: str) -> None:
    task: Task = task_from({"name": name})
    output = drawn(1, 30, 1)
    target = torch.stack([drawn(2, 30).abs(), torch.arange(30) % 2.0], 1) if name == "survival" else drawn(2, 30)
    if name == "binary":
        target = (target > 0).long()
    each = task.client_scores(np.array([0, 10, 10, 30]), output, target)
    expected = [task.scores(output[part], target[part])[task.main.name] for part in (slice(10), slice(10, 30))]
    assert each == [pytest.approx(expected[0]), None, pytest.approx(expected[1])]


def constant_answers(name: str, target: torch.Tensor) -> list[torch.Tensor]:
    """Outputs that are the same for every example."""
    n, places = len(target), target.shape[1:]
    if name == "classification":
        return [torch.eye(4)[c].expand(n, 4) for c in range(4)]
    if name == "multi-label":
        return [2.0 * torch.tensor(kept).expand(n, 4) - 1 for kept in itertools.product((0.0, 1.0), repeat=4)]
    if name == "regression":
        return [target.mean(0).expand(n, 2)]
    if name == "segmentation":
        return [torch.eye(3)[c][None, :, None, None].expand(n, 3, *places) for c in range(3)]
    if name == "token-prediction":
        counts = target[target != IGNORED].bincount(minlength=5)
        return [(counts / counts.sum()).clamp_min(1e-30).log().expand(n, *places, 5)]
    return [torch.zeros(n, 1)]  # an order in which all are equal


TRIVIAL = {
    "classification": (torch.tensor([0, 1, 1, 3, 1, 0]), 0.5),
    "binary": (torch.tensor([0, 1, 1, 1]), 0.5),
    "multi-label": (torch.tensor([[1.0, 0, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 1, 0]]), 12 / 15),
    "regression": (torch.tensor([[1.0, 10], [3, 10], [5, 40]]), math.sqrt((8 + 600) / 6)),
    "segmentation": (torch.tensor([[[0, 0], [1, IGNORED]], [[0, 1], [0, 2]]]), 4 / 7 / 3),
    "token-prediction": (
        torch.tensor([[0, 0, 1, IGNORED], [4, 0, 1, 4]]),
        math.exp(-sum(p * math.log(p) for p in (3 / 7, 2 / 7, 2 / 7))),
    ),
    "survival": (torch.tensor([[1.0, 1], [2, 0], [3, 1]]), 0.5),
}


@pytest.mark.parametrize("name", TRIVIAL)
def test_a_trivial_score_is_that_of_the_best_answer_that_is_the_same_for_all(name: str) -> None:
    target, known = TRIVIAL[name]
    task = task_from({"name": name})
    found = [task.scores(*task.evidence(output, target))[task.main.name] for output in constant_answers(name, target)]
    assert task.trivial(target) == pytest.approx(known) == pytest.approx(max(found, key=lambda v: task.main.sign * v))


def test_where_nothing_is_compared_there_is_no_trivial_score() -> None:
    assert task_from({"name": "binary"}).trivial(torch.ones(4, dtype=torch.int64)) is None
    assert task_from({"name": "token-prediction"}).trivial(torch.full((2, 3), IGNORED)) is None
    assert task_from({"name": "segmentation"}).trivial(torch.full((2, 3, 3), IGNORED)) is None
