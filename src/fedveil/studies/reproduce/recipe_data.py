"""Whether the data sets of a recipe are here, before anything is run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

from fedveil.data.catalogue import info
from fedveil.data.load import load
from fedveil.data.remote import REMOTES
from fedveil.errors import ConfigError, DataError

Presence = Literal["here", "to download", "absent"]


def presence(name: str, data_dir: str | None = None) -> Presence:
    """Whether a data set can be read; if not, whether `fedveil` knows where to download it from."""
    try:
        load(name, data_dir, download=False)
    except DataError:
        return "to download" if info(name).name in REMOTES else "absent"
    return "here"


def chance_of(data: str, data_dir: str | None = None) -> float | None:
    """What guessing reaches on the test set: the share of its commonest class, 1 / classes where it is not here.

    None where there are no classes to guess.
    """
    try:
        classes = info(data).classes
        if classes < 2:
            return None
        labels = load(data, data_dir, download=False).y_test
    except ConfigError:
        return None
    except DataError:
        return 1 / classes
    return float(np.unique(labels, return_counts=True)[1].max() / labels.size)


def unavailable(names: Iterable[str], data_dir: str | None = None) -> dict[str, str]:
    """The data sets that cannot be had, each with what to do; those that can be downloaded are."""
    lacking = {}
    for name in names:
        if presence(name, data_dir) == "here":
            continue
        try:
            load(name, data_dir)
        except DataError as error:
            lacking[name] = str(error)
    return lacking
