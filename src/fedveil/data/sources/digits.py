"""The embedded data set: the digits that scikit-learn ships."""

from __future__ import annotations

from functools import cache

import numpy as np

from fedveil.data.sources.raw import RawData

TEST_SIZE = 360


def read() -> RawData:
    """scikit-learn's 1,797 digits, their 17 grey levels spread over 0..255, split 1437/360 with equal shares of each label."""
    x, y = _parsed()
    test = _stratified(y, TEST_SIZE)
    return RawData(x[~test], y[~test], x[test], y[test])  # copies


@cache
def _parsed() -> tuple[np.ndarray, np.ndarray]:
    """All of them; scikit-learn reads a compressed table of text each time."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None], bunch.target.astype(np.int64)


def _stratified(labels: np.ndarray, size: int) -> np.ndarray:
    """Mask of `size` examples, each label in proportion (largest remainders), spread evenly over the file's order."""
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
