"""Pictures of random ellipses and boxes, drawn by this program: statistics of pictures in general, and data of nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

COUNT = 10_000
"""Pictures that are drawn."""
_SEED = 20_260
_MOST = 12
_BRIGHT_GROUND = 0.3


def random_shapes(shape: tuple[int, int, int], count: int = COUNT) -> NDArray[np.float32]:
    """The same pictures each time, float32 [count, *shape] from 0 to 1.

    Up to eleven shapes lie over each other near the middle; their sides are spread evenly on a logarithmic scale, from one pixel
    to nearly half the picture; three grounds in ten are not black.

    Args:
        shape: channels, height, width.
    """
    rng = np.random.default_rng(_SEED)
    channels, height, width = shape
    side = min(height, width)
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    pictures = np.zeros((count, channels, height, width), np.float32)
    for picture in pictures:
        if rng.random() < _BRIGHT_GROUND:
            picture[:] = rng.random((channels, 1, 1))
        for _ in range(rng.integers(1, _MOST)):
            x, y = rng.normal((width / 2, height / 2), side / 5)
            (a, b), angle = np.exp(rng.uniform(0, np.log(side / 2.2), 2)), rng.uniform(0, np.pi)
            along = ((columns - x) * np.cos(angle) + (rows - y) * np.sin(angle)) / a
            across = ((rows - y) * np.cos(angle) - (columns - x) * np.sin(angle)) / b
            round_one = rng.random() < 0.5
            inside = along**2 + across**2 < 1 if round_one else (abs(along) < 1) & (abs(across) < 1)
            picture[:, inside] = rng.random((channels, 1))
    return pictures
