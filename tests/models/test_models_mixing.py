"""Layers that mix the examples of a batch are found, whatever they are, and refused where DP-SGD would rest on their absence."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fedveil.models.mixing import drawn_elsewhere, mixing_layer
from torch import nn
from torch.nn import functional as F

from federation_runs import config, job, prepared, rehearsed
from fedveil.configuration.config import configure
from fedveil.errors import ConfigError
from fedveil.models.model_registry import MODELS, build
from fedveil.release.dpsgd import PerExampleGradient
from fedveil.release.noise import Randomness
from fedveil.run import assembly, rehearsal
from fedveil.training.local import Local, LocalSpec
from fedveil.training.params import FlatModel


class MinusMean(nn.Module):
    """Mixes in its own code, not in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x - x.mean(0)


class HandsOnMixed(nn.Module):
    """Mixes in its own code, and hands the result to a layer, which is innocent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out: torch.Tensor = self.last(x - x.mean(0))
        return out


def around(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 2))


class Words(nn.Module):
    """Tokens, and time before examples inside."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.table, self.cell, self.mixes = nn.Embedding(6, 3), nn.LSTM(3, 5), mixes
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.cell(self.table(x.T))
        last: torch.Tensor = self.last(states)[-1]
        return last - last.mean(0) if self.mixes else last


class Mixes(nn.Module):
    """Mixes by `mix`, and shows nothing of it before the last layer, which may start at zero."""

    def __init__(self, mix: Callable[[torch.Tensor], torch.Tensor], zero: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(3, 4), nn.Linear(4, 2), mix
        if zero:
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.last.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.mix(self.first(x)))
        return out


def now_and_then(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0) if random.random() < 1e-6 else x


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: x + x.sort(0).values,
        lambda x: x - x.mean(0),
    ],
)
def test_a_last_layer_that_starts_at_zero_hides_nothing(mix: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(9, 3)
    assert mixing_layer(Mixes(mix, zero=True), x) == "the network (Mixes)"
    assert mixing_layer(Mixes(torch.tanh, zero=True), x) == ""


class Sorted(nn.Module):
    """Hands a layer the examples in the order of their sizes, and puts what it makes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x.sum(1).argsort()
        out: torch.Tensor = self.last(torch.tanh(self.first(x[order])))[order.argsort()]
        return out


def test_an_order_of_examples_inside_is_no_mixing() -> None:
    assert mixing_layer(Sorted(), torch.randn(9, 3)) == ""


def test_a_layer_of_width_zero_is_no_mixing() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        wide = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2))
    for every in (True, False):
        assert mixing_layer(wide, torch.randn(9, 3), every) == ""


def test_a_layer_that_takes_no_hooks_leaves_the_network_to_be_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(3, 3))
    assert mixing_layer(nn.Sequential(scripted, nn.Linear(3, 2)), torch.randn(9, 3)) == ""
    assert mixing_layer(nn.Sequential(scripted, MinusMean()), torch.randn(9, 3)) != ""


def test_of_known_layers_each_is_looked_at() -> None:
    hidden = nn.Sequential(nn.Linear(3, 4), nn.Softmax(0), nn.Threshold(9.0, 0.0), nn.Linear(4, 2))
    assert mixing_layer(hidden, torch.randn(9, 3)) == ""
    assert mixing_layer(hidden, torch.randn(9, 3), every=True) == "1 (Softmax)"


def test_numbers_that_are_drawn_elsewhere() -> None:
    x = torch.randn(9, 3)
    assert drawn_elsewhere(Mixes(torch.nn.functional.dropout), x) == ""
    assert drawn_elsewhere(Mixes(now_and_then), x) == "random"
    assert drawn_elsewhere(Mixes(lambda x: x * float(np.random.rand())), x) == "numpy.random"  # noqa: NPY002 : what is looked for


def test_a_network_that_draws_elsewhere_is_refused_at_record_level(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Flatten(), nn.Linear(64, 3), Mixes(now_and_then), nn.Linear(2, 10)
    monkeypatch.setattr(rehearsal, "build_model", lambda *_: FlatModel(nn.Sequential(*layers)))
    with pytest.raises(ConfigError, match="draws from random in its forward pass"):
        rehearsed(config({"name": "fedavg"}, "server", **DP_SGD))
    rehearsed(config({"name": "fedavg"}))


@pytest.mark.parametrize("length", [3, 4, 5])
def test_tokens_with_time_before_examples(length: int) -> None:
    x = torch.randint(6, (20, length), generator=torch.Generator().manual_seed(length))
    assert mixing_layer(Words(), x) == ""
    assert mixing_layer(Words(mixes=True), x) == "the network (Words)"


def test_the_mode_of_the_network_is_kept() -> None:
    x = torch.randn(9, 3)
    assert mixing_layer(around(nn.BatchNorm1d(4)).eval(), x) == ""
    assert mixing_layer(FlatModel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).requires_grad_(False))).module, x) == ""


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (HandsOnMixed(), "the network (HandsOnMixed)"),
        (nn.Sequential(HandsOnMixed(), nn.Linear(2, 2)), "0 (HandsOnMixed)"),
        (around(nn.BatchNorm1d(4)), "1 (BatchNorm1d)"),
        (around(nn.BatchNorm1d(4, affine=False)), "1 (BatchNorm1d)"),
        (around(nn.ReLU(), nn.BatchNorm1d(4, affine=False, track_running_stats=False)), "2 (BatchNorm1d)"),
        (around(nn.Softmax(0)), "1 (Softmax)"),
        (around(nn.Sequential(nn.Tanh(), nn.BatchNorm1d(4, affine=False))), "1.1 (BatchNorm1d)"),
        (around(nn.Softmin(0), nn.ReLU()), "1 (Softmin)"),
        (MinusMean(), "the network (MinusMean)"),
        (around(), ""),
        (around(nn.LayerNorm(4), nn.Dropout(0.5), nn.GroupNorm(2, 4)), ""),
        (around(nn.Softmax(1)), ""),
    ],
)
def test_the_first_layer_that_mixes(module: nn.Module, named: str) -> None:
    torch.manual_seed(3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    for n in (2, 3, 50):
        x = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
        assert mixing_layer(module, x) == named
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert not any(layer._forward_hooks for layer in module.modules())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "resnet152")) for n in sorted(set(MODELS) - {"cnn-lstm"})]
)
@pytest.mark.heavy
def test_no_network_of_ours_mixes_examples(name: str) -> None:
    side = 8 if name.startswith("resnet") else 28
    x = torch.randn(3, 1, side, side, generator=torch.Generator().manual_seed(0))
    assert mixing_layer(build(name, (1, side, side), 10, 0), x) == ""


def test_a_recurrent_network_does_not_mix_examples() -> None:
    x = torch.randn(3, 9, 128, generator=torch.Generator().manual_seed(0))
    assert mixing_layer(build("cnn-lstm", (9, 128), 6, 0), x) == ""


DP_SGD: dict[str, Any] = {
    "training": {"local": "dp-sgd", "batch_clip": None},
    "privacy": {"unit": "record", "noise_multiplier": 1.0, "delta": 1e-4, "view": "server"},
}


def test_such_a_network_is_refused_before_anything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch normalisation without parameters escapes the gradients by hand: the clip of one example would move all others."""

    def with_batch_norm(*_: Any) -> FlatModel:
        return FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 10)))

    configuration = config({"name": "fedavg"}, "server", **DP_SGD)
    assert prepared(configuration).test[0].shape[1:] == (1, 8, 8)
    with monkeypatch.context() as patch:
        patch.setattr(rehearsal, "build_model", with_batch_norm)
        with pytest.raises(ConfigError, match=r"the layer 2 \(BatchNorm1d\) mixes the examples of a batch"):
            rehearsed(configuration)
        rehearsed(config({"name": "fedavg"}))  # nothing rests on it there
    rehearsed(configuration)


def test_an_example_alone_is_what_a_network_of_ones_own_is_handed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what it would do in large batches, or once its weights have gone far, need not be looked for."""
    handed: list[tuple[int, ...]] = []

    def mix(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0) if len(x) > 16 else x

    def mix_and_tell(x: torch.Tensor) -> torch.Tensor:
        handed.append(tuple(x.shape))
        return mix(x)

    def in_large_batches(*_: Any) -> FlatModel:
        return FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 3), Mixes(mix), nn.Linear(2, 10)))

    monkeypatch.setattr(assembly, "build_model", in_large_batches)
    made = job(config({"name": "fedavg"}, "server", **DP_SGD), tmp_path / "run")
    source, context = PerExampleGradient(made.setting.dp_sgd(), Randomness(0, True), (0, 0)), made.context
    local = Local(context.model, context.model.vector.clone(), LocalSpec(), source, torch.Generator())
    context.model.module[2].mix = mix_and_tell
    for empty in source.batches(local, *context.clients.examples(0)):
        source(local, *empty)
    assert len(source.losses) == source.steps
    assert set(handed) == {(1, 4)}


def test_resnets_with_batch_normalisation_are_refused_by_name() -> None:
    configuration = config({"name": "fedavg"}, "server", **DP_SGD)
    resnet = configure(model={"name": "resnet18", "norm": "batch"}).model
    configuration = configuration.model_copy(update={"model": resnet})
    with pytest.raises(ConfigError, match=r"BatchNorm2d\) mixes the examples of a batch"):
        rehearsed(configuration)
