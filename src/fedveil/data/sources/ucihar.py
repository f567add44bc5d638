"""UCI HAR's inertial signals: text files, in the published zip (which holds a zip) or unpacked."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from fedveil.data.catalogue import Info
from fedveil.data.remote import REMOTES
from fedveil.data.sources.raw import Array, Format, RawData, unpacked
from fedveil.errors import DataError

FOLDER = "UCI HAR Dataset"
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")


def text() -> Format:
    """The published zip, the zip inside it, or the unpacked folder."""
    outer = REMOTES["uci-har"][0].name
    return Format(f"{outer}, {FOLDER}.zip, or the folder {FOLDER!r}", lambda directory, info: _read(directory, outer, info))


def _read(directory: Path, outer: str, info: Info) -> RawData | None:
    places = (directory / FOLDER, directory)
    folder = next((place for place in places if (place / "train" / "y_train.txt").is_file()), None)
    if folder is not None:
        return _both(partial(_file, folder), info)
    path = next((directory / name for name in (f"{FOLDER}.zip", outer) if (directory / name).is_file()), None)
    if path is None:
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            if f"{FOLDER}.zip" not in archive.namelist():
                return _both(lambda name: unpacked(archive, f"{FOLDER}/{name}"), info)
            with zipfile.ZipFile(io.BytesIO(unpacked(archive, f"{FOLDER}.zip"))) as inner:
                return _both(lambda name: unpacked(inner, f"{FOLDER}/{name}"), info)
    except (zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError) as error:
        raise DataError(f"{path}: damaged or not the original archive ({error})") from None


def _both(read: Callable[[str], bytes], info: Info) -> RawData:
    parts = {split: _split(read, split, info) for split in ("train", "test")}
    (x_train, y_train, who_train), (x_test, y_test, who_test) = parts["train"], parts["test"]
    return RawData(x_train, y_train, x_test, y_test, who_train, who_test)


def _split(read: Callable[[str], bytes], split: str, info: Info) -> tuple[Array, Array, Array]:
    """Labels are 1 to 6 in the files."""
    time = info.input_shape[1]
    channels = [
        _numbers(read(name), name, time) for name in (f"{split}/Inertial Signals/{signal}_{split}.txt" for signal in SIGNALS)
    ]
    y, who = (_numbers(read(name), name, 1)[:, 0] for name in (f"{split}/y_{split}.txt", f"{split}/subject_{split}.txt"))
    if len({len(part) for part in (*channels, y, who)}) != 1:
        raise DataError(f"the files of the {split} split have different numbers of rows")
    if not (np.equal(y, np.rint(y)).all() and np.equal(who, np.rint(who)).all()):
        raise DataError(f"{split}: labels and subjects must be whole numbers")
    return np.stack(channels, axis=1), y.astype(np.int64) - 1, who.astype(np.int64)


def _numbers(content: bytes, name: str, columns: int) -> Array:
    try:
        table = np.loadtxt(io.BytesIO(content), dtype=np.float32, ndmin=2)
    except ValueError as error:
        raise DataError(f"{name}: not a table of numbers ({error})") from None
    if table.shape[1] != columns:
        raise DataError(f"{name}: rows of {table.shape[1]} numbers; expected {columns}")
    return table


def _file(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.is_file():
        raise DataError(f"{path} is missing")
    return path.read_bytes()
