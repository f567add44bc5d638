"""Rows of images below each other, each row named and each image captioned."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedveil.drawing.figure_style import blank, save


def save_rows(path: Path, rows: Sequence[tuple[str, NDArray[np.float32], Sequence[str]]], title: str) -> Path:
    """Write a picture that only its owner may read: it shows examples.

    Args:
        path: ends in .png, .pdf or .svg. rows: name, images (n, height, width, 1 or 3) in [0, 1], and a caption for each; every
            row has as many images as the first.
    """
    n = len(rows[0][1])
    width = max(1.1 * n + 1.4, 6.0)
    lines = [part for line in title.split("\n") for part in textwrap.wrap(line, int(width * 14))]
    figure = blank(width, 1.42 * len(rows) + 0.1 + 0.18 * len(lines))
    figure.suptitle("\n".join(lines), fontsize=9)
    axes = figure.subplots(len(rows), n, squeeze=False)
    for line, (name, images, captions) in zip(axes, rows, strict=True):
        for axis, image, caption in zip(line, images, captions, strict=True):
            axis.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_xlabel(caption, fontsize=8)
        line[0].set_ylabel(name, fontsize=8)
    return save(figure, path, dpi=120, private=True)
