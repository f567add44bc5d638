"""The data sets that fedveil knows, one entry each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    "data.name", "data set", _KNOWN, "one of your own needs its file in run.plugins, or its files in data.source"
)


def info(name: str) -> Info:
    """The catalogue's entry for `name`; ConfigError naming the nearest valid name if there is none."""
    return CATALOGUE.find(name)
