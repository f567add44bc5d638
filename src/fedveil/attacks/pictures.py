"""Originals beside reconstructions, as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fedveil.attacks.metrics import score
from fedveil.errors import ConfigError
from fedveil.ledger.owner_only import owner_only


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
    from matplotlib.figure import Figure

    n = len(originals)
    width = max(1.1 * n + 1.4, 6.0)
    lines = [part for line in title.split("\n") for part in textwrap.wrap(line, int(width * 14))]
    figure = Figure(figsize=(width, 1.42 * (len(rows) + 1) + 0.1 + 0.18 * len(lines)), layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=9)
    axes = figure.subplots(len(rows) + 1, n, squeeze=False)
    for line, (name, images) in zip(axes, [("original" if paired else "real", originals), *rows], strict=True):
        captions = _captions(images, originals) if paired and images is not originals else [""] * n
        for axis, image, caption in zip(line, images, captions, strict=True):
            axis.imshow(image.permute(1, 2, 0).numpy().squeeze(), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_xlabel(caption, fontsize=8)
        line[0].set_ylabel(name, fontsize=8)
    target = Path(path)
    with open(target, "wb", opener=owner_only) as file:  # it shows examples
        figure.savefig(file, dpi=120, format=target.suffix[1:] or None)
    return target


def _captions(images: Tensor, originals: Tensor) -> list[str]:
    scores = score(images, originals)
    if scores.ssim is None:
        return [f"{p:.1f} dB" for p in scores.psnr]
    return [f"{p:.1f} dB, {s:.2f}" for p, s in zip(scores.psnr, scores.ssim, strict=True)]
