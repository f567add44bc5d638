"""The model that a run returns is the one that was scored, and has nothing of the client that trained last."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

import fedveil as fv
from fedveil.data.dataset import Dataset
from fedveil.data.load import load
from fedveil.data.partition import ClientIndices, Partition
from fedveil.federation.evidence import estimated_statistics
from fedveil.training.params import FlatModel


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


class Normalised(nn.Sequential):
    """Two layers, with the normalisation that is asked for between them."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), norm, nn.ReLU(), nn.Linear(16, 10))


class Tracked(nn.InstanceNorm1d):
    """Instance normalisation of rows as one channel, by statistics that it keeps."""

    def __init__(self) -> None:
        super().__init__(1, affine=True, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x[:, None])
        return found[:, 0]


PUBLIC = {"data": {"public_fraction": 0.2}}
SCORED: dict[str, dict[str, Any]] = {
    "statistics of the start": {},
    "statistics of public examples": PUBLIC,
    "statistics of public examples, an average": {**PUBLIC, "run": {"final_model": "ema"}},
    "Adam at the server": {**PUBLIC, "training": {"server_optimizer": {"name": "adam", "lr": 0.05}}},
    "one part is trained": {**PUBLIC, "model": {"trainable": ["4.*", "2.*"]}},
    "released statistics": {"method": {"name": "fedavg"}, "privacy": {}},
    "frozen statistics": {"model": {"trainable": ["4.*"]}},
    "adapters": {"model": {"lora": {"rank": 2, "targets": ["1"]}, "trainable": ["2.*", "4.*"]}, **PUBLIC},
    "instances": {**PUBLIC, "norm": Tracked},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("case", SCORED)
def test_the_score_is_that_of_the_model_that_is_handed_over(case: str, tmp_path: Path) -> None:
    """Scores took the statistics of test batches: 0.872, where the file and `model.module` had 0.098."""
    sections = SCORED[case]
    torch.manual_seed(0)
    network = Normalised(sections.get("norm", lambda: nn.BatchNorm1d(16))())
    before = {name: value.clone() for name, value in network.state_dict().items()}
    digits = load("digits")
    config = fv.configure(
        model={"module": network, **sections.get("model", {})},
        method=sections.get("method", {"name": "dp-fedavg", "clip": 2.0}),
        data={"name": "digits", "partition": {"kind": "iid", "clients": 5}, **sections.get("data", {})},
        training={"rounds": 2, "clients_per_round": 4, "sampling": "fixed", **sections.get("training", {})},
        privacy=sections.get("privacy", {"noise_multiplier": 0.1, "delta": 1e-2}),
        run={"engine": "inline", **sections.get("run", {})},
    )
    result = fv.train(config, tmp_path / "run")
    x, y = torch.from_numpy(digits.standardise(digits.x_test)), torch.from_numpy(digits.y_test)

    def accuracy(module: nn.Module) -> float:
        with torch.no_grad():
            return float((module(x).argmax(1) == y).double().mean())

    assert not result.model.module.training, "as tests run it"
    assert accuracy(result.model.module) == result.score == result.history[-1]["test_accuracy"]
    held, whole = load_file(result.path / "model.safetensors"), copy.deepcopy(result.model.module)
    if "trainable" not in sections.get("model", {}):
        assert held.keys() == before.keys(), "it can be loaded as any state can"
    with torch.no_grad():
        for name, value in whole.state_dict().items():
            if name in held:
                value.zero_()
    whole.load_state_dict(held, strict="trainable" not in sections.get("model", {}))
    assert accuracy(whole) == result.score
    kept = torch.equal(whole.state_dict()["2.running_mean"], before["2.running_mean"])
    assert kept == (case in ("statistics of the start", "frozen statistics"))
    told = [text for text in result.privacy.warnings if "batch statistics" in text and "data.public_fraction" in text]
    assert len(told) == (case == "statistics of the start")
    assert fv.verification(result.path).outcome == "verified"


def test_public_examples_give_the_statistics_that_torch_gives(tmp_path: Path) -> None:
    network, public = Normalised(nn.BatchNorm1d(16)), torch.rand(600, 1, 8, 8)
    model = FlatModel(network, built_in=True)
    found = estimated_statistics(model, public)
    other = copy.deepcopy(network)
    update_bn(DataLoader(TensorDataset(public), batch_size=200), other)
    mean, variance = other[2].running_mean, other[2].running_var
    assert torch.allclose(found, torch.cat([mean, variance]), atol=1e-6)  # type: ignore[list-item]
    assert network[2].momentum == 0.1
