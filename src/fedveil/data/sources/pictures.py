"""Readers of picture data sets: MNIST's idx format, CIFAR, SVHN, Tiny ImageNet, digits."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.declared import Array, Format, Info, RawData
from fedveil.data.sources.raw import MOST_BYTES, file_in, unpacked
from fedveil.errors import DataError

_UBYTE = 0x08
_LONGEST_HEADER = 4 + 4 * 4
IDX_FILES = tuple(f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
EMNIST_FILES = tuple(
    f"emnist-balanced-{split}-{kind}-ubyte" for split in ("train", "test") for kind in ("images-idx3", "labels-idx1")
)


def mnist_like(folders: tuple[str, ...]) -> Format:
    """Read the four idx files of MNIST; Fashion-MNIST's have the same names, so their folder must say which data set it holds."""
    return Format(
        f"{', '.join(IDX_FILES)} (or .gz) in a folder {' or '.join(folders)}",
        lambda directory, info: _mnist(directory) if _named(directory, folders) else None,
    )


def parse(content: bytes, name: str) -> Array:
    """Return the uint8 array in an idx file's uncompressed content; DataError if header and length do not agree."""
    shape, start = _header(content, name)
    size = math.prod(shape)
    if not size:
        raise DataError(f"{name}: the header says that its shape is {shape}, so it holds nothing")
    if len(content) - start != size:
        raise DataError(f"{name}: the header promises {size} bytes for shape {shape}, the file holds {len(content) - start}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _header(content: bytes, name: str) -> tuple[tuple[int, ...], int]:
    """Return the array's shape and offset."""
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{name}: not an idx file")
    kind, sides = content[2], content[3]
    if kind != _UBYTE or not 1 <= sides <= 4:
        raise DataError(f"{name}: idx type 0x{kind:02x} with {sides} dimensions; expected bytes (0x08) with 1 to 4")
    start = 4 + 4 * sides
    if len(content) < start:
        raise DataError(f"{name}: the idx header is cut short")
    return struct.unpack(f">{sides}I", content[4:start]), start


def _named(directory: Path, folders: tuple[str, ...]) -> bool:
    path = directory.resolve().as_posix().lower()
    return any(path.endswith("/" + folder.lower()) for folder in folders)


def _mnist(directory: Path) -> RawData | None:
    contents = _contents(directory, IDX_FILES)
    return _raw(contents, IDX_FILES, transpose=False) if contents else None


def read_emnist(directory: Path, info: Info) -> RawData | None:
    """Read the idx files of the balanced split, loose or in the original gzip.zip."""
    contents, archive = _contents(directory, EMNIST_FILES), directory / "gzip.zip"
    if not contents and archive.is_file():
        contents = _zipped(archive)
    return _raw(contents, EMNIST_FILES, transpose=True) if contents else None


def _raw(contents: list[bytes], names: tuple[str, ...], transpose: bool) -> RawData:
    """EMNIST stores its pictures with rows and columns exchanged; `transpose` sets them upright."""
    x_train, y_train, x_test, y_test = (parse(content, name) for content, name in zip(contents, names, strict=True))
    for x, y in ((x_train, y_train), (x_test, y_test)):
        if x.ndim != 3 or y.ndim != 1:
            raise DataError(f"idx files with {x.ndim}-dimensional pictures and {y.ndim}-dimensional labels; expected 3 and 1")
    axes = (0, 2, 1) if transpose else (0, 1, 2)
    return RawData(x_train.transpose(axes)[:, None].copy(), y_train, x_test.transpose(axes)[:, None].copy(), y_test)


def _contents(directory: Path, names: tuple[str, ...]) -> list[bytes]:
    """Return the content of each file, loose or as .gz; empty if none exists."""
    places = [(directory / name, directory / f"{name}.gz") for name in names]
    paths = [next((path for path in both if path.is_file()), None) for both in places]
    return [_content(path, both[0]) for path, both in zip(paths, places, strict=True)] if any(paths) else []


def _content(path: Path | None, expected: Path) -> bytes:
    if path is None:
        raise DataError(f"{expected} (or .gz) is missing beside the other idx files")
    content = path.read_bytes()
    return gunzip(content, str(path)) if path.suffix == ".gz" else content


def gunzip(content: bytes, name: str) -> bytes:
    """Return the uncompressed idx file; DataError if it is cut short or damaged, or declares or holds more than `MOST_BYTES`."""
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


_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, only numpy arrays are allowed")
        return _ALLOWED[module, name]


def _check_digest(content: bytes, digest: str, name: str) -> None:
    """Raise DataError unless `content` has the digest "algorithm:hex"."""
    algorithm, expected = digest.split(":")
    found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise DataError(
            f"{name}: its {algorithm} is {found}, the original's is {expected}; it holds pickles, which can run code when "
            "they are opened, so it is not opened; fetch it again"
        )


def unpickle(content: bytes, name: str) -> dict[str, Any]:
    """Return the dictionary in a pickle whose digest was checked; DataError if it holds anything but arrays and plain values."""
    try:
        value = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{name}: not opened as a pickle of arrays ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{name}: holds a {type(value).__name__}, expected a dictionary")
    return value


@dataclass(frozen=True)
class Batches:
    """The files of one of the two sets: the archive, and md5 of each file (torchvision's table), with the key of the labels."""

    archive: str
    digest: str
    folder: str
    label_key: str
    train: dict[str, str]
    test: dict[str, str]


CIFAR10 = Batches(
    "cifar-10-python.tar.gz",
    "md5:c58f30108f718f92721af3b95e74349a",
    "cifar-10-batches-py",
    "labels",
    {
        "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
        "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
        "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    },
    {"test_batch": "md5:40351d587109b95175f43aff81a1287e"},
)
CIFAR100 = Batches(
    "cifar-100-python.tar.gz",
    "md5:eb9058c3a382ffc7106e4002c42a8d85",
    "cifar-100-python",
    "fine_labels",
    {"train": "md5:16019d7e3df5f24257cddd939b257f8d"},
    {"test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc"},
)


def pickled(batches: Batches) -> Format:
    """Read the original archive, or its unpacked folder."""

    def read(directory: Path, info: Info) -> RawData | None:
        if (directory / batches.archive).is_file():
            return _from_archive(directory / batches.archive, batches, info)
        for folder in (directory / batches.folder, directory):
            if (folder / next(iter(batches.test))).is_file() and folder.name == batches.folder:
                return _both_cifar(partial(file_in, folder), batches, info, folder)
        return None

    return Format(f"{batches.archive}, or the folder {batches.folder} in it", read)


def _from_archive(path: Path, batches: Batches, info: Info) -> RawData:
    content = path.read_bytes()
    _check_digest(content, batches.digest, str(path))
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            members = {name: archive.extractfile(f"{batches.folder}/{name}") for name in (*batches.train, *batches.test)}
            contents = {name: file.read() for name, file in members.items() if file is not None}
    except (tarfile.TarError, OSError, EOFError, KeyError) as error:
        raise DataError(f"{path}: not an archive with the files of {batches.folder} ({error})") from None
    return _both_cifar(contents.__getitem__, batches, info, path)


def _both_cifar(member: Callable[[str], bytes], batches: Batches, info: Info, place: Path) -> RawData:
    train, test = (
        [_batch(member(name), digest, f"{place}: {name}", batches.label_key, info) for name, digest in files.items()]
        for files in (batches.train, batches.test)
    )
    return RawData(*_joined(train), *_joined(test))


def _batch(content: bytes, digest: str, name: str, label_key: str, info: Info) -> tuple[Array, Array]:
    _check_digest(content, digest, name)
    values: dict[str, Any] = unpickle(content, name)
    x, y = values.get("data"), values.get(label_key)
    side = int(np.prod(info.input_shape))
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != side:
        raise DataError(f"{name}: 'data' is not a table of {side} bytes for each picture")
    if not isinstance(y, list) or not all(isinstance(label, int) for label in y):
        raise DataError(f"{name}: {label_key!r} is not a list of integers")
    return x.reshape(-1, *info.input_shape), np.asarray(y, dtype=np.int64)


def _joined(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


_SVHN_FILES = ("train_32x32.mat", "test_32x32.mat")


def read_svhn(directory: Path, info: Info) -> RawData | None:
    """Read train_32x32.mat and test_32x32.mat."""
    paths = [directory / name for name in _SVHN_FILES]
    if not any(path.is_file() for path in paths):
        return None
    train, test = (_split(path, info) for path in paths)
    return RawData(*train, *test)


def _split(path: Path, info: Info) -> tuple[Array, Array]:
    """Read X (32, 32, 3, N) and y (N, 1) from 1 to 10, where 10 is the digit 0."""
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


_FOLDER = "tiny-imagenet-200"
Reader = Callable[[str], bytes]


def read_tinyimagenet(directory: Path, info: Info) -> RawData | None:
    """Read tiny-imagenet-200.zip, or its folder."""
    folder = next((place for place in (directory / _FOLDER, directory) if (place / "wnids.txt").is_file()), None)
    if folder is not None:
        return _both_tinyimagenet(partial(file_in, folder), partial(_listed, folder), info)
    path = directory / f"{_FOLDER}.zip"
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            start = f"{_FOLDER}/"
            return _both_tinyimagenet(
                lambda name: unpacked(archive, start + name),
                lambda prefix: [name[len(start) :] for name in names if name.startswith(start + prefix)],
                info,
            )
    except (zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError) as error:
        raise DataError(f"{path}: damaged or not the original archive ({error})") from None


def _both_tinyimagenet(read: Reader, listed: Callable[[str], list[str]], info: Info) -> RawData:
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


def _listed(folder: Path, prefix: str) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in (folder / prefix).rglob("*.JPEG")]


_TEST_SIZE = 360


def read_digits() -> RawData:
    """Read scikit-learn's 1,797 digits, 17 grey levels spread over 0..255, split 1437/360 with equal shares of each label."""
    x, y = _parsed()
    test = _stratified(y, _TEST_SIZE)
    return RawData(x[~test], y[~test], x[test], y[test])  # copies


@cache
def _parsed() -> tuple[np.ndarray, np.ndarray]:
    """Read all pictures from scikit-learn's own file, since importing scikit-learn takes longer."""
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    with gzip.open(Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"), "rt", encoding="ascii") as file:
        rows = np.loadtxt(file, delimiter=",")
    images = np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8)
    return images.reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)


def _stratified(labels: np.ndarray, size: int) -> np.ndarray:
    """Return a mask of `size` examples, each label in proportion (largest remainders), spread evenly over the file's order."""
    counts = np.bincount(labels)
    exact = counts * (size / len(labels))
    quota = np.floor(exact).astype(np.int64)
    largest = np.argsort(-(exact - quota), kind="stable")[: size - int(quota.sum())]
    quota[largest] += 1
    mask = np.zeros(len(labels), dtype=bool)
    for label, take in enumerate(quota):
        members = np.flatnonzero(labels == label)
        mask[members[(np.arange(take) * len(members)) // take]] = True
    return mask
