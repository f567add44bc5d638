"""Tiny ImageNet's pictures, in its zip or unpacked; the labelled validation split serves as the test split."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from fedveil.data.catalogue import Info
from fedveil.data.sources.raw import Array, Format, RawData, unpacked
from fedveil.errors import DataError

FOLDER = "tiny-imagenet-200"
Reader = Callable[[str], bytes]


def pictures() -> Format:
    """tiny-imagenet-200.zip, or its folder."""
    return Format(f"{FOLDER}.zip, or the folder {FOLDER} in it", _read)


def _read(directory: Path, info: Info) -> RawData | None:
    folder = next((place for place in (directory / FOLDER, directory) if (place / "wnids.txt").is_file()), None)
    if folder is not None:
        return _both(partial(_file, folder), partial(_listed, folder), info)
    path = directory / f"{FOLDER}.zip"
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            start = f"{FOLDER}/"
            return _both(
                lambda name: unpacked(archive, start + name),
                lambda prefix: [name[len(start) :] for name in names if name.startswith(start + prefix)],
                info,
            )
    except (zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError) as error:
        raise DataError(f"{path}: damaged or not the original archive ({error})") from None


def _both(read: Reader, listed: Callable[[str], list[str]], info: Info) -> RawData:
    words = read("wnids.txt").decode().split()
    label = {word: number for number, word in enumerate(sorted(words))}
    if len(label) != info.classes:
        raise DataError(f"wnids.txt names {len(label)} classes; expected {info.classes}")
    train = sorted(name for name in listed("train/") if name.endswith(".JPEG"))
    lines = [line.split("\t") for line in read("val/val_annotations.txt").decode().splitlines() if line]
    try:
        y_train = [label[name.split("/")[1]] for name in train]
        y_test = [label[fields[1]] for fields in lines]
    except (KeyError, IndexError) as error:
        raise DataError(f"a picture belongs to no class of wnids.txt ({error})") from None
    x_train = _pixels(read, train, info)
    x_test = _pixels(read, [f"val/images/{fields[0]}" for fields in lines], info)
    return RawData(x_train, np.asarray(y_train, dtype=np.int64), x_test, np.asarray(y_test, dtype=np.int64))


def _pixels(read: Reader, names: list[str], info: Info) -> Array:
    from PIL import Image

    channels, height, width = info.input_shape
    out = np.empty((len(names), height, width, channels), dtype=np.uint8)
    for row, name in enumerate(names):
        content = read(name)
        try:
            with Image.open(io.BytesIO(content), formats=["JPEG"]) as picture:
                pixels = np.asarray(picture.convert("RGB"))
        except (OSError, ValueError) as error:
            raise DataError(f"{name}: not a readable picture ({error})") from None
        if pixels.shape != out.shape[1:]:
            raise DataError(f"{name}: {pixels.shape[1]}x{pixels.shape[0]} pixels; expected {width}x{height}")
        out[row] = pixels
    return np.moveaxis(out, -1, 1)


def _file(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.is_file():
        raise DataError(f"{path} is missing")
    return path.read_bytes()


def _listed(folder: Path, prefix: str) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in (folder / prefix).rglob("*.JPEG")]
