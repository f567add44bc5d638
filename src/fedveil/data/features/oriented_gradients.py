"""Oriented gradients of pictures, pooled: a fixed function of one picture, in which nothing was learned from any data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.ndimage import gaussian_filter1d

from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pictures = NDArray[np.float32]

SCALES = (0.8, 1.6)
"""Standard deviations of the smoothing, in pixels."""
DIRECTIONS = 4
CELLS = 7
"""Cells a side that each map is averaged over."""


def oriented_gradients(pictures: Pictures) -> NDArray[np.float32]:
    """The picture smoothed, and how much it rises and falls in four directions at two scales, averaged over 7 x 7 cells.

    Each of the 17 maps a channel is half-wave rectified before it is averaged; square roots of the averages are returned.

    Args:
        pictures: float32 [n, channels, height, width], values from 0 to 1, sides of at least 7.

    Returns:
        float32 [n, channels * 17 * 49].

    Raises:
        ConfigError: the examples are no such pictures.
    """
    if pictures.ndim != 4 or min(pictures.shape[2:]) < CELLS:
        raise ConfigError(
            f"data.features = 'oriented-gradients' needs pictures (channels, height, width) with sides of at least {CELLS}, and "
            f"an example has the shape {pictures.shape[1:]}"
        )
    height, width = pictures.shape[2:]
    cells = _cells(height), _cells(width)
    maps = [_both(pictures, *(c @ _smoothing(SCALES[0], side) for c, side in zip(cells, (height, width), strict=True)))]
    for scale in SCALES:
        across = _both(pictures, _smoothing(scale, height), _smoothing(scale, width, 1))
        down = _both(pictures, _smoothing(scale, height, 1), _smoothing(scale, width))
        for k in range(DIRECTIONS):
            angle = np.pi * k / DIRECTIONS
            slope = np.float32(np.cos(angle)) * across + np.float32(np.sin(angle)) * down
            maps += [_both(np.maximum(side, 0), *cells) for side in (slope, -slope)]
    found: NDArray[np.float32] = np.sqrt(np.maximum(np.stack(maps, axis=2), 0)).reshape(len(pictures), -1)
    return found


def mirrored_gradients(pictures: Pictures) -> Pictures:
    """The sum of the oriented gradients of a picture and of its mirror image: left and right are not told apart.

    For pictures whose mirror images could be of the same data, such as photographs; half as many directions are left to learn.

    Args:
        pictures: as for `oriented_gradients`.

    Returns:
        float32 [n, channels * 17 * 49].
    """
    return oriented_gradients(pictures) + oriented_gradients(np.ascontiguousarray(pictures[..., ::-1]))


def _both(pictures: Pictures, rows: Pictures, columns: Pictures) -> Pictures:
    """A linear map of the rows, and one of the columns, of each picture."""
    found: Pictures = np.matmul(np.matmul(rows, pictures), columns.T)
    return found


def _smoothing(scale: float, side: int, order: Literal[0, 1] = 0) -> Pictures:
    """Gaussian smoothing, or its derivative, of a line of pixels that goes on as it ends [side, side]."""
    matrix: Pictures = gaussian_filter1d(np.eye(side, dtype=np.float32), scale, axis=0, order=order, mode="nearest")
    return matrix


def _cells(side: int) -> Pictures:
    """Averages of a line of pixels over cells of about the same length [CELLS, side]."""
    found = np.zeros((CELLS, side), np.float32)
    for i in range(CELLS):
        first, end = i * side // CELLS, -(-(i + 1) * side // CELLS)
        found[i, first:end] = 1 / (end - first)
    return found
