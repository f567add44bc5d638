"""Originals beside reconstructions, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fedveil.attacks.metrics import score
from fedveil.drawing.picture_rows import save_rows
from fedveil.errors import ConfigError


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
