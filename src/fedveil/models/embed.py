"""Features of a frozen public network, computed once: training then sees the features alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.data.dataset import Dataset
from fedveil.data.own.drawn_by_item import drawing
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn


def embed(dataset: Dataset, module: nn.Module) -> Dataset:
    """The data set with each example replaced by what a public network makes of it, in evaluation mode.

    Each example passes through the network alone: in a batch its place and the others' number would decide how it is rounded.

    Args:
        module: takes standardised examples [n, *dataset.info.input_shape], returns float32 [n, ...]; not trained on these data.

    Raises:
        ConfigError: the network does not fit, draws random numbers, or keeps something from one example to the next.
        DataError: its features are not finite.
    """
    from fedveil.models.frozen_parts import frozen_digest
    from fedveil.models.module_checks import own_copy
    from fedveil.training.kept_state import KeptState

    network = own_copy(module).requires_grad_(False).eval()
    _features(network, dataset, dataset.x_test[:1])  # what its code keeps of public examples it keeps before any others
    kept = KeptState(f"embed: {type(network).__name__}", network)
    x_train, x_test = (_features(network, dataset, x) for x in (dataset.x_train, dataset.x_test))
    kept.require_unchanged()
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

    def made(x: NDArray[Any]) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [_feature(network, torch.from_numpy(dataset.standardise(x[i : i + 1])).clone()) for i in range(len(x))]

    found, draws = drawing(made, x)
    if draws:
        raise ConfigError(
            f"embed: {type(network).__name__} draws random numbers in evaluation mode, so that features of one example would "
            f"follow from how many others there are: leave that out, such as a dropout that does not ask for self.training"
        )
    return np.ascontiguousarray(torch.cat(found).numpy())


def _feature(network: nn.Module, x: Any) -> Any:
    import torch

    found = network(x)
    if not isinstance(found, torch.Tensor) or found.dtype != torch.float32 or found.dim() < 2 or len(found) != len(x):
        kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
        raise ConfigError(
            f"embed: {type(network).__name__} makes {kind} of examples {list(x.shape)}; it must be float32 [n, ...]"
        )
    return found
