"""The client on which one round of DynamicPFL's and of FedADDP's own programs was recorded, without noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedveil.methods.base import Setting
from fedveil.papers.fedglp_adp import fisher_baselines
from fedveil.training.local import Local
from fedveil.training.params import FlatModel
from method_kit import local_of, model_of

X = torch.tensor([[1.0, 0.5, -1.0, 2.0], [0.2, -0.3, 0.8, 1.0], [0.0, 1.0, 1.0, -1.0], [1.5, 0.1, 0.4, -0.6]])
Y = torch.tensor([0, 1, 1, 0])


def network(shift: float) -> FlatModel:
    """23 weights by formula: the global model, or with `shift` that of a client which trained before."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            n = p.numel()
            base = torch.linspace(-0.5, 0.5, n) * (0.7 if i % 2 else 1.0) + 0.1 * i + 0.05
            p.copy_((base + shift * torch.cos(torch.arange(n).float())).view(p.shape))
    return model_of(module)


def client(epochs: int, **state: Any) -> Local:
    """One batch an epoch, Adam at 0.01; the client's own model is `network(0.3)`."""
    training = {"local_epochs": epochs, "batch_size": 4, "optimizer": {"name": "adam", "lr": 0.01}}
    local = local_of(network(0.0), training=training, data=(X, Y), examples=4, steps=epochs)
    local.state.update(personal=network(0.3).vector.clone(), **state)
    local.normal = torch.zeros
    return local


def as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The biases of the two classes have the same Fisher information, and rounding decides which one's is larger.

    In the recording it was the last; on a processor with other instructions it need not be.
    """
    fisher = fisher_baselines.fisher

    def last_is_larger(local: Local, s: Setting) -> torch.Tensor:
        values = fisher(local, s)
        assert values[-1] == pytest.approx(float(values[-2]), rel=1e-5)
        values[-1] = values[-2] * (1 + 1e-5)
        return values

    monkeypatch.setattr(fisher_baselines, "fisher", last_is_larger)
