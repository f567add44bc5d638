"""Readers of data sets whose clients are people: FEMNIST, HARBox, UCI HAR."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.declared import Array, Info, RawData
from fedveil.data.sources.raw import file_in, unpacked
from fedveil.errors import DataError


def read_leaf(directory: Path, info: Info) -> RawData | None:
    """Read LEAF's JSON files in the folders train and test; other LEAF sets look the same, so a parent must be named femnist."""
    files = {split: sorted((directory / split).glob("*.json")) for split in ("train", "test")}
    if not any(files.values()) or "femnist" not in directory.resolve().as_posix().lower():
        return None
    parts = {split: _split_leaf(paths, directory / split, info) for split, paths in files.items()}
    names = sorted({name for _, _, writers in parts.values() for name in writers})
    number = {name: position for position, name in enumerate(names)}
    (x_train, y_train, who_train), (x_test, y_test, who_test) = parts["train"], parts["test"]
    ids = [np.asarray([number[name] for name in who], dtype=np.int64) for who in (who_train, who_test)]
    return RawData(x_train, y_train, x_test, y_test, *ids)


def _split_leaf(paths: list[Path], folder: Path, info: Info) -> tuple[Array, Array, list[str]]:
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
    """Return pixels, which are grey levels divided by 255, as bytes."""
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


HARBOX_FOLDER = "large_scale_HARBox"
_ACTIVITIES = ("Call", "Hop", "typing", "Walk", "Wave")
_TEST_SHARE = 0.2


def read_harbox(directory: Path, info: Info) -> RawData | None:
    """Read the unpacked folder.

    No official test split exists: the last fifth of each person's windows of each activity is the test split.
    """
    folder = next((path for path in (directory / HARBOX_FOLDER, directory) if path.name == HARBOX_FOLDER and path.is_dir()), None)
    if folder is None:
        return None
    train: list[tuple[Array, int, int]] = []
    test: list[tuple[Array, int, int]] = []
    for person in sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name)):
        for label, activity in enumerate(_ACTIVITIES):
            path = person / f"{activity}_train.txt"
            if path.is_file():
                windows = _windows(path, info)
                kept = len(windows) - int(len(windows) * _TEST_SHARE)
                train.append((windows[:kept], label, int(person.name)))
                test.append((windows[kept:], label, int(person.name)))
    if not train:
        raise DataError(f"{folder}: there are no files PERSON/ACTIVITY_train.txt")
    (x_train, y_train, who_train), (x_test, y_test, who_test) = _joined(train), _joined(test)
    return RawData(x_train, y_train, x_test, y_test, who_train, who_test)


def _windows(path: Path, info: Info) -> Array:
    channels, time = info.input_shape
    try:
        table = np.loadtxt(path, dtype=np.float32, ndmin=2)
    except ValueError as error:
        raise DataError(f"{path}: not a table of numbers ({error})") from None
    if table.size == 0 or table.size % (time * (channels + 1)):
        raise DataError(f"{path}: {table.size} numbers; expected windows of {time} x {channels + 1}")
    return table.reshape(-1, time, channels + 1)[:, :, 1:].transpose(0, 2, 1)


def _joined(parts: list[tuple[Array, int, int]]) -> tuple[Array, Array, Array]:
    sizes = [len(windows) for windows, _, _ in parts]
    labels, people = (np.repeat(np.asarray([part[i] for part in parts], dtype=np.int64), sizes) for i in (1, 2))
    return np.concatenate([windows for windows, _, _ in parts]), labels, people


_UCIHAR_FOLDER = "UCI HAR Dataset"
UCIHAR_ZIP = "human+activity+recognition+using+smartphones.zip"
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")


def read_ucihar(directory: Path, info: Info) -> RawData | None:
    """Read the published zip, the zip inside it, or the unpacked folder."""
    places = (directory / _UCIHAR_FOLDER, directory)
    folder = next((place for place in places if (place / "train" / "y_train.txt").is_file()), None)
    if folder is not None:
        return _both(partial(file_in, folder), info)
    path = next((directory / name for name in (f"{_UCIHAR_FOLDER}.zip", UCIHAR_ZIP) if (directory / name).is_file()), None)
    if path is None:
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            if f"{_UCIHAR_FOLDER}.zip" not in archive.namelist():
                return _both(lambda name: unpacked(archive, f"{_UCIHAR_FOLDER}/{name}"), info)
            with zipfile.ZipFile(io.BytesIO(unpacked(archive, f"{_UCIHAR_FOLDER}.zip"))) as inner:
                return _both(lambda name: unpacked(inner, f"{_UCIHAR_FOLDER}/{name}"), info)
    except (zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError) as error:
        raise DataError(f"{path}: damaged or not the original archive ({error})") from None


def _both(read: Callable[[str], bytes], info: Info) -> RawData:
    parts = {split: _split_ucihar(read, split, info) for split in ("train", "test")}
    (x_train, y_train, who_train), (x_test, y_test, who_test) = parts["train"], parts["test"]
    return RawData(x_train, y_train, x_test, y_test, who_train, who_test)


def _split_ucihar(read: Callable[[str], bytes], split: str, info: Info) -> tuple[Array, Array, Array]:
    """Read labels, which are 1 to 6 in the files."""
    time = info.input_shape[1]
    channels = [
        _numbers(read(name), name, time) for name in (f"{split}/Inertial Signals/{signal}_{split}.txt" for signal in SIGNALS)
    ]
    y, who = (_numbers(read(name), name, 1)[:, 0] for name in (f"{split}/y_{split}.txt", f"{split}/subject_{split}.txt"))
    if len({len(part) for part in (*channels, y, who)}) != 1:
        raise DataError(f"the files of the {split} split have different numbers of rows")
    if not (np.equal(y, np.rint(y)).all() and np.equal(who, np.rint(who)).all()):
        raise DataError(f"y_{split}.txt and subject_{split}.txt must hold whole numbers")
    return np.stack(channels, axis=1), y.astype(np.int64) - 1, who.astype(np.int64)


def _numbers(content: bytes, name: str, columns: int) -> Array:
    try:
        table = np.loadtxt(io.BytesIO(content), dtype=np.float32, ndmin=2)
    except ValueError as error:
        raise DataError(f"{name}: not a table of numbers ({error})") from None
    if table.shape[1] != columns:
        raise DataError(f"{name}: rows of {table.shape[1]} numbers; expected {columns}")
    return table
