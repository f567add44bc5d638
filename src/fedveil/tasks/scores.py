"""Metrics that several tasks share; all in float64, on the CPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
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
    good, bad = scores[positive], scores[~positive].sort().values
    if not len(good) or not len(bad):
        return math.nan
    below, upto = (torch.searchsorted(bad, good, right=right).double() for right in (False, True))
    return float((below + upto).mean() / (2 * len(bad)))


def macro_auc(scores: Tensor, actual: Tensor) -> float:
    """The mean over the classes that occur of the AUC of each class against the rest; scores [n, classes], actual [n]."""
    found = [auc(scores[:, c].contiguous(), actual == c) for c in range(scores.shape[1])]
    known = [value for value in found if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def means_by_client(values: Tensor, offsets: NDArray[np.int64]) -> list[float | None]:
    """The mean of values [n] over each client's stretch offsets[i] to offsets[i + 1]; None for an empty one."""
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    lo, hi = torch.from_numpy(offsets[:-1]), torch.from_numpy(offsets[1:])
    sizes = (hi - lo).tolist()
    return [total / n if n else None for total, n in zip((sums[hi] - sums[lo]).tolist(), sizes, strict=True)]
