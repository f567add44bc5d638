"""Losses that are linear in the model, so that an auditor dictates every gradient: an example is the row of its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.training.local import BatchGradient, Local, clip_
from fedveil.training.params import FlatModel, Layout

_MARGIN = 1e6
"""Far beyond any |<w, x>|: the cross-entropy of logits (<w, x> - margin, 0) at label 0 is margin - <w, x> in float32."""


class _Linear(nn.Module):
    def __init__(self, layout: Layout) -> None:
        super().__init__()
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, 2] of examples [n, d] whose cross-entropy at label 0 has the gradient -x."""
        score = x @ torch.cat([p.reshape(-1) for p in self.parameters()]) - _MARGIN
        return torch.stack([score, torch.zeros_like(score)], dim=1)


def linear_model(layout: Layout) -> FlatModel:
    """A network with this layout; at label 0 the cross-entropy of example x [d] has the gradient -x."""
    return FlatModel(_Linear(layout), built_in=True)


@dataclass(frozen=True)
class LinearLoss:
    """The gradient source of linear losses: the mean of a batch's examples [n, d], clipped to V where asked."""

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Write the mean gradient of the batch; the loss is its inner product with the model."""
        local.model.grad.copy_(x.mean(0))
        loss = local.model.grad @ local.model.vector
        if local.spec.batch_clip is not None:
            clip_(local.model.grad, local.spec.batch_clip)
        return loss

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return BatchGradient().batches(local, x, y)
