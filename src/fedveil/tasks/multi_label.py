"""Any number of labels for each example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fedveil.data.catalogue import Info
from fedveil.errors import ConfigError
from fedveil.tasks.column import Column
from fedveil.tasks.task import Task, Weight, need_quantities, need_weights, weights_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class MultiLabel(Task):
    """Any number of L labels: the mean of the cross-entropies of their logits; targets are 0 and 1 in float32.

    positive_weights: for each label, the factor of the loss where it is 1; public: not computed from private data.
    """

    metrics: ClassVar = (
        Column("f1", "F1 score", "micro mean", "higher", share=True),
        Column("auc", "Area under the ROC curve", "AUC, macro mean", "higher", share=True),
        Column("hamming", "Hamming loss", "wrong labels", "lower", share=True),
        Column("all_zero", "Hamming loss of never a label", "wrong labels", share=True),
    )
    loss_unit: ClassVar = "cross-entropy, mean over labels"
    output_form: ClassVar = "[n, L], a logit for each label"
    trivial_answer: ClassVar = "always the same labels"

    name: Literal["multi-label"] = "multi-label"
    positive_weights: tuple[Weight, ...] | None = None

    def check(self, info: Info) -> None:
        """A row of zeros and ones, and a weight for each label where there are any."""
        need_quantities(self.name, info, "a 0 or 1 for each label")
        if len(info.target.shape) != 1:
            raise ConfigError(f"task.name = 'multi-label' needs targets of shape (labels,); {info.name} has {info.target.shape}")
        need_weights("positive_weights", self.positive_weights, info, "labels", info.target.shape[0])

    def wrong_targets(self, target: NDArray[Any]) -> str:
        """All are 0 or 1."""
        return "" if np.isin(target, (0, 1)).all() else "labels other than 0 and 1"

    @property
    def largest_weight(self) -> float:
        """That of an example with every label whose weight is above 1, and no other."""
        weights = self.positive_weights or (1.0,)
        return sum(max(1.0, weight) for weight in weights) / len(weights)

    def example_weights(self, target: Tensor) -> Tensor | None:
        """Return the mean weight of each example's labels; how its labels weigh against each other is in its gradient."""
        if self.positive_weights is None:
            return None
        weights = weights_of(self.positive_weights, target)
        return weights.where(target == 1, weights.new_ones(())).mean(1)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over the labels."""
        from torch.nn import functional as F

        weights = None if self.positive_weights is None else output.new_tensor(self.positive_weights)
        return F.binary_cross_entropy_with_logits(output, target, reduction="none", pos_weight=weights).mean(1)

    def predictions(self, output: Tensor) -> Tensor:
        """Return 1 for each label that is at least as likely as not, else 0."""
        return (output >= 0).long()

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """A label is predicted from probability one half on; the AUC is a mean over labels of which both kinds occur."""
        from fedveil.tasks.scores import mean_auc

        output, target = evidence
        found, actual = output >= 0, target == 1
        hits, wrong = int((found & actual).sum()), int((found ^ actual).sum())
        return {
            "f1": 2 * hits / max(2 * hits + wrong, 1),
            "auc": mean_auc(output, actual.T),
            "hamming": wrong / actual.numel(),
            "all_zero": float(actual.double().mean()),
        }

    def trivial(self, target: Tensor) -> float:
        """Return the F1 score of always the same labels, as many of the commonest ones as score best."""
        import torch

        counts = target.double().sum(0).sort(descending=True).values
        given = len(target) * torch.arange(1, len(counts) + 1)
        return float((2 * counts.cumsum(0) / (given + counts.sum())).max())
