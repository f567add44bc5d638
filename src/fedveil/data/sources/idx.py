"""The idx format of MNIST, plain or gzipped: a typed, big-endian array with its shape in the header."""

from __future__ import annotations

import gzip
import io
import math
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from fedveil.data.catalogue import Info
from fedveil.data.sources.raw import MOST_BYTES, Array, Format, RawData, unpacked
from fedveil.errors import DataError

UBYTE = 0x08
_LONGEST_HEADER = 4 + 4 * 4
FILES = tuple(f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
EMNIST_FILES = tuple(
    f"emnist-balanced-{split}-{kind}-ubyte" for split in ("train", "test") for kind in ("images-idx3", "labels-idx1")
)


def mnist_like(folders: tuple[str, ...]) -> Format:
    """The four idx files of MNIST; they bear the same names for Fashion-MNIST, so their folder must tell which it is."""
    return Format(
        f"{', '.join(FILES)} (or .gz) in a folder {' or '.join(folders)}",
        lambda directory, info: _mnist(directory) if _named(directory, folders) else None,
    )


def emnist() -> Format:
    """The idx files of the balanced split, loose or in the original gzip.zip."""
    return Format(f"gzip.zip, or {', '.join(EMNIST_FILES)} (or .gz)", _emnist)


def parse(content: bytes, name: str) -> Array:
    """The uint8 array in an idx file's uncompressed content; DataError if header and length do not agree."""
    shape, start = _header(content, name)
    size = math.prod(shape)
    if not size:
        raise DataError(f"{name}: the header says that its shape is {shape}, so it holds nothing")
    if len(content) - start != size:
        raise DataError(f"{name}: the header promises {size} bytes for shape {shape}, the file holds {len(content) - start}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _header(content: bytes, name: str) -> tuple[tuple[int, ...], int]:
    """The array's shape, and where it begins."""
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{name}: not an idx file")
    kind, sides = content[2], content[3]
    if kind != UBYTE or not 1 <= sides <= 4:
        raise DataError(f"{name}: idx type 0x{kind:02x} with {sides} dimensions; expected bytes (0x08) with 1 to 4")
    start = 4 + 4 * sides
    if len(content) < start:
        raise DataError(f"{name}: the idx header is cut short")
    return struct.unpack(f">{sides}I", content[4:start]), start


def _named(directory: Path, folders: tuple[str, ...]) -> bool:
    path = directory.resolve().as_posix().lower()
    return any(path.endswith("/" + folder.lower()) for folder in folders)


def _mnist(directory: Path) -> RawData | None:
    paths = [_either(directory, name) for name in FILES]
    if not any(paths):
        return None
    contents = [_content(path, directory / name) for path, name in zip(paths, FILES, strict=True)]
    return _raw([parse(content, name) for content, name in zip(contents, FILES, strict=True)], transpose=False)


def _emnist(directory: Path, info: Info) -> RawData | None:
    paths = [_either(directory, name) for name in EMNIST_FILES]
    if any(paths):
        contents = [_content(path, directory / name) for path, name in zip(paths, EMNIST_FILES, strict=True)]
    elif (directory / "gzip.zip").is_file():
        contents = _zipped(directory / "gzip.zip")
    else:
        return None
    arrays = [parse(content, name) for content, name in zip(contents, EMNIST_FILES, strict=True)]
    return _raw(arrays, transpose=True)


def _raw(arrays: list[Array], transpose: bool) -> RawData:
    """EMNIST stores its pictures with rows and columns exchanged; `transpose` sets them upright."""
    x_train, y_train, x_test, y_test = arrays
    for x, y in ((x_train, y_train), (x_test, y_test)):
        if x.ndim != 3 or y.ndim != 1:
            raise DataError(f"idx files with {x.ndim}-dimensional pictures and {y.ndim}-dimensional labels; expected 3 and 1")
    axes = (0, 2, 1) if transpose else (0, 1, 2)
    return RawData(x_train.transpose(axes)[:, None].copy(), y_train, x_test.transpose(axes)[:, None].copy(), y_test)


def _either(directory: Path, name: str) -> Path | None:
    return next((path for path in (directory / name, directory / f"{name}.gz") if path.is_file()), None)


def _content(path: Path | None, expected: Path) -> bytes:
    if path is None:
        raise DataError(f"{expected} (or .gz) is missing beside the other idx files")
    content = path.read_bytes()
    return gunzip(content, str(path)) if path.suffix == ".gz" else content


def gunzip(content: bytes, name: str) -> bytes:
    """The uncompressed idx file; DataError if it is cut short or damaged, or promises or holds more than `MOST_BYTES`."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            head = file.read(_LONGEST_HEADER)
            size = math.prod(_header(head, name)[0])
            if size > MOST_BYTES:
                raise DataError(f"{name}: the header promises {size} bytes; at most {MOST_BYTES} are read")
            return head + file.read(size + 1)  # one byte more than it may hold, so that `parse` refuses a longer one
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name}: damaged gzip file ({error})") from None


def _zipped(path: Path) -> list[bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            return [gunzip(unpacked(archive, f"gzip/{name}.gz"), f"{path}: {name}.gz") for name in EMNIST_FILES]
    except (zipfile.BadZipFile, KeyError, zlib.error, NotImplementedError) as error:
        raise DataError(f"{path}: not the original archive of EMNIST ({error})") from None
