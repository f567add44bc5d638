"""Which model a run hands over: its last one, or an average over the rounds, which is post-processing of what was released."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.federation.progress import Federation, Progress

DECAY = 0.9
"""Of the exponential moving average: what is left of a model's weight a round later."""


def average_in(federation: Federation, progress: Progress) -> None:
    """Take the model after the coming round's step into the average, in float64."""
    s, kind, average = federation.setting, federation.setting.final_model, progress.average
    if kind == "last" or (kind == "tail" and progress.round < s.rounds - s.tail_rounds):
        return
    decay = 1.0 if kind == "tail" else DECAY
    total = average.get("total", torch.zeros_like(progress.model, dtype=torch.float64))
    progress.average = {"total": decay * total + progress.model, "weight": decay * average.get("weight", 0.0) + 1.0}


def final_model(progress: Progress) -> Tensor:
    """The model [d] that the run would hand over now."""
    if not progress.average:
        return progress.model
    found: Tensor = (progress.average["total"] / progress.average["weight"]).to(progress.model.dtype)
    return found
