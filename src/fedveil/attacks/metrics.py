"""The distance of a reconstruction from the original, in numbers and as a picture.

Images are (n, channels, height, width) in [0, 1]; every score is per image, (n,). SSIM is the one of Wang et al. 2004:
Gaussian window 11x11, sigma 1.5, K1 0.01, K2 0.03, population covariance, per channel, border of 5 pixels left out. It equals
scikit-image's structural_similarity(gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

from fedveil.drawing import save_rows
from fedveil.errors import ConfigError

_PSNR_CAP = 120.0
_SUCCESS_DB = 20.0


def mse(images: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error of each image."""
    _check(images, truth)
    return (images.double() - truth.double()).square().flatten(1).mean(1)


def mae(images: Tensor, truth: Tensor) -> Tensor:
    """Mean absolute error of each image."""
    _check(images, truth)
    return (images.double() - truth.double()).abs().flatten(1).mean(1)


def psnr(images: Tensor, truth: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, 10 log10(1 / MSE), at most 120."""
    return -10 * mse(images, truth).clamp_min(10 ** (-_PSNR_CAP / 10)).log10()


def ssim(images: Tensor, truth: Tensor) -> Tensor:
    """Structural similarity of each image, in [-1, 1]; see the module for the convention. Sides of at least 11."""
    _check(images, truth)
    if images.ndim != 4 or min(images.shape[-2:]) < 11:
        raise ConfigError(f"SSIM needs images (n, channels, height, width) with sides >= 11, got {tuple(images.shape)}")
    window = torch.exp(-(torch.arange(-5, 6, dtype=torch.float64) ** 2) / (2 * 1.5**2))
    window = window / window.sum()

    def blur(x: Tensor) -> Tensor:
        rows = F.conv2d(x.flatten(0, 1).unsqueeze(1), window.view(1, 1, -1, 1))
        return F.conv2d(rows, window.view(1, 1, 1, -1)).view(*x.shape[:2], *(side - 10 for side in x.shape[-2:]))

    a, b = images.double(), truth.double()
    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b, cov = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2, blur(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    index = (2 * mean_a * mean_b + c1) * (2 * cov + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return index.flatten(1).mean(1)


def matched(images: Tensor, truth: Tensor) -> Tensor:
    """Reconstructions reordered to the originals they fit best: the assignment of least total MSE (Hungarian)."""
    _check(images, truth)
    cost = torch.cdist(images.double().flatten(1), truth.double().flatten(1)).square().numpy()
    rows, columns = linear_sum_assignment(cost)
    ordered = torch.empty_like(images)
    ordered[torch.from_numpy(columns)] = images[torch.from_numpy(rows)]
    return ordered


@dataclass(frozen=True)
class ImageScores:
    """Scores of a set of reconstructions: per image, and what is printed of them."""

    mse: tuple[float, ...]
    mae: tuple[float, ...]
    psnr: tuple[float, ...]
    ssim: tuple[float, ...] | None

    @property
    def success(self) -> float:
        """Share of the images with a PSNR of at least 20 dB."""
        return float(np.mean([p >= _SUCCESS_DB for p in self.psnr]))

    def summary(self) -> dict[str, float | int]:
        """Mean and median of every score, and the success rate."""
        table: dict[str, float | int] = {"images": len(self.psnr), "success_rate_20dB": self.success}
        for name, values in (("mse", self.mse), ("mae", self.mae), ("psnr", self.psnr), ("ssim_gaussian11_cropped", self.ssim)):
            if values is not None:
                table |= {f"{name}_mean": float(np.mean(values)), f"{name}_median": float(np.median(values))}
        return table


def score(images: Tensor, truth: Tensor) -> ImageScores:
    """Return all scores, image by image; for a batch in unknown order, apply `matched` first.

    SSIM is left out (None) for signals and for sides below 11.
    """
    shaped = images.ndim == 4 and min(images.shape[-2:]) >= 11
    return ImageScores(
        mse=tuple(mse(images, truth).tolist()),
        mae=tuple(mae(images, truth).tolist()),
        psnr=tuple(psnr(images, truth).tolist()),
        ssim=tuple(ssim(images, truth).tolist()) if shaped else None,
    )


def floors(truth: Tensor, reference: Tensor, seed: int = 0) -> dict[str, ImageScores]:
    """Scores of an attacker without any upload, who guesses the mean image, another image, or uniform noise.

    truth: the attacked images. reference: other images of the same distribution, (m, *shape), m >= 1.
    """
    rng = torch.Generator().manual_seed(seed)
    other = reference[torch.randint(len(reference), (len(truth),), generator=rng)]
    return {
        "mean image": score(reference.mean(0, keepdim=True).expand_as(truth), truth),
        "other image": score(other, truth),
        "uniform": score(torch.rand(truth.shape, generator=rng), truth),
    }


def _check(images: Tensor, truth: Tensor) -> None:
    if images.shape != truth.shape or len(images) == 0:
        raise ConfigError(
            f"images {tuple(images.shape)} and originals {tuple(truth.shape)} must have one shape, and not be empty"
        )
    for name, value in (("images", images), ("originals", truth)):
        if not bool(((value >= 0) & (value <= 1)).all()):
            raise ConfigError(f"{name} must lie in [0, 1]; use Bounds.images (clamps a diverged reconstruction)")


def save_comparison(
    path: str | Path, originals: Tensor, rows: Sequence[tuple[str, Tensor]], title: str = "", paired: bool = True
) -> Path:
    """Save a picture: the originals on top, one row per reconstruction below, each with its PSNR in dB, and SSIM from 11 pixels.

    originals and every row's images: (n, 1 or 3, height, width) in [0, 1]. path: ends in .png, .pdf or .svg.
    paired: whether an image stands for the original above it; else it has no scores.
    Raises ConfigError for images that cannot be shown.
    """
    if originals.ndim != 4 or originals.shape[1] not in (1, 3) or not rows:
        raise ConfigError(f"a picture needs images (n, 1 or 3, height, width) and one row, got {tuple(originals.shape)}")
    drawn = []
    for name, images in [("original" if paired else "real", originals), *rows]:
        captions = _captions(images, originals) if paired and images is not originals else [""] * len(originals)
        drawn.append((name, images.permute(0, 2, 3, 1).numpy(), captions))
    return save_rows(Path(path), drawn, title)


def _captions(images: Tensor, originals: Tensor) -> list[str]:
    scores = score(images, originals)
    if scores.ssim is None:
        return [f"{p:.1f} dB" for p in scores.psnr]
    return [f"{p:.1f} dB, {s:.2f}" for p, s in zip(scores.psnr, scores.ssim, strict=True)]
