"""FEMNIST as LEAF prepares it: JSON files of users in train/ and test/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.catalogue import Info
from fedveil.data.sources.raw import Array, Format, RawData
from fedveil.errors import DataError


def femnist() -> Format:
    """Folders train and test with LEAF's JSON files; other LEAF sets look the same, so a folder above must say femnist."""
    return Format("folders train and test with the JSON files that LEAF writes, below a folder femnist", _read)


def _read(directory: Path, info: Info) -> RawData | None:
    files = {split: sorted((directory / split).glob("*.json")) for split in ("train", "test")}
    if not any(files.values()) or "femnist" not in directory.resolve().as_posix().lower():
        return None
    parts = {split: _split(paths, directory / split, info) for split, paths in files.items()}
    names = sorted({name for _, _, writers in parts.values() for name in writers})
    number = {name: position for position, name in enumerate(names)}
    (x_train, y_train, who_train), (x_test, y_test, who_test) = parts["train"], parts["test"]
    ids = [np.asarray([number[name] for name in who], dtype=np.int64) for who in (who_train, who_test)]
    return RawData(x_train, y_train, x_test, y_test, *ids)


def _split(paths: list[Path], folder: Path, info: Info) -> tuple[Array, Array, list[str]]:
    if not paths:
        raise DataError(f"{folder} holds no JSON files")
    pictures: list[Array] = []
    labels: list[Array] = []
    writers: list[str] = []
    for path in paths:
        for user, data in _users(path):
            x, y = _user(data, f"{path}, user {user}", info)
            pictures.append(x)
            labels.append(y)
            writers.extend([user] * len(y))
    if not writers:
        raise DataError(f"{folder} holds no users")
    return np.concatenate(pictures), np.concatenate(labels), writers


def _users(path: Path) -> list[tuple[str, Any]]:
    try:
        content = json.loads(path.read_bytes())
        return [(str(user), content["user_data"][user]) for user in content["users"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a JSON file of LEAF ({type(error).__name__}: {error})") from None


def _user(data: Any, name: str, info: Info) -> tuple[Array, Array]:
    """Pixels are grey levels divided by 255, white is 1; they become bytes again."""
    try:
        x, y = np.asarray(data["x"], dtype=np.float64), np.asarray(data["y"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{name}: x and y are not lists of numbers ({error})") from None
    side = int(np.prod(info.input_shape))
    if len(y) == 0:
        return np.empty((0, *info.input_shape), dtype=np.uint8), np.empty(0, dtype=np.int64)
    if x.shape != (len(y), side) or y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"{name}: x is {x.shape}, y is {y.dtype} {y.shape}; expected (N, {side}) and N integers")
    if not (np.isfinite(x).all() and x.min() >= 0 and x.max() <= 1):
        raise DataError(f"{name}: pixels must lie between 0 and 1")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, *info.input_shape), y.astype(np.int64)
