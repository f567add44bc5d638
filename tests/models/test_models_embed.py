"""Features of a frozen public network, computed once, are what training sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedveil as fv
from federation_runs import small_digits
from fedveil.errors import ConfigError
from fedveil.statement.public_values import public_values


def backbone() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))


def test_features_are_what_the_network_makes_in_evaluation_mode() -> None:
    data, network = small_digits(), backbone()
    features = fv.embed(data, network, batch=64)
    with torch.no_grad():
        wanted = backbone().eval()(torch.from_numpy(data.standardise(data.x_train)))
    assert features.info.input_shape == (5,)
    assert features.x_train.dtype == np.float32
    assert np.allclose(features.x_train, wanted.numpy(), atol=1e-6)
    assert np.array_equal(features.standardise(features.x_test), features.x_test)
    assert features.y_train is data.y_train
    assert all(part.training for part in network.modules()), "the caller's stays as it is"
    assert all(p.requires_grad for p in network.parameters())


def test_the_statement_and_the_card_say_so(tmp_path: object) -> None:
    features = fv.embed(small_digits(), backbone())
    config = fv.configure(model="linear")
    (assumed,) = public_values(config, features.info)
    assert assumed.what.startswith("the network that made the features (Sequential, SHA-256 ")
    assert assumed.what.endswith("is public and was not trained on the clients' data")


class MinusMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x.flatten(1))
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (MinusMean(), r"the layer the network \(MinusMean\) mixes the examples of a batch"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Flatten(0)), r"makes torch.float32 \[40\] of examples"),
        (nn.Linear(8, 4).double(), "weight is float64"),
    ],
)
def test_refused(module: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fv.embed(small_digits(), module, batch=8)


def test_no_batch() -> None:
    with pytest.raises(ConfigError, match="embed: batch = 0: give at least 1"):
        fv.embed(small_digits(), backbone(), batch=0)
