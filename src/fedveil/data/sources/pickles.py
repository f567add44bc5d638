"""Pickles of numpy arrays, read only after their digest was checked and with nothing but arrays allowed inside."""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

import numpy as np

from fedveil.errors import DataError

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


def check_digest(content: bytes, digest: str, name: str) -> None:
    """DataError unless `content` has the digest "algorithm:hex"."""
    algorithm, expected = digest.split(":")
    found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise DataError(
            f"{name}: its {algorithm} is {found}, the original's is {expected}; it holds pickles, which can run code when "
            "they are opened, so it is not opened; fetch it again"
        )


def unpickle(content: bytes, name: str) -> dict[str, Any]:
    """The dictionary in a pickle whose digest was checked; DataError if it holds anything but arrays and plain values."""
    try:
        value = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{name}: not opened as a pickle of arrays ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{name}: holds a {type(value).__name__}, expected a dictionary")
    return value
