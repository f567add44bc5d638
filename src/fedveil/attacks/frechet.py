"""How much generated images resemble a class: Frechet distance of features, and what a classifier says of them.

A Frechet distance depends on its feature extractor, so every score carries the extractor's name ("FD-<name>"). It is the
Frechet Inception Distance only if the extractor is that Inception network, which is not shipped here. Scores grow as n falls:
they are always taken at equal n and printed beside a floor of the same source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh
from torch import Tensor, nn

from fedveil.attacks.features import features, predictions
from fedveil.errors import ConfigError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Extractor:
    """A named feature function: images in [0, 1], (n, *shape), to features (n, k)."""

    name: str
    features: Callable[[Tensor], Tensor]


def from_classifier(name: str, module: nn.Module, to_inputs: Callable[[Tensor], Tensor] = lambda images: images) -> Extractor:
    """The penultimate features of a classifier; `to_inputs` turns images into its inputs."""
    return Extractor(name, lambda images: features(module, to_inputs(images)))


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """|mean_a - mean_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)) of two feature sets (n, k), with unbiased covariances S.

    The trace of the root is the sum of the roots of the eigenvalues of S_a^(1/2) S_b S_a^(1/2).
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise ConfigError(f"feature sets need shape (n >= 2, k) with one k, got {tuple(a.shape)} and {tuple(b.shape)}")
    first, second = a.double().numpy(), b.double().numpy()
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ConfigError("features must be finite")
    cov_a, cov_b = np.atleast_2d(np.cov(first.T)), np.atleast_2d(np.cov(second.T))
    values, vectors = eigh(cov_a)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    cross = np.sqrt(eigh(root @ cov_b @ root, eigvals_only=True).clip(0)).sum()
    shift = first.mean(0) - second.mean(0)
    return float(shift @ shift + np.trace(cov_a) + np.trace(cov_b) - 2 * cross)


@dataclass(frozen=True)
class ClassScores:
    """Generated images of one class. metric: "FD-<extractor>".

    distance: to real images of the class. same_source: between two disjoint halves of the real ones (the best possible).
    other_class: from real images of other classes to the class. class_rate: share that an independent classifier takes for
    the class. All at the same n per side.
    """

    metric: str
    distance: float
    same_source: float
    other_class: float
    class_rate: float
    n: int


def class_scores(
    generated: Tensor, real: Tensor, others: Tensor, label: int, extractor: Extractor, logits: Callable[[Tensor], Tensor]
) -> ClassScores:
    """Score generated images of class `label`; all images (n, *shape) in [0, 1].

    real: real images of the class, at least 4. others: real images of other classes. logits: an independent classifier.
    """
    n = min(len(generated), len(real) // 2, len(others))
    if n < 2:
        raise ConfigError(
            f"scores need at least 2 generated, 4 real and 2 other images, got {len(generated)}, {len(real)}, {len(others)}"
        )
    found = extractor.features
    first, second = found(real[:n]), found(real[n : 2 * n])
    return ClassScores(
        metric=f"FD-{extractor.name}",
        distance=frechet_distance(found(generated[:n]), first),
        same_source=frechet_distance(second, first),
        other_class=frechet_distance(found(others[:n]), first),
        class_rate=float((logits(generated[:n]).argmax(1) == label).double().mean()),
        n=n,
    )


def classifier_logits(
    module: nn.Module, to_inputs: Callable[[Tensor], Tensor] = lambda images: images
) -> Callable[[Tensor], Tensor]:
    """A classifier as a function of images in [0, 1]."""
    return lambda images: predictions(module, to_inputs(images))


def split_by_class(images: Tensor, labels: Tensor, label: int) -> tuple[Tensor, Tensor]:
    """Images of the class, and all others."""
    of_class: Tensor = torch.eq(labels, label)
    return images[of_class], images[~of_class]
