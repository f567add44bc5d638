"""Find a data set on this machine, or fetch it, and check it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from fedveil.data import catalogue
from fedveil.data.dataset import Dataset, Ints
from fedveil.data.declared import Array, Format, Info, RawData
from fedveil.data.own.data_source import user_path
from fedveil.data.sources.pictures import read_digits
from fedveil.data.sources.raw import plain
from fedveil.errors import DataError


def formats(info: Info) -> tuple[Format, ...]:
    """Return the formats of a data set, in the order in which they are tried."""
    return (plain(info), *catalogue.DATA_SETS[info.name].formats)


ENVIRONMENT = "FEDVEIL_DATA"
SYSTEM = Path("/usr/share/datasets")
Reader = Callable[[Path | None], RawData]
"""Reader of a custom data set; it gets `data.data_dir`, or None."""

_OWN: dict[str, Reader] = {}


def register(info: Info) -> Callable[[Reader], Reader]:
    """Register a custom data set; decorates the function that reads it.

    Args:
        info: its public facts; if train_size and test_size are not 0, the data must have these sizes.

    Raises:
        ConfigError: another data set has the name.
    """

    def registered(read: Reader) -> Reader:
        catalogue.CATALOGUE.add(info.name, info, read)
        _OWN[info.name] = read
        return read

    return registered


def load(name: str, data_dir: str | Path | None = None, download: bool = True) -> Dataset:
    """Load data set `name` from the first place that has it.

    Places, in order: `data_dir`; the directory in the environment variable FEDVEIL_DATA; a system copy (Debian's package
    dataset-fashion-mnist); the user's cache; if `download`, the usual public place, checked by its digest and kept in the
    cache. In each directory the files may lie directly or in a folder named after the data set. Embedded sets need none.
    Raises ConfigError for an unknown name, and DataError with the places that were tried if there is no usable copy.
    """
    info = catalogue.info(name)
    if name in _OWN:
        return _checked(info, _own(name, data_dir), "what its reader returned")
    if info.embedded:
        return _checked(info, read_digits(), "the embedded copy")
    tried: list[str] = []
    for label, root in _places(info, data_dir):
        found = _look(info, root)
        if found:
            return _checked(info, *found)
        tried.append(f"{label}: {root}")
    if download:
        try:
            folder = catalogue.fetch(info)
        except DataError as error:
            tried.append(f"download: {error}")
        else:
            found = _look(info, folder)
            if found:
                return _checked(info, *found)
            tried.append(f"download: files arrived in {folder} but none can be read")
    else:
        tried.append("download: not wanted")
    raise DataError(_not_found(info, tried))


def located(name: str, data_dir: str | Path | None = None) -> str:
    """Return the path of the copy that `load` would read, or an empty string; nothing is downloaded."""
    info = catalogue.info(name)
    if info.embedded:
        return "embedded"
    if name in _OWN:
        return f"read by {_OWN[name].__module__}.{_OWN[name].__qualname__}"
    return next((found[1] for _, root in _places(info, data_dir) if (found := _look(info, root))), "")


def has_folder(name: str, data_dir: str | Path | None = None) -> bool:
    """Return whether a data set has a folder of its name on this machine; nothing is read, so its files may be incomplete."""
    info = catalogue.info(name)
    if info.embedded or name in _OWN:
        return True
    folders = catalogue.DATA_SETS[info.name].folders
    return any((root / folder).is_dir() for _, root in _places(info, data_dir) for folder in folders)


def _own(name: str, data_dir: str | Path | None) -> RawData:
    reader = _OWN[name]
    where = f"{reader.__module__}.{reader.__qualname__}"
    try:
        raw = reader(None if data_dir is None else _directory(data_dir, "data directory"))
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise DataError(f"{name} cannot be read by {where}: {type(error).__name__}: {error}") from error
    if not isinstance(raw, RawData):
        raise DataError(f"{name} cannot be read by {where}: it returned {type(raw).__name__}; it must return RawData")
    return raw


def _places(info: Info, data_dir: str | Path | None) -> Iterator[tuple[str, Path]]:
    if data_dir is not None:
        yield "data directory", _directory(data_dir, "data directory")
    if named := os.environ.get(ENVIRONMENT):
        yield ENVIRONMENT, _directory(named, f"directory in {ENVIRONMENT}")
    yield "system", SYSTEM
    if not catalogue.incomplete(info):
        yield "cache", catalogue.cache(info)


def _directory(folder: str | Path, label: str) -> Path:
    path = user_path(str(folder))
    if not path.is_dir():
        kind = "is not a directory" if path.exists() else "does not exist"
        raise DataError(f"the {label} {str(path)!r} {kind}; give a directory that holds data sets")
    return path


def _look(info: Info, root: Path) -> tuple[RawData, str] | None:
    for folder in (root, *(root / name for name in catalogue.DATA_SETS[info.name].folders)):
        if not folder.is_dir():
            continue
        for form in formats(info):
            raw = form.read(folder, info)
            if raw is not None:
                return raw, str(folder)
    return None


def _checked(info: Info, raw: RawData, place: str) -> Dataset:
    for split, x, size in (("train", raw.x_train, info.train_size), ("test", raw.x_test, info.test_size)):
        if size and len(x) != size:
            raise DataError(
                f"{info.name} in {place}: {len(x)} {split} examples; the official split has {size}, so the copy is not complete"
            )
    try:
        return Dataset(
            info,
            _examples(info, raw.x_train),
            _targets(info, raw.y_train),
            _examples(info, raw.x_test),
            _targets(info, raw.y_test),
            None if raw.users_train is None else _integers(raw.users_train, "users"),
            None if raw.users_test is None else _integers(raw.users_test, "users"),
        )
    except DataError as error:
        raise DataError(f"{error} (in {place})") from None


def _examples(info: Info, x: Array) -> Array:
    if info.vocabulary:
        return np.ascontiguousarray(_integers(x, "tokens"))
    if info.scale == 255.0:
        if x.dtype != np.uint8:
            raise DataError(f"{info.name}: pictures are {x.dtype}; expected uint8 from 0 to 255")
        return np.ascontiguousarray(x)
    if x.dtype.kind != "f":
        raise DataError(f"{info.name}: signals are {x.dtype}; expected floating point")
    return np.ascontiguousarray(x, dtype=np.float32)


def _targets(info: Info, y: Array) -> Array:
    if info.target.dtype == "int64":
        return _integers(y, "labels")
    if y.dtype.kind not in "iuf":
        raise DataError(f"targets are {y.dtype}; expected numbers")
    return y.astype(np.float32)


def _integers(values: Array, what: str) -> Ints:
    if values.dtype.kind not in "iu":
        raise DataError(f"{what} are {values.dtype}; expected integers")
    return values.astype(np.int64)


def _not_found(info: Info, tried: list[str]) -> str:
    expected = "; ".join(form.expects for form in formats(info))
    folders = " or ".join(catalogue.DATA_SETS[info.name].folders)
    return (
        f"no copy of {info.name} was found. Tried: {'; '.join(tried)}. "
        f"What to do: put one of these into a directory, directly or in its folder {folders}: {expected}. "
        f"Then name that directory in data.data_dir, or set {ENVIRONMENT} to it. {catalogue.by_hand(info)}"
    )
