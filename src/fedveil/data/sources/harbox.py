"""HARBox as published: one folder per person, one text file per activity, ten columns (time, then nine signals)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedveil.data.catalogue import Info
from fedveil.data.sources.raw import Array, Format, RawData
from fedveil.errors import DataError

FOLDER = "large_scale_HARBox"
ACTIVITIES = ("Call", "Hop", "typing", "Walk", "Wave")
TEST_SHARE = 0.2


def text() -> Format:
    """The unpacked folder large_scale_HARBox."""
    return Format(f"the folder {FOLDER} with PERSON/ACTIVITY_train.txt", _read)


def _read(directory: Path, info: Info) -> RawData | None:
    """No official test split exists: the last fifth of each person's windows of each activity is the test split."""
    folder = next((path for path in (directory / FOLDER, directory) if path.name == FOLDER and path.is_dir()), None)
    if folder is None:
        return None
    train: list[tuple[Array, int, int]] = []
    test: list[tuple[Array, int, int]] = []
    for person in sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name)):
        for label, activity in enumerate(ACTIVITIES):
            path = person / f"{activity}_train.txt"
            if path.is_file():
                windows = _windows(path, info)
                kept = len(windows) - int(len(windows) * TEST_SHARE)
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
