"""Metrics of tasks, on the CPU. Sorting is done by numpy, which is ten times as fast as torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def _confusion(predicted: Tensor, actual: Tensor, classes: int) -> Tensor:
    """Return counts [actual, predicted] of class numbers [n]."""
    return torch.bincount(actual * classes + predicted, minlength=classes * classes).view(classes, classes)


def class_scores(predicted: Tensor, actual: Tensor, classes: int) -> dict[str, float]:
    """Return accuracy, macro precision, recall and F1 of predicted classes [n], and the share of the most frequent class.

    Macro figures are plain means over the classes that occur; a class that is never predicted has precision 0.
    """
    table = _confusion(predicted, actual, classes).double()
    hit, actual_counts, predicted_counts = table.diagonal(), table.sum(1), table.sum(0)
    occurring = actual_counts > 0
    precision, recall = hit / predicted_counts.clamp_min(1), hit / actual_counts.clamp_min(1)
    f1 = 2 * precision * recall / (precision + recall).clamp_min(1e-12)
    macro = {"precision": precision, "recall": recall, "f1": f1}
    means = {name: float(values[occurring].mean()) for name, values in macro.items()}
    return {"accuracy": float(hit.sum() / table.sum()), **means, "majority": float(actual_counts.max() / table.sum())}


def auc(scores: Tensor, positive: Tensor) -> float:
    """Return the area under the ROC curve: the probability that a positive example scores above a negative one, ties half.

    Args:
        scores: [n]. positive: [n], bool.

    Returns:
        NaN if all examples are of one kind.
    """
    values, kind = scores.numpy(), positive.numpy()
    good, bad = np.sort(values[kind]), np.sort(values[~kind])
    if not len(good) or not len(bad):
        return math.nan
    below, upto = (np.searchsorted(bad, good, side).sum(dtype=np.float64) for side in ("left", "right"))
    return float(below + upto) / (2 * len(good) * len(bad))


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Return the mean, over the positive examples, of the precision at each one's score; NaN without any.

    Args:
        scores: [n]. positive: [n], bool.
    """
    order = np.argsort(-scores.numpy(), kind="stable")
    hits = np.cumsum(positive.numpy()[order])
    if not len(hits) or not hits[-1]:
        return math.nan
    last = np.flatnonzero(np.append(np.diff(scores.numpy()[order]) != 0, True))  # ties share one threshold
    return float((np.diff(hits[last], prepend=0) * hits[last] / (last + 1)).sum() / hits[-1])


def macro_auc(scores: Tensor, actual: Tensor) -> float:
    """Return the mean over the classes that occur of the AUC of a class against the rest; scores [n, classes], actual [n]."""
    return mean_auc(scores, actual[None] == torch.arange(scores.shape[1])[:, None])


def mean_auc(scores: Tensor, positive: Tensor) -> float:
    """Return the mean AUC of the columns of scores [n, columns] for which both kinds occur in `positive` [columns, n]."""
    values = [auc(column, kind) for column, kind in zip(scores.T.contiguous(), positive, strict=True)]
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


def means_by_client(values: Tensor, offsets: NDArray[np.int64]) -> list[float | None]:
    """Return the mean of values [n] over each client's range offsets[i] to offsets[i + 1]; None for an empty range."""
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    lo, hi = torch.from_numpy(offsets[:-1]), torch.from_numpy(offsets[1:])
    sizes = (hi - lo).tolist()
    return [total / n if n else None for total, n in zip((sums[hi] - sums[lo]).tolist(), sizes, strict=True)]


def concordance(risk: Tensor, time: Tensor, event: Tensor) -> float:
    """Return Harrell's C: the share of pairs in which the example that survives less long has the higher risk.

    Only pairs count in which it is known which one that is; a pair with equal risks counts half.

    Args:
        risk, time: [n]. event: [n], bool; False if the example was censored at `time`.

    Returns:
        NaN without such a pair.
    """
    order = np.lexsort((event.numpy(), -time.numpy()))  # longest time first, and at equal times censored before events
    risks, times, events = (part.numpy()[order] for part in (risk, -time, event))
    first, end = (np.searchsorted(times, times, side) for side in ("left", "right"))
    lost = np.concatenate([[0], np.cumsum(~events)])
    longer = first + lost[end] - lost[first]  # number of leading examples known to have survived longer
    concordant, size = 0.0, 256
    for start in range(0, len(order), size):
        here = events & (longer >= start) & (longer < start + size)
        event_risks, others, rest = risks[here, None], np.sort(risks[:start]), risks[start : start + size]
        concordant += sum(np.searchsorted(others, event_risks, side).sum(dtype=np.float64) for side in ("left", "right")) / 2
        counts = np.arange(start, start + len(rest)) < longer[here, None]
        concordant += (counts * ((rest < event_risks) + 0.5 * (rest == event_risks))).sum()
    pairs = int(longer[events].sum())
    return float(concordant) / pairs if pairs else math.nan
