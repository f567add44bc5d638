"""Whitening by public examples: what varies together among them is turned apart and brought to the same size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOOR = 1e-3
"""Added to each variance, as a share of the largest: what hardly varies is not blown up."""


@dataclass(frozen=True)
class Whitening:
    """Features [n, k] to (features - mean) @ matrix [n, m]."""

    mean: NDArray[np.float32]
    matrix: NDArray[np.float32]

    def __call__(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """The whitened features."""
        return np.asarray((features - self.mean) @ self.matrix, dtype=np.float32)


def whitening_of(parts: list[NDArray[np.float32]], components: int) -> Whitening:
    """The whitening of public features; sets of examples count the same, whatever their size.

    Args:
        parts: each [n_i, k]. components: principal components that are kept, at most k.
    """
    mean = np.mean([part.mean(axis=0, dtype=np.float64) for part in parts], axis=0)
    centred = [part - mean for part in parts]
    covariance = sum(part.T @ part / len(part) for part in centred) / len(parts)
    variances, axes = np.linalg.eigh(covariance)
    variances, axes = variances[::-1][:components], axes[:, ::-1][:, :components]
    largest = np.abs(axes).argmax(axis=0)
    axes = axes * np.sign(axes[largest, np.arange(axes.shape[1])])  # the sign of an eigenvector is arbitrary
    matrix = axes / np.sqrt(np.maximum(variances, 0) + FLOOR * variances[0])
    return Whitening(mean.astype(np.float32), matrix.astype(np.float32))


def unit_variance(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each example's features with mean 0 and mean square 1, whatever the others are; an example without contrast becomes 0."""
    centred = features - features.mean(axis=1, keepdims=True)
    return unit_power(centred)


def unit_power(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each example's features with mean square 1."""
    power = np.sqrt(np.mean(features * features, axis=1, keepdims=True))
    found: NDArray[np.float32] = (features / np.maximum(power, 1e-6)).astype(np.float32)
    return found
