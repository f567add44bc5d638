"""Modules that cannot be trained here are refused with what to do."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.data.load import load
from fedveil.errors import ConfigError
from fedveil.experiment.config import configure
from fedveil.models.parts import Parts
from fedveil.models.trainable import check_module, choose_parts, own_copy


class Subclass(torch.Tensor):
    """A tensor with code of its own."""


class Holding(nn.Module):
    """Holds one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        if isinstance(tensor, nn.Parameter):
            self.held = tensor
        else:
            self.register_buffer("held", tensor)


def shared_memory() -> nn.Module:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module[1].weight = nn.Parameter(module[0].weight.data)
    return module


def inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(2, 2))


REFUSED = {
    "half": (lambda: nn.Linear(2, 2).half(), "weight is float16: parameters must be float32"),
    "double": (lambda: nn.Linear(2, 2).double(), "weight is float64"),
    "complex": (lambda: Holding(nn.Parameter(torch.zeros(2, dtype=torch.complex64))), "held is complex64"),
    "lazy": (lambda: nn.LazyLinear(3), "weight has no shape yet .a lazy module.: pass one batch"),
    "lazy buffer": (lambda: nn.LazyBatchNorm1d(), "has no shape yet"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "is on meta: move the module to the CPU"),
    "empty": (lambda: nn.Sequential(nn.ReLU()), "no parameters: nothing to train"),
    "subclass": (lambda: Holding(torch.zeros(2).as_subclass(Subclass)), "held is a Subclass"),
    "sparse": (lambda: Holding(torch.zeros(2, 2).to_sparse()), "held is torch.sparse_coo"),
    "parallel": (lambda: nn.DataParallel(nn.Linear(2, 2)), "DataParallel wraps another module: hand over its `.module`"),
    "compiled": (lambda: torch.compile(nn.Linear(2, 2), backend="eager"), "OptimizedModule wraps .* `._orig_mod`"),
    "one memory": (shared_memory, "0.weight and 1.weight share memory without being one Parameter"),
    "inference": (inference, "made under torch.inference_mode"),
    "counts": (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)), "momentum=None"),
    "not copied": (old_weight_norm, "cannot be copied .*parametrizations replaces the older weight_norm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        own_copy(make())


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(2, 3, 2),
        nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2, 8),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        Holding(torch.arange(3)),
        Holding(torch.ones(2, dtype=torch.complex64)),
    ],
)
def test_accepted(module: nn.Module) -> None:
    check_module(own_copy(module))


def test_nothing_trained_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no parameter of Linear requires a gradient, so nothing would be trained"):
        choose_parts(nn.Linear(2, 2).requires_grad_(False), Parts(), 0)


def test_the_error_is_there_when_the_run_is_described() -> None:
    config = configure(model=nn.Sequential(nn.Flatten(), nn.LazyLinear(10)))
    with pytest.raises(ConfigError, match=r"model: Sequential: 1\.weight has no shape yet"):
        fv.train(config, data=load("digits"))


def test_a_fixed_copy_has_groups_in_the_place_of_batches_and_the_module_stays() -> None:
    shared = nn.BatchNorm2d(48)
    net = nn.Sequential(nn.Conv2d(3, 48, 1), shared, nn.Sequential(nn.ReLU(), shared), nn.BatchNorm1d(3, affine=False))
    with torch.no_grad():
        shared.weight.fill_(2.0)
    made = fv.fix(net)
    assert not any(isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d) for part in made.modules())
    assert made[1] is made[2][1]
    assert (made[1].num_groups, made[3].num_groups, made[3].affine) == (12, 1, False)
    assert made[1].weight[0].item() == 2.0
    assert net[1] is shared
    assert isinstance(fv.fix(nn.BatchNorm1d(8)), nn.GroupNorm)
