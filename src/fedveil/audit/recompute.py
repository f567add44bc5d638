"""Recompute the noise: is the std on each layer what the accountant was told? (chi-squared test per layer)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtr, chdtri

from fedveil.accounting.types import Audit
from fedveil.audit.intervals import check_level, epsilon_of_mu
from fedveil.audit.subject import Subject
from fedveil.errors import ConfigError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LayerNoise:
    """Noise of one layer: the std that was declared (rms over its coordinates), the measured one, and one-sided p-values.

    p_low is small if there is less noise than declared (a privacy fault), p_high if there is more (a waste). `upper` is an
    upper confidence bound on measured / declared.
    """

    layer: str
    declared: float
    measured: float
    p_low: float
    p_high: float
    upper: float


def layer_noise(subject: Subject, uploads: Sequence[Floats] | Floats, alpha: float = 0.05, *, world: int = 0) -> list[LayerNoise]:
    """Compare the noise in uploads of one world with the std the accountant was told, layer by layer.

    Args:
        subject: gives the noiseless upload, the declared std per coordinate and the layers.
        uploads: [n, d] released vectors of `world`.
        alpha: error probability over all layers together (Bonferroni).
        world: 0 or 1.

    Layers in which nothing was declared to be noised are left out (the structural audit speaks about them).
    """
    noise = np.asarray(uploads, dtype=np.float64) - subject.mean[world]
    if noise.ndim != 2 or noise.shape[0] < 1:
        raise ConfigError(f"uploads must be [n, d] with n >= 1, got shape {noise.shape}")
    declared = subject.noise_std[world]
    layers = {name: part for name, part in subject.named_layers.items() if np.any(declared[part] > 0)}
    return [_one(name, noise[:, part], declared[part], check_level(alpha) / len(layers)) for name, part in layers.items()]


def _one(name: str, noise: Floats, declared: Floats, alpha: float) -> LayerNoise:
    noisy = declared > 0
    z = noise[:, noisy] / declared[noisy]
    total, degrees = float(np.sum(z * z)), z.size
    rms = float(np.sqrt(np.mean(declared[noisy] ** 2)))
    low = float(chdtr(degrees, total))
    upper = float(np.sqrt(total / chdtri(degrees, 1 - alpha)))
    return LayerNoise(name, rms, rms * float(np.sqrt(total / degrees)), low, 1 - low, upper)


def audit_noise(subject: Subject, uploads: Sequence[Floats] | Floats, delta: float, alpha: float = 0.05) -> Audit:
    """Lower bound on epsilon from the measured noise: mu >= gap of the worlds / (declared std x `upper`), squares added.

    Assumes independent Gaussian noise of the declared shape inside each layer; it then uses all coordinates of all uploads and is
    far sharper than a threshold test. Where the assumption is open, read it as a check of the implementation.
    """
    found = {row.layer: row for row in layer_noise(subject, uploads, alpha)}
    gap, declared = subject.mean[1] - subject.mean[0], subject.noise_std[0]
    total = 0.0
    for name, row in found.items():
        part = subject.named_layers[name]
        noisy = declared[part] > 0
        total += float(np.sum((gap[part][noisy] / (declared[part][noisy] * row.upper)) ** 2))
    worst = min(found.values(), key=lambda row: row.measured / row.declared)
    ratio = worst.measured / worst.declared
    note = f"assumes independent Gaussian noise; smallest ratio to the declared std: {ratio:.4g} ({worst.layer})"
    n = int(np.asarray(uploads).shape[0])
    return Audit(
        epsilon_of_mu(float(np.sqrt(total)), delta),
        delta,
        subject.scope,
        "recomputed noise, chi-squared",
        1 - alpha,
        n,
        note=note,
    )
