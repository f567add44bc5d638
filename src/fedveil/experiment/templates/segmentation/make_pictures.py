"""Writes starter.npz: made-up pictures of spots by 360 cameras, and where the spots are, always the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CAMERAS, PICTURES, SIDE = 360, 4, 12

draw = np.random.default_rng(0)
camera = np.repeat(np.arange(CAMERAS), PICTURES)
centre, radius = draw.uniform(3, SIDE - 3, (len(camera), 2)), draw.uniform(2, 4, len(camera))
row, column = np.mgrid[:SIDE, :SIDE]
distance = np.hypot(row - centre[:, 0, None, None], column - centre[:, 1, None, None])
masks = (distance < radius[:, None, None]).astype(np.int64)
brightness = 80 + draw.normal(0, 10, CAMERAS)[camera, None, None]
pictures = brightness + 70 * masks + draw.normal(0, 30, masks.shape)
np.savez_compressed(
    Path(__file__).with_name("starter.npz"), camera=camera, pictures=pictures.clip(0, 255).astype(np.uint8)[:, None], masks=masks
)
