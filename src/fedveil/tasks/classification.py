"""Classification: one of several classes, one of two classes, or any number of labels."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedveil.data.catalogue import Info
from fedveil.errors import ConfigError
from fedveil.tasks.task import ACCURACY, Column, Task, Weight, need_classes, need_quantities, need_weights, weights_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class Classification(Task):
    """One of several classes: cross-entropy of logits [n, classes].

    class_weights: factor of the loss of each class, public: not computed from private data. The loss of a batch is the plain
    mean.
    """

    metrics: ClassVar = (
        ACCURACY,
        Column("precision", "Precision", "macro mean", "higher", share=True),
        Column("recall", "Recall (balanced accuracy)", "macro mean", "higher", share=True),
        Column("f1", "F1 score", "macro mean", "higher", share=True),
        Column("auc", "Area under the ROC curve", "AUC, macro mean", "higher", share=True, chance=0.5),
        Column("majority", "Accuracy of always the commonest class", "accuracy", share=True),
    )
    loss_unit: ClassVar = "cross-entropy"
    output_form: ClassVar = "[n, C], a score for each class"
    trivial_answer: ClassVar = "always the commonest class"

    name: Literal["classification"] = "classification"
    class_weights: tuple[Weight, ...] | None = None

    def check(self, info: Info) -> None:
        """Require one class per example and, if weights are given, one for each class."""
        need_classes(self.name, info)
        need_weights("class_weights", self.class_weights, info, "classes", info.classes)

    @property
    def largest_weight(self) -> float:
        """Return the largest weight of a class."""
        return max(self.class_weights or (1.0,))

    def example_weights(self, target: Tensor) -> Tensor | None:
        """Return the weight of each example's class."""
        return None if self.class_weights is None else weights_of(self.class_weights, target)[target]

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy times the weight of the class."""
        from torch.nn import functional as F

        each = F.cross_entropy(output, target, reduction="none")
        return each if self.class_weights is None else each * output.new_tensor(self.class_weights)[target]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean of `losses`."""
        from torch.nn import functional as F

        return F.cross_entropy(output, target) if self.class_weights is None else super().loss(output, target)

    def predictions(self, output: Tensor) -> Tensor:
        """Return the number of the most likely class."""
        return output.argmax(1)

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the probability of each class [n, C]."""
        return output.softmax(1)

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """Return the metrics; macro figures are plain means over the classes that occur, with precision 0 if never predicted."""
        from fedveil.tasks.scores import class_scores, macro_auc

        output, target = evidence
        return {**class_scores(output.argmax(1), target, output.shape[1]), "auc": macro_auc(output.softmax(1), target)}

    def trivial(self, target: Tensor) -> float:
        """Return the accuracy of always the commonest class."""
        return float(target.bincount().max()) / len(target)

    def client_scores(self, offsets: NDArray[np.int64], *evidence: Tensor) -> list[float | None]:
        """Return the accuracy of each client."""
        from fedveil.tasks.scores import means_by_client

        output, target = evidence
        return means_by_client((output.argmax(1) == target).double(), offsets)


SCORE_EDGES = tuple(map(float, range(-4, 5)))
"""Logits between the 10 bins in which an evaluation counts test scores: more bins would hold more noise in all."""


def counts_scores(task: Task) -> bool:
    """Return whether an evaluation counts the task's scores in bins: its main metric is the area under the ROC curve."""
    return isinstance(task, Binary) and task.main.name == "auc"


class Binary(Task):
    """One of two classes: cross-entropy of one logit, that of class 1.

    positive_weight: factor of the loss of examples of class 1, public: not computed from private data. The loss of a batch is
    the plain mean.
    """

    metrics: ClassVar = (
        Column("auc", "Area under the ROC curve", "AUC", "higher", share=True, chance=0.5),
        Column("average_precision", "Average precision", "average precision", "higher", share=True),
        ACCURACY,
        Column("balanced_accuracy", "Balanced accuracy", "accuracy", "higher", share=True),
        Column("majority", "Accuracy of always the commoner class", "accuracy", share=True),
    )
    loss_unit: ClassVar = "cross-entropy"
    output_form: ClassVar = "[n, 1], the logit of class 1"
    trivial_answer: ClassVar = "an order by chance"

    name: Literal["binary"] = "binary"
    positive_weight: float = Field(1.0, gt=0, allow_inf_nan=False)

    def check(self, info: Info) -> None:
        """Require two classes."""
        need_classes(self.name, info)
        if info.classes != 2:
            raise ConfigError(f"task.name = 'binary' learns 2 classes, and {info.name} has {info.classes}: take 'classification'")

    def outputs(self, info: Info) -> int:
        """Return 1, for one logit."""
        return 1

    @property
    def largest_weight(self) -> float:
        """Return the larger weight of the two classes."""
        return max(1.0, self.positive_weight)

    def example_weights(self, target: Tensor) -> Tensor | None:
        """Return the weight of each example's class."""
        return None if self.positive_weight == 1 else weights_of((1.0, self.positive_weight), target)[target]

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the binary cross-entropy, times the weight of class 1 if that is the target."""
        from torch.nn import functional as F

        weight = None if self.positive_weight == 1 else output.new_tensor(self.positive_weight)
        logit = output.reshape(target.shape)
        return F.binary_cross_entropy_with_logits(logit, target.to(output.dtype), reduction="none", pos_weight=weight)

    def predictions(self, output: Tensor) -> Tensor:
        """Return 1 if class 1 is at least as likely as class 0, else 0."""
        return (output.reshape(-1) >= 0).long()

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the probabilities of class 0 and class 1 [n, 2]."""
        import torch

        logit = output.reshape(-1)
        return torch.stack([(-logit).sigmoid(), logit.sigmoid()], 1)

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """Return the metrics; class 1 is predicted at probability >= 1/2, while AUC and average precision use the order only."""
        from fedveil.tasks.scores import auc, average_precision, class_scores

        logit, target = evidence[0].reshape(-1), evidence[1]
        of_classes = class_scores((logit >= 0).long(), target, 2)
        return {
            "auc": auc(logit, target == 1),
            "average_precision": average_precision(logit, target == 1),
            "accuracy": of_classes["accuracy"],
            "balanced_accuracy": of_classes["recall"],
            "majority": of_classes["majority"],
        }

    def trivial(self, target: Tensor) -> float | None:
        """Return the AUC of a random order; None if all examples are of one class."""
        return None if bool((target == target[0]).all()) else 0.5

    def client_scores(self, offsets: NDArray[np.int64], *evidence: Tensor) -> list[float | None]:
        """Return the AUC of each client; None if all its examples are of one class."""
        from fedveil.tasks.scores import auc

        logit, target = evidence[0].reshape(-1), evidence[1]
        values = [auc(logit[lo:hi], target[lo:hi] == 1) for lo, hi in pairwise(offsets)]
        return [None if value != value else value for value in values]


class MultiLabel(Task):
    """Any number of L labels: the mean of the cross-entropies of their logits; targets are 0 and 1 in float32.

    positive_weights: for each label, the factor of the loss where it is 1; public: not computed from private data.
    """

    metrics: ClassVar = (
        Column("f1", "F1 score", "micro mean", "higher", share=True),
        Column("auc", "Area under the ROC curve", "AUC, macro mean", "higher", share=True, chance=0.5),
        Column("hamming", "Hamming loss", "wrong labels", "lower", share=True),
        Column("all_zero", "Hamming loss of never a label", "wrong labels", share=True),
    )
    loss_unit: ClassVar = "cross-entropy, mean over labels"
    output_form: ClassVar = "[n, L], a logit for each label"
    trivial_answer: ClassVar = "always the same labels"

    name: Literal["multi-label"] = "multi-label"
    positive_weights: tuple[Weight, ...] | None = None

    def check(self, info: Info) -> None:
        """Require a row of zeros and ones and, if weights are given, one for each label."""
        need_quantities(self.name, info, "a 0 or 1 for each label")
        if len(info.target.shape) != 1:
            raise ConfigError(f"task.name = 'multi-label' needs targets of shape (labels,); {info.name} has {info.target.shape}")
        need_weights("positive_weights", self.positive_weights, info, "labels", info.target.shape[0])

    def wrong_targets(self, target: NDArray[Any]) -> str:
        """Refuse values other than 0 and 1."""
        return "" if np.isin(target, (0, 1)).all() else "labels other than 0 and 1"

    @property
    def largest_weight(self) -> float:
        """Return the weight of an example that has exactly the labels of weight above 1."""
        weights = self.positive_weights or (1.0,)
        return sum(max(1.0, weight) for weight in weights) / len(weights)

    def example_weights(self, target: Tensor) -> Tensor | None:
        """Return the mean weight of each example's labels; their weights relative to each other are part of the gradient."""
        if self.positive_weights is None:
            return None
        weights = weights_of(self.positive_weights, target)
        return weights.where(target == 1, weights.new_ones(())).mean(1)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over the labels."""
        from torch.nn import functional as F

        weights = None if self.positive_weights is None else output.new_tensor(self.positive_weights)
        return F.binary_cross_entropy_with_logits(output, target, reduction="none", pos_weight=weights).mean(1)

    def predictions(self, output: Tensor) -> Tensor:
        """Return 1 for each label of probability >= 1/2, else 0."""
        return (output >= 0).long()

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the probability of each label [n, L]."""
        return output.sigmoid()

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """Return the metrics; a label is predicted at probability >= 1/2, and the AUC is a mean over labels with both values."""
        from fedveil.tasks.scores import mean_auc

        output, target = evidence
        predicted, actual = output >= 0, target == 1
        hits, wrong = int((predicted & actual).sum()), int((predicted ^ actual).sum())
        return {
            "f1": 2 * hits / max(2 * hits + wrong, 1),
            "auc": mean_auc(output, actual.T),
            "hamming": wrong / actual.numel(),
            "all_zero": float(actual.double().mean()),
        }

    def trivial(self, target: Tensor) -> float:
        """Return the F1 score of the best constant prediction: the k most frequent labels, for the best k."""
        import torch

        counts = target.double().sum(0).sort(descending=True).values
        given = len(target) * torch.arange(1, len(counts) + 1)
        return float((2 * counts.cumsum(0) / (given + counts.sum())).max())
