"""SVHN's cropped digits in MATLAB files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedveil.data.catalogue import Info
from fedveil.data.sources.raw import Array, Format, RawData
from fedveil.errors import DataError

FILES = ("train_32x32.mat", "test_32x32.mat")


def matlab() -> Format:
    """train_32x32.mat and test_32x32.mat."""
    return Format(" and ".join(FILES), _read)


def _read(directory: Path, info: Info) -> RawData | None:
    paths = [directory / name for name in FILES]
    if not any(path.is_file() for path in paths):
        return None
    train, test = (_split(path, info) for path in paths)
    return RawData(*train, *test)


def _split(path: Path, info: Info) -> tuple[Array, Array]:
    """X is (32, 32, 3, N); y is (N, 1) from 1 to 10, where 10 stands for the digit 0."""
    from scipy.io import loadmat

    if not path.is_file():
        raise DataError(f"{path} is missing beside the other MATLAB file")
    try:
        content = loadmat(path, variable_names=["X", "y"])
    except Exception as error:  # a damaged file can raise anything
        raise DataError(f"{path}: not a readable MATLAB file ({error})") from None
    if not {"X", "y"} <= content.keys():
        raise DataError(f"{path}: expected the variables X and y")
    x, y = np.asarray(content["X"]), np.asarray(content["y"])
    channels, height, width = info.input_shape
    if x.dtype != np.uint8 or x.shape[:-1] != (height, width, channels):
        raise DataError(f"{path}: X is {x.dtype} {x.shape}; expected uint8 ({height}, {width}, {channels}, N)")
    if y.dtype.kind not in "iuf" or y.size != x.shape[-1] or not np.isin(y, np.arange(1, info.classes + 1)).all():
        raise DataError(f"{path}: y is {y.dtype} {y.shape}; expected {x.shape[-1]} labels from 1 to {info.classes}")
    return np.moveaxis(x, (3, 2), (0, 1)), y.reshape(-1).astype(np.int64) % 10
