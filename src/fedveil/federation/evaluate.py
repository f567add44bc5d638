"""Loss, accuracy, macro precision, recall and F1, and accuracy per client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.federation.clients import Clients
    from fedveil.training.params import FlatModel

_BATCH = 1000


@dataclass(frozen=True)
class Scores:
    """Quality of one model on one set; macro figures are plain means over the classes that occur in the labels."""

    loss: float
    accuracy: float
    precision: float
    recall: float
    f1: float

    @classmethod
    def of(cls, loss: float, confusion: Tensor) -> Scores:
        """From the mean loss and the confusion matrix [class, predicted]; a class never predicted has precision 0."""
        table = confusion.double()
        hit, actual, predicted = table.diagonal(), table.sum(1), table.sum(0)
        seen = actual > 0
        precision = hit / predicted.clamp_min(1)
        recall = hit / actual.clamp_min(1)
        f1 = 2 * precision * recall / (precision + recall).clamp_min(1e-12)
        accuracy = float(hit.sum() / table.sum())
        return cls(loss, accuracy, *(float(m[seen].mean()) for m in (precision, recall, f1)))


def predict(model: FlatModel, x: Tensor, batch_statistics: bool = False) -> Tensor:
    """Logits [n, classes], on the CPU; with `batch_statistics`, batch normalisation uses each batch's own (buffers stay)."""
    kept, device = model.buffers(), model.vector.device
    model.module.train(batch_statistics)
    with torch.inference_mode():
        logits = torch.cat([model.module(part.to(device)) for part in torch.split(x, _BATCH)]).cpu()
    model.module.train()
    if kept.numel():
        model.load_buffers(kept)
    return logits.clone()


def score(logits: Tensor, y: Tensor) -> Scores:
    """Scores of logits [n, classes] against labels [n]."""
    classes = logits.shape[1]
    confusion = torch.bincount(y * classes + logits.argmax(1), minlength=classes * classes).view(classes, classes)
    return Scores.of(float(F.cross_entropy(logits, y)), confusion)


def client_accuracy(model: FlatModel, tests: Clients, batch_statistics: bool = False) -> list[float | None]:
    """Accuracy of one model on each client's own test examples; None for a client without any."""
    if not len(tests.y):
        return [None] * len(tests)
    right = (predict(model, tests.x, batch_statistics).argmax(1) == tests.y).double()
    sums = torch.cat([right.new_zeros(1), right.cumsum(0)])
    lo, hi = torch.from_numpy(tests.offsets[:-1]), torch.from_numpy(tests.offsets[1:])
    hits, sizes = (sums[hi] - sums[lo]).tolist(), tests.sizes().tolist()
    return [h / n if n else None for h, n in zip(hits, sizes, strict=True)]
