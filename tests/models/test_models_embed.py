"""Features of a frozen public network, computed once, are what training sees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedveil as fv
from federation_runs import small_digits
from fedveil.errors import ConfigError
from fedveil.experiment.public_values import public_values


def backbone() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))


def test_features_are_what_the_network_makes_in_evaluation_mode() -> None:
    data, network = small_digits(), backbone()
    features = fv.embed(data, network)
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
    code, assumed = public_values(config, features.info)
    assert code.what.startswith("user-defined code carries nothing from one client to another")
    assert "takes each by itself" in code.what
    assert assumed.what.startswith("the network that made the features (Sequential, SHA-256 ")
    assert assumed.what.endswith("is public and was not trained on the clients' data")


class MinusMean(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x.flatten(1))
        return x - x.mean(0)


class Dropping(nn.Linear):
    """A dropout that goes on in evaluation mode: without one example, all behind it would get others' places."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x.flatten(1)))


class Jittered(nn.Linear):
    """Draws from a generator of its own, which no client's number of examples may move for the next one."""

    def __init__(self) -> None:
        super().__init__(64, 5)
        self.rng = np.random.RandomState(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) + float(self.rng.normal())


class Running(nn.Linear):
    """Subtracts a mean of all that came before."""

    def __init__(self) -> None:
        super().__init__(64, 5)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        out = super().forward(x - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x[0]
        return out


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (MinusMean(64, 5), "embed: MinusMean computes different features for 8 test examples together than for each alone"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Flatten(0)), r"makes torch.float32 \[5\] of examples"),
        (Dropping(64, 5), "embed: Dropping draws random numbers in evaluation mode"),
        (nn.Linear(8, 4).double(), "weight is float64"),
    ],
)
def test_refused(module: nn.Module, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fv.embed(small_digits(), module)


@pytest.mark.parametrize("network", [Jittered(), Running()])
def test_what_a_network_keeps_does_not_reach_the_next_example(network: nn.Module) -> None:
    """Each example is the first one that its copy of the network sees."""
    data = small_digits()
    other = replace(data, x_train=np.concatenate([7 * data.x_train[:1], data.x_train[1:]]))
    one, two = fv.embed(data, network), fv.embed(other, network)
    assert not np.array_equal(one.x_train[0], two.x_train[0])
    assert np.array_equal(one.x_train[1:], two.x_train[1:])
    assert np.array_equal(one.x_train, fv.embed(data, network).x_train), "the network itself saw nothing"


def test_features_of_an_example_are_the_same_whoever_else_is_there() -> None:
    """To the bit, with an odd number of inputs: the first client's first example is left out."""
    rng = np.random.default_rng(0)
    x, y, who = rng.normal(size=(600, 9)).astype(np.float32), rng.integers(0, 2, 600), np.repeat(np.arange(30), 20)
    torch.manual_seed(1)
    layers = nn.Linear(9, 30), nn.LayerNorm(30), nn.Tanh(), nn.Linear(30, 9), nn.Tanh()
    network = nn.Sequential(nn.Flatten(), *layers)

    def embedded(first: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        own = fv.from_arrays(x[first:], y[first:], client=who[first:], test=(x[:8], y[:8]), classes=2, name="own")
        found: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = fv.embed(own, network).x_train
        return found

    assert np.array_equal(embedded(0)[1:], embedded(1))
