"""Originals beside reconstructions, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fedveil.attacks.metrics import psnr
from fedveil.errors import ConfigError


def save_comparison(path: str | Path, originals: Tensor, rows: Sequence[tuple[str, Tensor]], title: str = "") -> Path:
    """Save a picture: the originals on top, one row per reconstruction below, each with its PSNR in dB.

    originals and every row's images: (n, 1 or 3, height, width) in [0, 1]. path: ends in .png, .pdf or .svg.
    Raises ConfigError for images that cannot be shown.
    """
    if originals.ndim != 4 or originals.shape[1] not in (1, 3) or not rows:
        raise ConfigError(f"a picture needs images (n, 1 or 3, height, width) and one row, got {tuple(originals.shape)}")
    from matplotlib.figure import Figure

    n = len(originals)
    figure = Figure(figsize=(1.1 * n + 1.4, 1.35 * (len(rows) + 1) + 0.3), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(len(rows) + 1, n, squeeze=False)
    for line, (name, images) in zip(axes, [("original", originals), *rows], strict=True):
        decibels = [None] * n if images is originals else psnr(images, originals).tolist()
        for axis, image, value in zip(line, images, decibels, strict=True):
            axis.imshow(image.permute(1, 2, 0).numpy().squeeze(), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            if value is not None:
                axis.set_xlabel(f"{value:.1f} dB", fontsize=8)
        line[0].set_ylabel(name, fontsize=8)
    target = Path(path)
    figure.savefig(target, dpi=120)
    return target
