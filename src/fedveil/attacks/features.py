"""What a model computes before its classifier, and a small fitting loop for an attacker's own models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.errors import ConfigError

LossFn = Callable[[Tensor, Tensor], Tensor]


def classifier_of(module: nn.Module) -> nn.Linear:
    """The last linear layer."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    if not layers:
        raise ConfigError("the model has no linear layer, so it has no penultimate features")
    return layers[-1]


def penultimate(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Input of the last linear layer (n, features), and the logits (n, classes), differentiable in x."""
    caught: list[Tensor] = []
    hook = classifier_of(module).register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    try:
        logits: Tensor = module(x)
    finally:
        hook.remove()
    return caught[-1], logits


def features(module: nn.Module, x: Tensor, batch: int = 500) -> Tensor:
    """Penultimate features of many examples, without gradients, in evaluation mode (n, features)."""
    module.eval()
    with torch.no_grad():
        return torch.cat([penultimate(module, part)[0] for part in torch.split(x, batch)])


def predictions(module: nn.Module, x: Tensor, batch: int = 500) -> Tensor:
    """Logits of many examples, without gradients, in evaluation mode (n, classes)."""
    module.eval()
    with torch.no_grad():
        return torch.cat([module(part) for part in torch.split(x, batch)])


@dataclass(frozen=True)
class Fitting:
    """How an attacker trains a model: by Adam, for so many epochs at most; `stop(epoch)` after each may end it."""

    epochs: int
    loss: LossFn = F.cross_entropy
    lr: float = 1e-3
    batch: int = 64
    stop: Callable[[int], bool] | None = None


def fit(module: nn.Module, x: Tensor, y: Tensor, rng: torch.Generator, how: Fitting) -> int:
    """Train an attacker's model in place on (x, y). Returns the epochs run."""
    optimizer = torch.optim.Adam(module.parameters(), lr=how.lr)
    for epoch in range(1, how.epochs + 1):
        module.train()
        for chosen in torch.split(torch.randperm(len(x), generator=rng), how.batch):
            optimizer.zero_grad()
            how.loss(module(x[chosen]), y[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if how.stop is not None and how.stop(epoch):
            return epoch
    return how.epochs
