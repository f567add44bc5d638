"""Metrics of tasks, on the CPU. What sorts is in numpy, which sorts ten times as fast as torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def confusion(predicted: Tensor, actual: Tensor, classes: int) -> Tensor:
    """Counts [actual, predicted] of class numbers [n]."""
    return torch.bincount(actual * classes + predicted, minlength=classes * classes).view(classes, classes)


def class_scores(predicted: Tensor, actual: Tensor, classes: int) -> dict[str, float]:
    """Accuracy, macro precision, recall and F1 of predicted classes [n], and the share of the commonest class.

    Macro figures are plain means over the classes that occur; a class never predicted has precision 0.
    """
    table = confusion(predicted, actual, classes).double()
    hit, known, guessed = table.diagonal(), table.sum(1), table.sum(0)
    seen = known > 0
    precision, recall = hit / guessed.clamp_min(1), hit / known.clamp_min(1)
    f1 = 2 * precision * recall / (precision + recall).clamp_min(1e-12)
    macro = {"precision": precision, "recall": recall, "f1": f1}
    means = {name: float(values[seen].mean()) for name, values in macro.items()}
    return {"accuracy": float(hit.sum() / table.sum()), **means, "majority": float(known.max() / table.sum())}


def auc(scores: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve: the chance that a positive example scores higher than a negative one, ties half.

    Args:
        scores: [n]. positive: [n], bool.

    Returns:
        NaN where all examples are of one kind.
    """
    values, kind = scores.numpy(), positive.numpy()
    good, bad = np.sort(values[kind]), np.sort(values[~kind])
    if not len(good) or not len(bad):
        return math.nan
    below, upto = (np.searchsorted(bad, good, side).sum(dtype=np.float64) for side in ("left", "right"))
    return float(below + upto) / (2 * len(good) * len(bad))


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """The mean over the positive examples of the precision at each one's score; NaN without any.

    Args:
        scores: [n]. positive: [n], bool.
    """
    order = np.argsort(-scores.numpy(), kind="stable")
    hits = np.cumsum(positive.numpy()[order])
    if not len(hits) or not hits[-1]:
        return math.nan
    last = np.flatnonzero(np.append(np.diff(scores.numpy()[order]) != 0, True))  # ties are found together
    return float((np.diff(hits[last], prepend=0) * hits[last] / (last + 1)).sum() / hits[-1])


def macro_auc(scores: Tensor, actual: Tensor) -> float:
    """The mean over the classes that occur of the AUC of each class against the rest; scores [n, classes], actual [n]."""
    return mean_auc(scores, actual[None] == torch.arange(scores.shape[1])[:, None])


def mean_auc(scores: Tensor, positive: Tensor) -> float:
    """The mean AUC of the columns of scores [n, columns] of which both kinds occur; their kinds are rows [columns, n]."""
    found = [auc(column, kind) for column, kind in zip(scores.T.contiguous(), positive, strict=True)]
    known = [value for value in found if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def means_by_client(values: Tensor, offsets: NDArray[np.int64]) -> list[float | None]:
    """The mean of values [n] over each client's stretch offsets[i] to offsets[i + 1]; None for an empty one."""
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    lo, hi = torch.from_numpy(offsets[:-1]), torch.from_numpy(offsets[1:])
    sizes = (hi - lo).tolist()
    return [total / n if n else None for total, n in zip((sums[hi] - sums[lo]).tolist(), sizes, strict=True)]


def concordance(risk: Tensor, time: Tensor, event: Tensor) -> float:
    """Harrell's C: of the pairs of which one is known to have lived shorter, the share in which its risk is higher; ties half.

    Args:
        risk, time: [n]. event: [n], bool; False where `time` is only known to be survived.

    Returns:
        NaN without such a pair.
    """
    order = np.lexsort((event.numpy(), -time.numpy()))  # the last comes first, and before an event who was lost at its time
    risks, times, events = (part.numpy()[order] for part in (risk, -time, event))
    first, end = (np.searchsorted(times, times, side) for side in ("left", "right"))
    lost = np.concatenate([[0], np.cumsum(~events)])
    longer = first + lost[end] - lost[first]  # how many at the start of the order are known to have lived longer
    found, size = 0.0, 256
    for start in range(0, len(order), size):
        here = events & (longer >= start) & (longer < start + size)
        own, known, rest = risks[here, None], np.sort(risks[:start]), risks[start : start + size]
        found += sum(np.searchsorted(known, own, side).sum(dtype=np.float64) for side in ("left", "right")) / 2
        counts = np.arange(start, start + len(rest)) < longer[here, None]
        found += (counts * ((rest < own) + 0.5 * (rest == own))).sum()
    pairs = int(longer[events].sum())
    return float(found) / pairs if pairs else math.nan
