"""Scores of a run's models: loss, accuracy, macro precision, recall and F1, and accuracy per client."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from fedveil.training.local import HasPersonalModel

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.federation.clients import Clients
    from fedveil.federation.history import Record
    from fedveil.federation.progress import Federation, Progress
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


def global_model(federation: Federation, progress: Progress) -> FlatModel:
    """The network, loaded with the global model as it is now."""
    model = federation.context.model
    model.load(progress.model)
    if progress.buffers is not None:
        model.load_buffers(progress.buffers)
    return model


def evaluate(federation: Federation, progress: Progress) -> Record:
    """Scores of the current global model on the public test set and on the clients' own test sets.

    Where batch statistics never left the clients, batch normalisation uses those of the test batches.
    """
    model = global_model(federation, progress)
    own_statistics = progress.buffers is None
    x, y = federation.test
    with torch.no_grad():
        scores = score(predict(model, x, own_statistics), y)
        row: Record = {f"test_{k}": v for k, v in vars(scores).items()}
        if federation.client_tests is not None:
            row["client_accuracy"] = client_accuracy(model, federation.client_tests, own_statistics)
            row.update(_personal_scores(federation, progress, federation.client_tests))
    return row


def _personal_scores(federation: Federation, progress: Progress, tests: Clients) -> Record:
    """Accuracy of each client's own model on its own test examples, where the method has such models (see `HasPersonalModel`)."""
    objective = federation.context.objective
    if not isinstance(objective, HasPersonalModel):
        return {}
    each: list[float | None] = []
    for c in range(len(tests)):
        model, state = global_model(federation, progress), progress.privates.get(c, {})
        model.load(objective.personal(progress.model, state))
        if "buffers" in state:
            model.load_buffers(state["buffers"])
        x, y = tests.examples(c)
        own_statistics = progress.buffers is None and "buffers" not in state
        each.append(float((predict(model, x, own_statistics).argmax(1) == y).double().mean()) if len(y) else None)
    known = [a for a in each if a is not None]
    return {"personal_accuracy": each, "mean_personal_accuracy": sum(known) / len(known) if known else math.nan}
