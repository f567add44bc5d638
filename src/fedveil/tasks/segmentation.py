"""Segmentation: one class for each place of a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from fedveil.data.catalogue import IGNORED, Info
from fedveil.errors import ConfigError
from fedveil.tasks.task import Column, Evidence, Task, Weight, need_classes, need_weights, weights_of

if TYPE_CHECKING:
    from torch import Tensor


Weighed = TypeVar("Weighed", float, "Tensor")


class Segmentation(Task):
    """A class for each place of a picture: cross-entropy plus Dice loss.

    cross_entropy, dice: factors of the mean cross-entropy of the places and of the Dice loss. class_weights: factor of the
    cross-entropy at the places of each class.
    The Dice loss is 1 - the mean over classes of (2 |p g| + smooth) / (|p| + |g| + smooth), with probabilities p and places g
    of the class in one example (Milletari et al. 2016, without squares). IGNORED places do not count.
    All constants are public.
    """

    metrics: ClassVar = (
        Column("iou", "Mean intersection over union", "mean over classes", "higher", share=True),
        Column("pixel_accuracy", "Pixel accuracy", "accuracy", "higher", share=True),
        Column("majority", "Pixel accuracy of always the commonest class", "accuracy", share=True),
    )
    loss_unit: ClassVar = "cross-entropy and Dice loss"
    output_form: ClassVar = "[n, C, H, W], a score for each class at each place"
    trivial_answer: ClassVar = "always the commonest class"

    name: Literal["segmentation"] = "segmentation"
    cross_entropy: float = Field(1.0, ge=0, allow_inf_nan=False)
    dice: float = Field(1.0, ge=0, allow_inf_nan=False)
    smooth: float = Field(1.0, gt=0, allow_inf_nan=False)
    class_weights: tuple[Weight, ...] | None = None

    @model_validator(mode="after")
    def _any(self) -> Self:
        if not self.cross_entropy and not self.dice:
            raise ConfigError("task.cross_entropy and task.dice are both 0, so there is nothing to learn: give one of them")
        return self

    def check(self, info: Info) -> None:
        """Require pictures of classes and, if weights are given, one for each class."""
        need_classes(self.name, info, 2)
        need_weights("class_weights", self.class_weights, info, "classes", info.classes)

    @property
    def largest_weight(self) -> float:
        """Return the weight of an example of the class of largest weight; the Dice loss has weight 1."""
        return self._with_dice(max(self.class_weights or (1.0,)))

    def example_weights(self, target: Tensor) -> Tensor | None:
        """Return the mean weight of each example's places; their weights relative to each other are part of the gradient."""
        if self.class_weights is None:
            return None
        counted = (target != IGNORED).flatten(1)
        each = weights_of(self.class_weights, target)[target.where(target != IGNORED, 0)].flatten(1)
        return self._with_dice((each * counted).sum(1) / counted.sum(1).clamp_min(1))

    def _with_dice(self, weight: Weighed) -> Weighed:
        return (self.cross_entropy * weight + self.dice) / (self.cross_entropy + self.dice)

    def predictions(self, output: Tensor) -> Tensor:
        """Return the number of the most likely class at each place."""
        return output.argmax(1)

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the probability of each class at each place [n, C, H, W]."""
        return output.softmax(1)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the weighted sum of cross-entropy and Dice loss."""
        from torch.nn import functional as F

        counted = (target != IGNORED).flatten(1)
        weights = None if self.class_weights is None else output.new_tensor(self.class_weights)
        each = F.cross_entropy(output, target, weights, ignore_index=IGNORED, reduction="none").flatten(1)
        loss = self.cross_entropy * each.sum(1) / counted.sum(1).clamp_min(1)
        return loss + self.dice * self._dice(output, target, counted) if self.dice else loss

    def _dice(self, output: Tensor, target: Tensor, counted: Tensor) -> Tensor:
        import torch

        classes = torch.arange(output.shape[1], device=output.device)[None, :, None]
        predicted = output.softmax(1).flatten(2) * counted[:, None]
        actual = (target.flatten(1)[:, None] == classes).to(output.dtype)
        both, sizes = (predicted * actual).sum(2), predicted.sum(2) + actual.sum(2)
        return 1 - ((2 * both + self.smooth) / (sizes + self.smooth)).mean(1)

    def evidence(self, output: Tensor, target: Tensor) -> Evidence:
        """Return losses [n], and counts [n, 3, C] of correct, actual and predicted places per class; no pictures are stored."""
        import torch

        n, classes = output.shape[:2]
        predicted = output.flatten(2).max(1).indices  # ten times as fast as argmax
        actual = torch.where(target == IGNORED, classes, target).flatten(1)
        pairs = (torch.arange(n)[:, None] * (classes + 1) + actual) * classes + predicted
        table = torch.bincount(pairs.flatten(), minlength=n * (classes + 1) * classes).view(n, classes + 1, classes)[:, :classes]
        return self.losses(output, target), torch.stack([table.diagonal(dim1=1, dim2=2), table.sum(2), table.sum(1)], 1)

    def test_loss(self, *evidence: Tensor) -> float:
        """Return the mean over the examples."""
        return float(evidence[0].mean())

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """Return the metrics over all places; the mean IoU is over the classes that occur in targets or predictions."""
        right, actual, predicted = evidence[1].sum(0).double()
        either, places = predicted + actual - right, actual.sum().clamp_min(1)
        return {
            "iou": float((right / either)[either > 0].mean()),
            "pixel_accuracy": float(right.sum() / places),
            "majority": float(actual.max() / places),
        }

    def trivial(self, target: Tensor) -> float | None:
        """Return the mean IoU of always predicting the most frequent class; None if no place counts."""
        counts = target[target != IGNORED].bincount()
        return float(counts.max() / counts.sum() / (counts > 0).sum()) if len(counts) else None
