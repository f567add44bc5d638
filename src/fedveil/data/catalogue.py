"""The data sets that fedveil knows, each declared once, and how they are downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedveil.data.declared import IGNORED, DataSet, Format, Info, Remote, Targets
from fedveil.data.sources import people, pictures, raw
from fedveil.errors import DataError
from fedveil.registry import Registry

__all__ = ["CATALOGUE", "DATA_SETS", "IGNORED", "Info", "Targets", "cache", "downloadable", "fetch", "info"]


def _set(
    name: str,
    title: str,
    shape: tuple[int, ...],
    classes: int,
    sizes: tuple[int, int],
    constants: tuple[tuple[float, ...], tuple[float, ...]],
    source: str,
    *,
    users: int = 0,
    scale: float = 255.0,
    at: tuple[str, ...] = (),
    files: dict[str, str] | None = None,
    **more: Any,
) -> DataSet:
    """A declaration. constants: mean and std. at: where the files are published. files: their digests by name."""
    info = Info(name, title, shape, classes, *sizes, users, source, name == "digits", *constants, scale)
    return DataSet(info, files=tuple(Remote(file, digest, at) for file, digest in (files or {}).items()), **more)


def _mnist_like(*facts: Any, folders: tuple[str, ...], at: tuple[str, ...], md5: tuple[str, ...]) -> DataSet:
    files = {f"{file}.gz": f"md5:{digest}" for file, digest in zip(pictures.IDX_FILES, md5, strict=True)}
    return _set(*facts, folders=folders, at=at, files=files, formats=(pictures.mnist_like(folders),))


_STILL = (0.0,) * 9, (1.0,) * 9
_KRIZ = ("https://www.cs.toronto.edu/~kriz/",)
DATA_SETS = {
    declared.info.name: declared
    for declared in (
        _set("digits", "8x8 grey handwritten digits, embedded: nothing to download", (1, 8, 8), 10, (1437, 360), ((0.5,), (0.5,)),
             "scikit-learn (load_digits), from the UCI optical recognition of handwritten digits; CC BY 4.0"),
        _mnist_like("mnist", "28x28 grey handwritten digits", (1, 28, 28), 10, (60000, 10000), ((0.1307,), (0.3081,)),
                    "yann.lecun.com/exdb/mnist; CC BY-SA 3.0",
                    folders=("mnist", "MNIST/raw"),
                    at=("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
                    md5=("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432",
                         "9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c")),
        _mnist_like("fashion-mnist", "28x28 grey pictures of clothes", (1, 28, 28), 10, (60000, 10000), ((0.2860,), (0.3530,)),
                    "github.com/zalandoresearch/fashion-mnist; MIT",
                    folders=("fashion-mnist", "fashion_mnist", "FashionMNIST/raw"),
                    at=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
                    md5=("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe",
                         "bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310")),
        _set("cifar10", "32x32 colour photographs of 10 kinds of things", (3, 32, 32), 10, (50000, 10000),
             ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)), "www.cs.toronto.edu/~kriz/cifar.html; no licence stated",
             folders=("cifar10", "cifar-10"), at=_KRIZ, files={pictures.CIFAR10.archive: pictures.CIFAR10.digest},
             formats=(Format("cifar10_coded.npz", raw.read_coded), pictures.pickled(pictures.CIFAR10))),
        _set("cifar100", "32x32 colour photographs of 100 kinds of things", (3, 32, 32), 100, (50000, 10000),
             ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)), "www.cs.toronto.edu/~kriz/cifar.html; no licence stated",
             folders=("cifar100", "cifar-100"), at=_KRIZ, files={pictures.CIFAR100.archive: pictures.CIFAR100.digest},
             formats=(pictures.pickled(pictures.CIFAR100),)),
        _set("svhn", "32x32 colour house numbers, cropped digits", (3, 32, 32), 10, (73257, 26032),
             ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)), "ufldl.stanford.edu/housenumbers; for non-commercial use",
             folders=("svhn", "SVHN"), at=("http://ufldl.stanford.edu/housenumbers/",),
             files={"train_32x32.mat": "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
                    "test_32x32.mat": "md5:eb5a983be6a315427106f1b164d9cef3"},
             formats=(Format("train_32x32.mat and test_32x32.mat", pictures.read_svhn),)),
        _set("emnist", "28x28 grey handwritten letters and digits, the balanced split", (1, 28, 28), 47, (112800, 18800),
             ((0.1751,), (0.3332,)), "www.nist.gov/itl/products-and-services/emnist-dataset; public domain (NIST)",
             folders=("emnist", "EMNIST/raw"),
             at=("https://biometrics.nist.gov/cs_links/EMNIST/", "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/"),
             files={"gzip.zip": "md5:58c8d27c78d21e728a6bc7b3cc06412e"},
             formats=(Format(f"gzip.zip, or {', '.join(pictures.EMNIST_FILES)} (or .gz)", pictures.read_emnist),)),
        _set("femnist", "28x28 grey letters and digits by writer (LEAF)", (1, 28, 28), 62, (0, 0), ((0.5,), (0.5,)),
             "leaf.cmu.edu, from NIST special database 19; BSD 2-clause (LEAF)", users=3550,
             folders=("femnist", "data/femnist/data", "leaf/data/femnist/data"),
             formats=(Format("folders train and test with the JSON files that LEAF writes, below a folder femnist",
                             people.read_leaf),),
             by_hand="build it with LEAF (leaf.cmu.edu: data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample)"),
        _set("tinyimagenet", "64x64 colour photographs of 200 kinds of things; the validation split is the test split",
             (3, 64, 64), 200, (100000, 10000), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
             "cs231n.stanford.edu/tiny-imagenet-200.zip; for non-commercial research",
             folders=("tinyimagenet", "tiny-imagenet"), at=("http://cs231n.stanford.edu/",),
             files={"tiny-imagenet-200.zip": "md5:90528d7ca1a48142e341f4ef8d21d0de"},
             formats=(Format("tiny-imagenet-200.zip, or the folder tiny-imagenet-200 in it", pictures.read_tinyimagenet),)),
        _set("uci-har", "2.56 s of 9 inertial signals of a phone at the waist, 6 activities, 30 people", (9, 128), 6,
             (7352, 2947), _STILL, "archive.ics.uci.edu/dataset/240; CC BY 4.0", users=30, scale=1.0,
             folders=("uci-har", "uci_har"), at=("https://archive.ics.uci.edu/static/public/240/",),
             files={people.UCIHAR_ZIP: "sha256:c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031"},
             formats=(Format(f"{people.UCIHAR_ZIP}, UCI HAR Dataset.zip, or the folder 'UCI HAR Dataset'", people.read_ucihar),)),
        _set("harbox", "windows of 9 inertial signals of phones, 5 activities, 121 people", (9, 100), 5,
             (0, 0), _STILL, "github.com/xmouyang/FL-Datasets-for-HAR; no licence stated", users=121, scale=1.0,
             folders=("harbox", "HARBox"),
             formats=(Format("the folder large_scale_HARBox with PERSON/ACTIVITY_train.txt", people.read_harbox),),
             by_hand="fetch large_scale_HARBox.zip from the links on github.com/xmouyang/FL-Datasets-for-HAR and unpack it"),
    )
}  # fmt: skip
"""The data sets: facts, folders and addresses of their files with digests, and the functions that read them."""
CATALOGUE: Registry[Info] = Registry(
    "data.name",
    "data set",
    {name: declared.info for name, declared in DATA_SETS.items()},
    "one of your own needs its file in run.plugins, or its files in data.source",
    kind="data",
)


def info(name: str) -> Info:
    """Return the catalogue's entry for `name`; ConfigError with the nearest valid name if there is none."""
    return CATALOGUE.find(name)


def downloadable(name: str) -> bool:
    """Return whether fedveil knows where a data set is published, and with which digest."""
    return name in DATA_SETS and bool(DATA_SETS[name].files)


def cache_root() -> Path:
    """Return the folder in the user's cache; it need not exist."""
    import pooch

    return Path(pooch.os_cache("fedveil"))


def cache(info: Info) -> Path:
    """Return the folder of a data set in the user's cache; it need not exist."""
    return cache_root() / info.name


def incomplete(info: Info) -> bool:
    """Return whether a download was interrupted: some files of a data set are in the cache and others are not."""
    there = [(cache(info) / file.name).is_file() for file in DATA_SETS[info.name].files]
    return any(there) and not all(there)


def by_hand(info: Info) -> str:
    """Return instructions for getting the files without fedveil, in one sentence."""
    declared = DATA_SETS[info.name]
    if declared.by_hand:
        return f"To get it: {declared.by_hand}."
    return f"To get it from another machine: {' '.join(file.urls[0] for file in declared.files)}"


def fetch(info: Info) -> Path:
    """Download the files of a data set into the cache, with a progress bar, and check their digests; returns their folder.

    Raises DataError if no digest is known (nothing is downloaded then), no place answers, or a digest does not match.
    """
    if not downloadable(info.name):
        raise DataError(f"refused, no digest of {info.name} is known that a download could be checked with")
    folder = cache(info)
    for file in DATA_SETS[info.name].files:
        _fetch_one(file, folder)
    return folder


def _fetch_one(file: Remote, folder: Path) -> None:
    import pooch
    import requests

    pooch.get_logger().setLevel("WARNING")
    failures: list[str] = []
    for url in file.urls:
        try:
            pooch.retrieve(url, file.digest, fname=file.name, path=folder, progressbar=_Progress(file.name))
        except ValueError as error:
            failures.append(f"{url}: the digest does not match, the file was not kept ({error})")
        except (requests.RequestException, OSError) as error:
            failures.append(f"{url}: {_short(error)}")
        else:
            return
    raise DataError(f"failed, {'; '.join(failures)}")


def _short(error: Exception) -> str:
    import requests

    if isinstance(error, requests.ConnectionError):
        return "no connection"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}, {text[:120]}{'...' if len(text) > 120 else ''}"


class _Progress:
    """pooch's progress interface (total, update, reset, close) on a rich progress bar."""

    def __init__(self, name: str) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._task: Any = self._bar.add_task(name, total=None)
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes to come, set by pooch from the server's answer."""
        return self._total

    @total.setter
    def total(self, value: int) -> None:
        self._total = value
        self._bar.update(self._task, total=value or None)
        self._bar.start()

    def update(self, count: int) -> None:
        """Record that `count` more bytes have arrived."""
        self._bar.update(self._task, advance=count)

    def reset(self) -> None:
        """Set the count to zero; pooch calls this before it shows a finished bar."""
        self._bar.reset(self._task, total=self._total or None)

    def close(self) -> None:
        """End the download."""
        self._bar.stop()
