"""Arrays as a reader returns them, and numpy archives."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np

from fedveil.data.declared import Array, Format, Info
from fedveil.data.declared import RawData as RawData
from fedveil.errors import DataError

MOST_BYTES = 2**29
"""Limit on the size of a file inside an archive, above any in the catalogue: a larger one is not unpacked."""


def unpacked(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a member of a zip archive; KeyError if it does not exist, DataError if it would unpack to more than `MOST_BYTES`."""
    size = archive.getinfo(name).file_size
    if size > MOST_BYTES:
        raise DataError(f"{archive.filename}: {name} unpacks to {size} bytes; at most {MOST_BYTES} are read")
    return archive.read(name)


def plain(info: Info) -> Format:
    """Read `NAME.npz`: images (N, H, W), (N, H, W, C) or (N, C, H, W); signals (N, channels, time) or (N, time, channels)."""
    names = dict.fromkeys(f"{stem}.npz" for stem in (info.name, info.name.replace("-", "_")))
    return Format(" or ".join(names), lambda directory, info: _read(directory, names, "", info))


def decode(coded: Array) -> Array:
    """Decode pictures (N, 3, H, W) in red, green, blue from a lossless coding of the same shape, uint8.

    The coding holds the planes green, red - green, blue - green, each as differences along rows and columns, modulo 256.
    """
    planes = coded.copy()
    for row in range(1, planes.shape[2]):
        planes[:, :, row] += planes[:, :, row - 1]
    for column in range(1, planes.shape[3]):
        planes[..., column] += planes[..., column - 1]
    green = planes[:, 0].copy()
    planes[:, 0] = planes[:, 1] + green
    planes[:, 1] = green
    planes[:, 2] += green
    return planes


def _read(directory: Path, names: Iterable[str], suffix: str, info: Info) -> RawData | None:
    path = next((directory / name for name in names if (directory / name).is_file()), None)
    if path is None:
        return None
    with path.open("rb") as file, _open(file, path) as archive:
        x_train, x_test = (_member(archive, path, f"x_{split}{suffix}") for split in ("train", "test"))
        y_train, y_test = (_member(archive, path, f"y_{split}") for split in ("train", "test"))
        users = [_users(archive, path, split) for split in ("train", "test")]
    if suffix:
        for x in (x_train, x_test):
            if x.dtype != np.uint8 or x.shape[1:] != info.input_shape:
                raise DataError(f"{path}: coded pictures are {x.dtype} {x.shape}; expected uint8 (N, *{info.input_shape})")
        x_train, x_test = decode(x_train), decode(x_test)
    return RawData(_channels_first(x_train, info, path), y_train, _channels_first(x_test, info, path), y_test, *users)


def read_coded(directory: Path, info: Info) -> RawData | None:
    """Read `cifar10_coded.npz`: as `plain`, with x_train_coded and x_test_coded, see `decode`."""
    return _read(directory, ("cifar10_coded.npz",), "_coded", info)


def _channels_first(x: Array, info: Info, path: Path) -> Array:
    """Return `x` as (N, *info.input_shape), its channel axis added or moved to the front; DataError if it does not fit."""
    shape = info.input_shape
    if x.shape[1:] == shape:
        return x
    if x.shape[1:] == shape[1:] and shape[0] == 1:
        return x[:, None]
    if x.shape[1:] == (*shape[1:], shape[0]):
        return np.moveaxis(x, -1, 1)
    raise DataError(f"{path}: examples have shape {x.shape[1:]}; {info.name} needs {shape} or {(*shape[1:], shape[0])}")


def _open(file: IO[bytes], path: Path) -> np.lib.npyio.NpzFile:
    try:
        archive = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a readable npz archive ({error})") from None
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"{path}: a single array, not an npz archive")
    return archive


def _member(archive: np.lib.npyio.NpzFile, path: Path, key: str) -> Array:
    if key not in archive.files:
        raise DataError(f"{path}: there is no array {key!r}; it holds {', '.join(archive.files) or 'nothing'}")
    try:
        _check_promise(archive, path, key)
        member = archive[key]
    except (OSError, ValueError, EOFError, MemoryError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: array {key!r} cannot be read ({error})") from None
    return np.asarray(member)


def _check_promise(archive: np.lib.npyio.NpzFile, path: Path, key: str) -> None:
    """Refuse an array whose header declares another size than the archive holds, before allocating memory for it."""
    inside = archive.zip
    if inside is None or f"{key}.npy" not in inside.namelist():
        return
    with inside.open(f"{key}.npy") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        promised, held = math.prod(shape) * dtype.itemsize, inside.getinfo(f"{key}.npy").file_size - file.tell()
    if promised != held and not dtype.hasobject:
        raise DataError(f"{path}: the header of array {key!r} promises {promised} bytes, the archive holds {held}")


def _users(archive: np.lib.npyio.NpzFile, path: Path, split: str) -> Array | None:
    for key in (f"users_{split}", f"user_{split}"):
        if key in archive.files:
            return _member(archive, path, key)
    return None


def file_in(folder: Path, name: str) -> bytes:
    """Return the content of a file; DataError if it is missing."""
    path = folder / name
    if not path.is_file():
        raise DataError(f"{path} is missing")
    return path.read_bytes()
