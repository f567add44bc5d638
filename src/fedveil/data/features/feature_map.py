"""A data set with features in the place of its examples, computed once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.data.catalogue import CATALOGUE, Info, info
from fedveil.data.dataset import Dataset
from fedveil.data.features.efficientnet_lite0 import DIGEST, efficientnet_lite0
from fedveil.data.features.oriented_gradients import mirrored_gradients, oriented_gradients
from fedveil.data.features.random_shapes import random_shapes
from fedveil.data.features.whitening import Whitening, unit_power, unit_variance, whitening_of
from fedveil.data.load import load
from fedveil.data.own.drawn_by_item import drawing
from fedveil.data.remote import REMOTES, cache_root
from fedveil.errors import ConfigError, DataError
from fedveil.ledger.owner_only import owner_only, owner_only_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Feature = Callable[[NDArray[np.float32]], NDArray[np.float32]]

FEATURES: dict[str, Feature] = {
    "oriented-gradients": oriented_gradients,
    "mirrored-gradients": mirrored_gradients,
    "efficientnet-lite0": efficientnet_lite0,
}
"""Built-in features by name: from float32 [n, *input_shape], divided by the data set's scale, to float32 [n, k]."""
NETWORKS = {"efficientnet-lite0": f"EfficientNet-lite0, SHA-256 {DIGEST}"}
"""Features that a public network makes, by name; their length is known from no examples, without loading the network."""
SHAPES = "shapes"
"""The name by which pictures that a program draws stand among the public data (`random_shapes`)."""
_VERSION = 2
_BATCH = 2000
"""Public examples at once, for whitening."""
_SHOWN, _ROUNDING = 8, 1e-3
"""Public examples that show whether features of several depend on each other, by more than this."""


@dataclass(frozen=True)
class FeatureMap:
    """What makes features of examples, each by itself: a function, whitening by public data, then mean square 1.

    Args:
        name: as configured. make: see `FEATURES`. public: names of data sets, or SHAPES, that whiten them; empty: not whitened.
        components: how many are kept of whitened features. data_dir, download: where public data sets are looked for.
    """

    name: str
    make: Feature
    public: tuple[str, ...] = ()
    components: int = 400
    data_dir: str | None = None
    download: bool = True

    def info(self, raw: Info) -> Info:
        """What is public of the data set with these features."""
        if raw.vocabulary:
            raise ConfigError(f"data.features = {self.name!r} takes numbers, and {raw.name} has tokens")
        for name in self.public:
            channels = raw.input_shape[0] if name == SHAPES else info(name).input_shape[0]
            if name == raw.name or channels != raw.input_shape[0]:
                raise ConfigError(
                    f"public.data = {name!r}: public data must be another data set than {raw.name}, with as many channels"
                )
        probe = 0 if self.name in NETWORKS else 1
        length = self._features(np.zeros((probe, *raw.input_shape), np.float32)).shape[1]
        kept = min(self.components, length) if self.public else length
        return replace(raw, input_shape=(kept,), mean=(0.0,) * kept, std=(1.0,) * kept, scale=1.0)

    def of(self, raw: Dataset) -> Dataset:
        """The data set with these features.

        Raises:
            ConfigError, DataError: they do not fit, mix examples, draw random numbers, or public data cannot be had.
        """
        made = self.info(raw.info)
        if self.name not in FEATURES:
            self._refuse_mixing(next(_batches(raw.x_test[:_SHOWN], raw.info.scale, _SHOWN)))
        kept = self._kept(raw)
        if kept is None or not kept.is_file():
            whitening = self._whitening(raw.info)
            train, test = (self._whitened(x, raw.info.scale, whitening) for x in (raw.x_train, raw.x_test))
            if kept is not None:
                with suppress(OSError):  # a cache that cannot be written costs time alone
                    _write(kept, train, test)
            return replace(raw, info=made, x_train=train, x_test=test)
        with np.load(kept, allow_pickle=False) as file:
            return replace(raw, info=made, x_train=file["x_train"], x_test=file["x_test"])

    def _kept(self, raw: Dataset) -> Path | None:
        """The file in the cache, for built-in functions of public data sets: of one's own data no copy is made."""
        fetched = raw.info.name in REMOTES and raw.info == CATALOGUE[raw.info.name]
        if self.name not in FEATURES or not fetched:
            return None
        digest = hashlib.sha256(repr((_VERSION, self.name, self.public, self.components, raw.info)).encode())
        for x in (raw.x_train, raw.x_test):
            digest.update(np.ascontiguousarray(x).data)
        return cache_root() / "features" / f"{digest.hexdigest()[:32]}.npz"

    def _refuse_mixing(self, x: NDArray[np.float32]) -> None:
        """An error where public examples have other features together than each by itself: one client would move all others'."""
        alone = np.concatenate([self._features(one[None]) for one in x])
        if not np.allclose(self._features(x), alone, rtol=0, atol=_ROUNDING):
            raise ConfigError(
                f"data.features = {self.name!r} makes other features of {len(x)} test examples together than of each by itself, "
                f"and so mixes those of several clients: leave out what it computes over examples, such as their mean"
            )

    def _features(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        found: Any = deepcopy(self.make)(x)  # a fresh one, where it is an object that may keep something
        if not isinstance(found, np.ndarray) or found.dtype != np.float32 or found.ndim != 2 or len(found) != len(x):
            kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else f"a {type(found).__name__}"
            raise ConfigError(f"data.features = {self.name!r} makes {kind} of {len(x)} examples; it must be float32 [n, k]")
        if not np.isfinite(found).all():
            raise DataError(f"data.features = {self.name!r} makes numbers that are not finite")
        return unit_variance(found)

    def _whitened(self, x: NDArray[Any], scale: float, whitening: Whitening | None) -> NDArray[np.float32]:
        """Each example alone: in a batch its place and the others' number would decide how it is rounded."""
        parts, draws = drawing(lambda x: [self._features(one) for one in _batches(x, scale, 1)], x)
        if draws and self.name not in FEATURES:  # whose networks draw initial weights when they are first called
            raise ConfigError(
                f"data.features = {self.name!r} draws random numbers, so that features of one example would follow from how many "
                f"were drawn for others: make a fixed function of it, and networks once, outside of it"
            )
        found = np.concatenate(parts if whitening is None else [unit_power(whitening(part)) for part in parts])
        return np.ascontiguousarray(found)

    def _whitening(self, raw: Info) -> Whitening | None:
        if not self.public:
            return None
        parts = []
        for name in self.public:
            if name == SHAPES:
                (channels, height, width) = raw.input_shape
                x, scale = random_shapes((channels, height, width)), 1.0
            else:
                public = load(name, self.data_dir, self.download)
                x, scale = public.x_train, public.info.scale
            parts.append(np.concatenate([self._features(part) for part in _batches(x, scale, _BATCH)]))
        return whitening_of(parts, self.components)


def _batches(x: NDArray[Any], scale: float, size: int) -> Iterator[NDArray[np.float32]]:
    for i in range(0, len(x), size):
        yield x[i : i + size].astype(np.float32) / np.float32(scale)


def _write(path: Path, train: NDArray[np.float32], test: NDArray[np.float32]) -> None:
    """Whole or not at all."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    owner_only_folder(path.parent)
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(draft, "wb", opener=owner_only) as file:
            np.savez(file, x_train=train, x_test=test)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
