"""CIFAR-10 and CIFAR-100 as published for Python: pickles, loose or in their archive, opened only if the digests agree."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.catalogue import Info
from fedveil.data.remote import REMOTES
from fedveil.data.sources.pickles import check_digest, unpickle
from fedveil.data.sources.raw import Array, Format, RawData
from fedveil.errors import DataError


@dataclass(frozen=True)
class Batches:
    """The files of one of the two sets: md5 of each (torchvision's table) and the key of its labels."""

    folder: str
    label_key: str
    train: dict[str, str]
    test: dict[str, str]


CIFAR10 = Batches(
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
    "cifar-100-python",
    "fine_labels",
    {"train": "md5:16019d7e3df5f24257cddd939b257f8d"},
    {"test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc"},
)


def pickled(name: str, batches: Batches) -> Format:
    """The original archive, or its unpacked folder."""
    archive = REMOTES[name][0]

    def read(directory: Path, info: Info) -> RawData | None:
        if (directory / archive.name).is_file():
            return _from_archive(directory / archive.name, archive.digest, batches, info)
        for folder in (directory / batches.folder, directory):
            if (folder / next(iter(batches.test))).is_file() and folder.name == batches.folder:
                return _from_folder(folder, batches, info)
        return None

    return Format(f"{archive.name}, or the folder {batches.folder} in it", read)


def _from_archive(path: Path, digest: str, batches: Batches, info: Info) -> RawData:
    content = path.read_bytes()
    check_digest(content, digest, str(path))
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            members = {name: archive.extractfile(f"{batches.folder}/{name}") for name in (*batches.train, *batches.test)}
            contents = {name: file.read() for name, file in members.items() if file is not None}
    except (tarfile.TarError, OSError, EOFError, KeyError) as error:
        raise DataError(f"{path}: not an archive with the files of {batches.folder} ({error})") from None
    return _both(contents.__getitem__, batches, info, path)


def _from_folder(folder: Path, batches: Batches, info: Info) -> RawData:
    def member(name: str) -> bytes:
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing")
        return (folder / name).read_bytes()

    return _both(member, batches, info, folder)


def _both(member: Callable[[str], bytes], batches: Batches, info: Info, place: Path) -> RawData:
    train, test = (
        [_batch(member(name), digest, f"{place}: {name}", batches.label_key, info) for name, digest in files.items()]
        for files in (batches.train, batches.test)
    )
    return RawData(*_joined(train), *_joined(test))


def _batch(content: bytes, digest: str, name: str, label_key: str, info: Info) -> tuple[Array, Array]:
    check_digest(content, digest, name)
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
