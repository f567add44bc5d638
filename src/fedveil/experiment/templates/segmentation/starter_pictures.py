"""Pictures with masks as data, and a network that finds the masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from fedveil.data.catalogue import Info, Targets
from fedveil.data.load import register
from fedveil.data.sources.raw import RawData

CLASSES = ("background", "spot")
SIDE = 12
TEST_FROM = 300
"""Cameras from this number on belong to no client: their pictures are the test set."""

INFO = Info(
    name="starter",
    title="grey pictures of 360 cameras; made up, replace them with yours",
    input_shape=(1, SIDE, SIDE),
    classes=len(CLASSES),
    train_size=1200,
    test_size=240,
    users=TEST_FROM,
    source="written by make_pictures.py",
    embedded=True,
    mean=(0.5,),  # of values from 0 to 1; known beforehand: never statistics of the data that are to be protected
    std=(0.25,),
    target=Targets((SIDE, SIDE), "int64", CLASSES),
)


@register(INFO)
def read(data_dir: Path | None) -> RawData:
    """starter.npz, from the configured `data.data_dir` or beside this file.

    It holds camera [n], pictures [n, 1, 12, 12] from 0 to 255 and masks [n, 12, 12].
    """
    with np.load((data_dir or Path(__file__).parent) / "starter.npz") as found:
        camera, pictures, masks = (found[name] for name in ("camera", "pictures", "masks"))
    test = camera >= TEST_FROM
    return RawData(pictures[~test], masks[~test], pictures[test], masks[test], users_train=camera[~test])


def net(channels: int = 8) -> nn.Module:
    """Scores [n, C, H, W]. It normalises with GroupNorm: BatchNorm would mix the examples of a batch."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.GroupNorm(2, channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, len(CLASSES), 1),
    )
