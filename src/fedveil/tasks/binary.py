"""Yes or no."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.data.catalogue import Info
from fedveil.errors import ConfigError
from fedveil.tasks.column import ACCURACY, Column
from fedveil.tasks.task import Task, need_classes, weights_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class Binary(Task):
    """One of two classes: cross-entropy of one logit, that of class 1.

    positive_weight: factor of the loss of examples of class 1, public: not computed from private data. The loss of a batch is
    the plain mean.
    """

    metrics: ClassVar = (
        Column("auc", "Area under the ROC curve", "AUC", "higher", share=True),
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
        """Two classes."""
        need_classes(self.name, info)
        if info.classes != 2:
            raise ConfigError(f"task.name = 'binary' learns 2 classes, and {info.name} has {info.classes}: take 'classification'")

    def outputs(self, info: Info) -> int:
        """One logit."""
        return 1

    @property
    def largest_weight(self) -> float:
        """That of both classes."""
        return max(1.0, self.positive_weight)

    def example_weights(self, target: Tensor) -> Tensor | None:
        """Return the weight of each example's class."""
        return None if self.positive_weight == 1 else weights_of((1.0, self.positive_weight), target)[target]

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Binary cross-entropy, times the weight of class 1 where it is the target."""
        from torch.nn import functional as F

        weight = None if self.positive_weight == 1 else output.new_tensor(self.positive_weight)
        logit = output.reshape(target.shape)
        return F.binary_cross_entropy_with_logits(logit, target.to(output.dtype), reduction="none", pos_weight=weight)

    def predictions(self, output: Tensor) -> Tensor:
        """Return 1 where class 1 is at least as likely as class 0, else 0."""
        return (output.reshape(-1) >= 0).long()

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """Class 1 is predicted from probability one half on; AUC and average precision ask for the order alone."""
        from fedveil.tasks.scores import auc, average_precision, class_scores

        logit, target = evidence[0].reshape(-1), evidence[1]
        found = class_scores((logit >= 0).long(), target, 2)
        return {
            "auc": auc(logit, target == 1),
            "average_precision": average_precision(logit, target == 1),
            "accuracy": found["accuracy"],
            "balanced_accuracy": found["recall"],
            "majority": found["majority"],
        }

    def trivial(self, target: Tensor) -> float | None:
        """Return the AUC of an order by chance; None where all examples are of one class."""
        return None if bool((target == target[0]).all()) else 0.5

    def client_scores(self, offsets: NDArray[np.int64], *evidence: Tensor) -> list[float | None]:
        """The AUC by client; None where all its examples are of one class."""
        from fedveil.tasks.scores import auc

        logit, target = evidence[0].reshape(-1), evidence[1]
        found = [auc(logit[lo:hi], target[lo:hi] == 1) for lo, hi in pairwise(offsets)]
        return [None if value != value else value for value in found]
