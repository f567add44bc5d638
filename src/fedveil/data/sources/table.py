"""Which formats each data set is accepted in, and in which folders it may lie."""

from __future__ import annotations

from fedveil.data.catalogue import Info
from fedveil.data.sources import cifar, harbox, idx, leaf, npz, svhn, tinyimagenet, ucihar
from fedveil.data.sources.raw import Format

FOLDERS: dict[str, tuple[str, ...]] = {
    "mnist": ("mnist", "MNIST/raw"),
    "fashion-mnist": ("fashion-mnist", "fashion_mnist", "FashionMNIST/raw"),
    "cifar10": ("cifar10", "cifar-10"),
    "cifar100": ("cifar100", "cifar-100"),
    "svhn": ("svhn", "SVHN"),
    "emnist": ("emnist", "EMNIST/raw"),
    "femnist": ("femnist", "leaf/data/femnist/data"),
    "tinyimagenet": ("tinyimagenet", "tiny-imagenet"),
    "uci-har": ("uci-har", "uci_har"),
    "harbox": ("harbox", "HARBox"),
}

_ORIGINALS: dict[str, tuple[Format, ...]] = {
    "mnist": (idx.mnist_like(FOLDERS["mnist"]),),
    "fashion-mnist": (idx.mnist_like(FOLDERS["fashion-mnist"]),),
    "cifar10": (npz.coded_cifar10(), cifar.pickled("cifar10", cifar.CIFAR10)),
    "cifar100": (cifar.pickled("cifar100", cifar.CIFAR100),),
    "svhn": (svhn.matlab(),),
    "emnist": (idx.emnist(),),
    "femnist": (leaf.femnist(),),
    "tinyimagenet": (tinyimagenet.pictures(),),
    "uci-har": (ucihar.text(),),
    "harbox": (harbox.text(),),
}


def formats(info: Info) -> tuple[Format, ...]:
    """The formats of a data set, in the order in which they are looked for."""
    return (npz.plain(info), *_ORIGINALS.get(info.name, ()))
