"""Digits, networks and uploads for the tests of attacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks import CapturedUpload


@pytest.fixture(scope="session")
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits in [0, 1], enlarged to 28x28, with labels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    small = torch.tensor(bunch.images / 16, dtype=torch.float32).unsqueeze(1)
    return F.interpolate(small, size=28, mode="bilinear", align_corners=False), torch.tensor(bunch.target)


@pytest.fixture(scope="session")
def relu_cnn() -> nn.Sequential:
    """Two convolutions and one linear layer, "5"."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 5, 1, 2), nn.ReLU(), nn.Conv2d(8, 16, 5, 2, 2), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(3136, 10))


@pytest.fixture(scope="session")
def sigmoid_lenet() -> nn.Sequential:
    """The LeNet of Zhu et al. with weights from U(-0.5, 0.5)."""
    rng = torch.Generator().manual_seed(0)
    convs = [nn.Conv2d(1, 12, 5, 2, 2), nn.Conv2d(12, 12, 5, 2, 2), nn.Conv2d(12, 12, 5, 1, 2)]
    module = nn.Sequential(*(m for c in convs for m in (c, nn.Sigmoid())), nn.Flatten(), nn.Linear(588, 10))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5, generator=rng)
    return module


def named_gradient(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradient of the mean cross-entropy, computed apart from the code under test."""
    module.zero_grad()
    F.cross_entropy(module(x), y).backward()
    named = {k: p.grad.clone() for k, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return named


@pytest.fixture(scope="session")
def make_upload() -> Callable[..., CapturedUpload]:
    """One gradient with Gaussian noise of the given standard deviations."""

    def make(module: nn.Module, x: Tensor, y: Tensor, std: Mapping[str, float] | None = None, seed: int = 0) -> CapturedUpload:
        clean = named_gradient(module, x, y)
        noise = {k: (std or {}).get(k, 0.0) for k in clean}
        rng = torch.Generator().manual_seed(seed)
        sent = {k: v + noise[k] * torch.randn(v.shape, generator=rng) for k, v in clean.items()}
        norm = float(torch.cat([v.flatten() for v in clean.values()]).norm())
        return CapturedUpload(sent, n_examples=len(x), noise_std=noise, signal_norm=norm)

    return make
