"""Gradient compression: the entries that leave, by hand, and that it learns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import method_kit as h
from fedveil.methods.gradient_compression import Pruned, quantile
from fedveil.statement.certify import certify_config
from fedveil.training.local import BatchGradient, Local, LocalSpec
from fedveil.training.params import FlatModel

SERVER = {"privacy": {"view": "server"}}


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.77, 0.99])
def test_quantile_is_numpys(share: float) -> None:
    values = torch.randn(37, generator=torch.Generator().manual_seed(0)).double()
    assert float(quantile(values, share)) == pytest.approx(float(np.quantile(values.numpy(), share)), rel=1e-12)


def test_small_entries_of_each_layer_do_not_leave() -> None:
    module = torch.nn.Linear(2, 2)
    model = FlatModel(module)
    start = model.vector.clone()
    local = Local(model, start, LocalSpec(), BatchGradient(), torch.Generator())
    model.vector.add_(torch.tensor([0.1, -0.4, 0.2, 0.3, 5.0, -7.0]))
    update = Pruned(rate=0.5).finish(local)
    # magnitudes of the weight 0.1 0.2 0.3 0.4, median 0.25; of the bias 5 and 7, median 6
    assert update.tolist() == pytest.approx([0.0, -0.4, 0.0, 0.3, 0.0, -7.0], abs=1e-6)


def test_nothing_is_pruned_at_rate_0() -> None:
    plain, pruned = (
        h.trained(h.job_of(h.digits(m, **SERVER))).model
        for m in ({"name": "fedavg"}, {"name": "gradient-compression", "pruning_rate": 0.0})
    )
    assert torch.equal(plain, pruned)


def test_it_learns_and_nothing_is_proven() -> None:
    config = h.digits({"name": "gradient-compression"}, "training.optimizer.lr=0.5", rounds=6, **SERVER)
    assert h.trained(h.job_of(config)).history[-1]["test_accuracy"] > 0.7
    statement = certify_config(config)
    assert math.isinf(statement.own.proven.epsilon)
    assert "adds no noise" in statement.own.proven.reason
