"""The model that a run returns has the statistics that it began with, and nothing of the client that trained last."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.data.dataset import Dataset
from fedveil.data.load import load
from fedveil.data.partition import ClientIndices, Partition


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    layers(torch.rand(20, 1, 8, 8))  # statistics that are not those of a new layer
    return layers


def trained(folder: Path, examples: int, **training: object) -> fv.Result:
    """Four clients, of which the last has that many examples."""
    digits = load("digits")
    data = Dataset(digits.info, digits.x_train[:200], digits.y_train[:200], digits.x_test[:60], digits.y_test[:60])
    owners = Partition(ClientIndices(np.arange(150 + examples), np.array([0, 50, 100, 150, 150 + examples])), "own", 0)
    config = fv.configure(
        model=net(),
        method={"name": "dp-fedavg"},
        data={"name": "digits", "client_test_fraction": 0.2},
        training={"rounds": 1, "clients_per_round": 4, "batch_size": 10, **training},
        privacy={"epsilon": 0.1, "delta": 1e-3, "view": "aggregate"},
        run={"seed": 0, "engine": "inline"},
    )
    return fv.train(config, folder, data=data, partition=owners)


@pytest.mark.parametrize("measured", [False, True])
def test_statistics_of_a_returned_model_are_nobodys(measured: bool, tmp_path: Path) -> None:
    before = net().state_dict()
    for examples in (20, 50):
        after = trained(tmp_path / f"{examples}", examples, measure_trained=measured).model.module.state_dict()
        assert torch.equal(after["2.running_mean"], before["2.running_mean"])
        assert torch.equal(after["2.running_var"], before["2.running_var"])
        assert int(after["2.num_batches_tracked"]) == 0
        assert not torch.equal(after["1.weight"], before["1.weight"])
