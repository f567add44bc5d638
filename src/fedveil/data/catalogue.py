"""The data sets that fedveil knows, where they are published, and the digests that a download must have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedveil.errors import DataError
from fedveil.registry import Registry

IGNORED = -100
"""Stands for the class of a place in a sequence or picture that has none, such as padding."""


@dataclass(frozen=True)
class Targets:
    """What the target of one example looks like; by default the number of a class.

    shape: `()` is one number. dtype: int64 for classes, float32 for quantities. names: of its entries, or of the classes.
    unit: of quantities, as beside an axis.
    """

    shape: tuple[int, ...] = ()
    dtype: Literal["int64", "float32"] = "int64"
    names: tuple[str, ...] = ()
    unit: str = ""


@dataclass(frozen=True)
class Info:
    """What is known about a data set before it is loaded.

    input_shape: one example: (channels, height, width) for images, (channels, time) for signals, (length,) for tokens.
    classes: how many there are; 0 where targets are quantities.
    train_size, test_size: examples of the official split; 0 where the number depends on how the files were prepared.
    users: natural users of both splits together, 0 if there are none.
    source: where it comes from and under which licence. embedded: it comes with a dependency, nothing is downloaded.
    mean, std: one constant per channel, in the units of `Dataset.x_train` divided by `scale`; see `dataset.standardise`.
    scale: 255 for images stored as bytes, 1 for signals.
    target: what targets look like. vocabulary: number of tokens where inputs are tokens, int64 from 0; else 0.
    features_of: the public network that made the examples, and its digest; empty where they are not features (`fv.embed`).
    counted: what of this was counted in the data, though it is treated as public.
    """

    name: str
    title: str
    input_shape: tuple[int, ...]
    classes: int
    train_size: int
    test_size: int
    users: int
    source: str
    embedded: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0
    target: Targets = Targets()
    vocabulary: int = 0
    features_of: str = ""
    counted: tuple[str, ...] = ()

    @property
    def strata(self) -> int:
        """How many classes examples can be grouped by; 1 where an example does not have just one class."""
        return self.classes if self.classes and not self.target.shape else 1


def _image(
    name: str,
    title: str,
    shape: tuple[int, ...],
    classes: int,
    sizes: tuple[int, int],
    source: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    *,
    users: int = 0,
    embedded: bool = False,
) -> Info:
    return Info(name, title, shape, classes, *sizes, users, source, embedded, mean, std)


def _signal(name: str, title: str, shape: tuple[int, int], classes: int, sizes: tuple[int, int], source: str, users: int) -> Info:
    channels = shape[0]
    return Info(name, title, shape, classes, *sizes, users, source, False, (0.0,) * channels, (1.0,) * channels, scale=1.0)


_KNOWN = {
    entry.name: entry
    for entry in (
        _image("digits", "8x8 grey handwritten digits, embedded: nothing to download", (1, 8, 8), 10, (1437, 360),
               "scikit-learn (load_digits), from the UCI optical recognition of handwritten digits; CC BY 4.0",
               (0.5,), (0.5,), embedded=True),
        _image("mnist", "28x28 grey handwritten digits", (1, 28, 28), 10, (60000, 10000),
               "yann.lecun.com/exdb/mnist; CC BY-SA 3.0", (0.1307,), (0.3081,)),
        _image("fashion-mnist", "28x28 grey pictures of clothes", (1, 28, 28), 10, (60000, 10000),
               "github.com/zalandoresearch/fashion-mnist; MIT", (0.2860,), (0.3530,)),
        _image("cifar10", "32x32 colour photographs of 10 kinds of things", (3, 32, 32), 10, (50000, 10000),
               "www.cs.toronto.edu/~kriz/cifar.html; no licence stated", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        _image("cifar100", "32x32 colour photographs of 100 kinds of things", (3, 32, 32), 100, (50000, 10000),
               "www.cs.toronto.edu/~kriz/cifar.html; no licence stated", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        _image("svhn", "32x32 colour house numbers, cropped digits", (3, 32, 32), 10, (73257, 26032),
               "ufldl.stanford.edu/housenumbers; for non-commercial use", (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
        _image("emnist", "28x28 grey handwritten letters and digits, the balanced split", (1, 28, 28), 47, (112800, 18800),
               "www.nist.gov/itl/products-and-services/emnist-dataset; public domain (NIST)", (0.1751,), (0.3332,)),
        _image("femnist", "28x28 grey letters and digits by writer (LEAF)", (1, 28, 28), 62, (0, 0),
               "leaf.cmu.edu, from NIST special database 19; BSD 2-clause (LEAF)", (0.5,), (0.5,), users=3550),
        _image("tinyimagenet", "64x64 colour photographs of 200 kinds of things; the validation split is the test split",
               (3, 64, 64), 200, (100000, 10000),
               "cs231n.stanford.edu/tiny-imagenet-200.zip; for non-commercial research",
               (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        _signal("uci-har", "2.56 s of 9 inertial signals of a phone at the waist, 6 activities, 30 people",
                (9, 128), 6, (7352, 2947), "archive.ics.uci.edu/dataset/240; CC BY 4.0", 30),
        _signal("harbox", "windows of 9 inertial signals of phones, 5 activities, 121 people", (9, 100), 5, (0, 0),
                "github.com/xmouyang/FL-Datasets-for-HAR; no licence stated", 121),
    )
}  # fmt: skip
CATALOGUE: Registry[Info] = Registry(
    "data.name",
    "data set",
    _KNOWN,
    "one of your own needs its file in run.plugins, or its files in data.source",
    kind="data",
)


def info(name: str) -> Info:
    """The catalogue's entry for `name`; ConfigError naming the nearest valid name if there is none."""
    return CATALOGUE.find(name)


@dataclass(frozen=True)
class Remote:
    """One file: its addresses in the order in which they are tried, and its digest as pooch writes it (algorithm:hex)."""

    name: str
    digest: str
    places: tuple[str, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        """Full URLs."""
        return tuple(place + self.name for place in self.places)


def _files(places: tuple[str, ...], digests: dict[str, str]) -> tuple[Remote, ...]:
    return tuple(Remote(name, digest, places) for name, digest in digests.items())


REMOTES: dict[str, tuple[Remote, ...]] = {
    "mnist": _files(
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        {
            "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion-mnist": _files(
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        {
            "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "cifar10": _files(("https://www.cs.toronto.edu/~kriz/",), {"cifar-10-python.tar.gz": "md5:c58f30108f718f92721af3b95e74349a"}),
    "cifar100": _files(
        ("https://www.cs.toronto.edu/~kriz/",), {"cifar-100-python.tar.gz": "md5:eb9058c3a382ffc7106e4002c42a8d85"}
    ),
    "svhn": _files(
        ("http://ufldl.stanford.edu/housenumbers/",),
        {
            "train_32x32.mat": "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "md5:eb5a983be6a315427106f1b164d9cef3",
        },
    ),
    "emnist": _files(
        ("https://biometrics.nist.gov/cs_links/EMNIST/", "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/"),
        {"gzip.zip": "md5:58c8d27c78d21e728a6bc7b3cc06412e"},
    ),
    "tinyimagenet": _files(("http://cs231n.stanford.edu/",), {"tiny-imagenet-200.zip": "md5:90528d7ca1a48142e341f4ef8d21d0de"}),
    "uci-har": _files(
        ("https://archive.ics.uci.edu/static/public/240/",),
        {
            "human+activity+recognition+using+smartphones.zip": (
                "sha256:c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031"
            )
        },
    ),
}

NO_DIGEST: dict[str, str] = {
    "femnist": "build it with LEAF (leaf.cmu.edu: data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample)",
    "harbox": "fetch large_scale_HARBox.zip from the links on github.com/xmouyang/FL-Datasets-for-HAR and unpack it",
}


def cache_root() -> Path:
    """The folder in the user's cache; it need not exist."""
    import pooch

    return Path(pooch.os_cache("fedveil"))


def cache(info: Info) -> Path:
    """The folder of a data set in the user's cache; it need not exist."""
    return cache_root() / info.name


def incomplete(info: Info) -> bool:
    """Whether a download was interrupted: some files of a data set are in the cache and others are not."""
    there = [(cache(info) / file.name).is_file() for file in REMOTES.get(info.name, ())]
    return any(there) and not all(there)


def by_hand(info: Info) -> str:
    """How to get the files by hand, in one sentence."""
    if info.name in NO_DIGEST:
        return f"To get it: {NO_DIGEST[info.name]}."
    return f"To get it from another machine: {' '.join(file.urls[0] for file in REMOTES[info.name])}"


def fetch(info: Info) -> Path:
    """Download the files of a data set into the cache, with a progress bar, and check their digests; returns their folder.

    Raises DataError if no digest is known (nothing is downloaded then), no place answers, or a digest does not match.
    """
    if info.name not in REMOTES:
        raise DataError(f"refused, no digest of {info.name} is known that a download could be checked with")
    folder = cache(info)
    for file in REMOTES[info.name]:
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
        """`count` more bytes have arrived."""
        self._bar.update(self._task, advance=count)

    def reset(self) -> None:
        """Back to nothing; pooch calls it before it shows a finished bar."""
        self._bar.reset(self._task, total=self._total or None)

    def close(self) -> None:
        """End of the download."""
        self._bar.stop()
