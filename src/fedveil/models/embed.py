"""Features of a frozen public network, computed once, so that training uses only the features."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.data.dataset import Dataset
from fedveil.data.own.drawn_by_item import drawing
from fedveil.errors import ConfigError

_ROUNDING = 1e-3
"""Tolerance between the features of a batch and those of its single examples."""

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn


def embed(dataset: Dataset, module: nn.Module) -> Dataset:
    """Replace each example of a data set by its features from a public network in evaluation mode.

    Each example passes alone through a fresh copy of the network, so no other example has an influence, not even by rounding.

    Args:
        module: maps standardised examples [n, *dataset.info.input_shape] to float32 [n, ...]; not trained on these data.

    Raises:
        ConfigError: the network does not fit, or draws from the global generators. DataError: its features are not finite.
    """
    import torch

    from fedveil.models.trainable import frozen_digest, own_copy

    network = own_copy(module).requires_grad_(False).eval()
    x_train, x_test = (_features(network, dataset, x) for x in (dataset.x_train, dataset.x_test))
    _refuse_mixing(network, torch.from_numpy(dataset.standardise(dataset.x_test[:8])))
    channels = x_train.shape[1]
    info = replace(
        dataset.info,
        name=f"{dataset.info.name}-embedded",
        input_shape=x_train.shape[1:],
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        scale=1.0,
        vocabulary=0,
        features_of=f"{type(module).__name__}, SHA-256 {frozen_digest(network)}",
    )
    return replace(dataset, info=info, x_train=x_train, x_test=x_test)


def _features(network: nn.Module, dataset: Dataset, x: NDArray[Any]) -> NDArray[np.float32]:
    import torch

    def extract(x: NDArray[Any]) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [_feature(_fresh(network), torch.from_numpy(dataset.standardise(x[i : i + 1])).clone()) for i in range(len(x))]

    features, draws = drawing(extract, x)
    if draws:
        raise ConfigError(
            f"embed: {type(network).__name__} draws random numbers in evaluation mode, so that features of one example would "
            f"follow from how many others there are: leave that out, such as a dropout that does not ask for self.training"
        )
    return np.ascontiguousarray(torch.cat(features).numpy())


def _fresh(network: nn.Module) -> nn.Module:
    """Return a copy that shares the weights, or the network itself if it is stateless."""
    from fedveil.training.params import copied, has_user_code

    return copied(network, network.parameters()) if has_user_code(network) else network


def _refuse_mixing(network: nn.Module, x: Tensor) -> None:
    """Refuse a network whose features of a batch of test examples differ from those of the single examples."""
    import torch

    with torch.inference_mode():
        singles = torch.cat([_feature(_fresh(network), one.clone()) for one in torch.split(x, 1)])
        if not torch.allclose(_feature(_fresh(network), x.clone()), singles, rtol=_ROUNDING, atol=_ROUNDING):
            raise ConfigError(
                f"embed: {type(network).__name__} computes different features for {len(x)} test examples together than for each "
                f"alone: remove computations over a batch"
            )


def _feature(network: nn.Module, x: Any) -> Any:
    import torch

    feature = network(x)
    if not isinstance(feature, torch.Tensor) or feature.dtype != torch.float32 or feature.dim() < 2 or len(feature) != len(x):
        kind = f"{feature.dtype} {list(feature.shape)}" if isinstance(feature, torch.Tensor) else f"a {type(feature).__name__}"
        raise ConfigError(
            f"embed: {type(network).__name__} makes {kind} of examples {list(x.shape)}; it must be float32 [n, ...]"
        )
    return feature
