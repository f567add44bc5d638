"""Regression of one or several quantities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.data.catalogue import Info
from fedveil.tasks.task import Column, Task, need_quantities

if TYPE_CHECKING:
    from torch import Tensor


class Regression(Task):
    """One or several quantities: the network learns (target - mean) / scale.

    error: the loss is its mean; Huber's is quadratic up to `huber`. mean, scale: public constants in the unit of the target, not
    computed from private data. Metrics are in the unit of the target.
    """

    metrics: ClassVar = (
        Column("rmse", "Root mean squared error", "in the unit of the target", "lower"),
        Column("mae", "Mean absolute error", "in the unit of the target", "lower"),
        Column("r2", "R², share of the variance explained", "R²", "higher"),
    )
    loss_unit: ClassVar = "loss of the standardised target"
    output_form: ClassVar = "[n, k], one number for each of the target"
    trivial_answer: ClassVar = "always the mean of the test set"

    name: Literal["regression"] = "regression"
    error: Literal["squared", "absolute", "huber"] = "squared"
    huber: float = Field(1.0, gt=0, allow_inf_nan=False)
    mean: float = Field(0.0, allow_inf_nan=False)
    scale: float = Field(1.0, gt=0, allow_inf_nan=False)

    def check(self, info: Info) -> None:
        """Require targets that are quantities."""
        need_quantities(self.name, info)

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean error over the numbers of each target."""
        from torch.nn import functional as F

        wanted = (target - self.mean) / self.scale
        if output.numel() != wanted.numel():
            given, needed = output[0].numel(), wanted[0].numel()
            raise ValueError(f"it gives {given} for each example: set the width of its last layer to {needed}")
        predicted = output.reshape(wanted.shape)
        if self.error == "huber":
            each = F.huber_loss(predicted, wanted, reduction="none", delta=self.huber)
        else:
            each = (F.mse_loss if self.error == "squared" else F.l1_loss)(predicted, wanted, reduction="none")
        return each.reshape(len(each), -1).mean(1)

    def predictions(self, output: Tensor) -> Tensor:
        """Return the quantities in the unit of the target, as [n] if it is one number."""
        quantities = output * self.scale + self.mean
        return quantities.reshape(-1) if quantities[:1].numel() == 1 else quantities

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """Return the metrics; R² is over all numbers together, relative to each number's mean over the test set."""
        output, target = evidence
        error = output.reshape(target.shape).double() * self.scale + self.mean - target.double()
        spread = (target.double() - target.double().mean(0)).square().sum()
        return {
            "rmse": float(error.square().mean().sqrt()),
            "mae": float(error.abs().mean()),
            "r2": float(1 - error.square().sum() / spread) if spread > 0 else float("nan"),
        }

    def trivial(self, target: Tensor) -> float:
        """Return the RMSE of predicting each number's mean."""
        exact = target.double()
        return float((exact - exact.mean(0)).square().mean().sqrt())
