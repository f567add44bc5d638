"""Networks of the user's own on every engine: shared layers, hooks, scripts, options that change gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedveil as fv
from fedveil.executors.stacked_models import _STACKED, _STACKED_IF, by_example, gradients, one_by_one_because, padded, vectorised
from fedveil.models.lora import LoraLinear
from fedveil.models.modules import GlobalMean, MaxPool2x2, ResidualBlock, TokenMixer
from fedveil.models.networks import Transformer
from fedveil.models.parts import LoraOptions
from fedveil.tasks.classification import Classification
from fedveil.training.params import called_with, copied
from method_kit import model_of, spec_of

Make = Callable[[], nn.Module]
CLIENTS, LABELS = 3, torch.arange(24) % 4


def seeded(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return make()


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def examples(module: nn.Module) -> Tensor:
    tokens = any(isinstance(part, nn.Embedding) for part in module.modules())
    return torch.randint(0, 9, (24, 5)) if tokens else torch.randn(24, 5)


def trained(module: nn.Module, x: Tensor, folder: Path, engine: str, method: Any, **sections: Any) -> Tensor:
    facts: dict[str, Any] = {} if x.is_floating_point() else {"vocabulary": 9}
    client = np.arange(24) % CLIENTS
    data = fv.from_arrays(x.numpy(), LABELS.numpy(), client=client, test=(x[:8].numpy(), LABELS[:8].numpy()), classes=4, **facts)
    config = fv.configure(model=module, method=method, run={"engine": engine, "seed": 1}, **sections)
    vector: Tensor = fv.train(config, folder / engine, data=data).model.vector
    return vector


CLIENT_LEVEL: dict[str, Any] = {
    "training": {"rounds": 1, "local_steps": 2, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.5}},
    "privacy": {"noise_multiplier": 1e-12, "delta": 1e-3},
}


def moved_at_client_level(module: nn.Module, x: Tensor) -> Tensor:
    """How two steps of each client on all of its examples move the mean of their models, by torch alone."""
    start, ends = [p.detach().clone() for p in module.parameters()], []
    for client in range(CLIENTS):
        with torch.no_grad():
            for p, value in zip(module.parameters(), start, strict=True):
                p.copy_(value)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(module(x[client::CLIENTS]), LABELS[client::CLIENTS]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        ends.append(flat(module))
    return torch.stack(ends).mean(0) - torch.cat([value.flatten() for value in start])


def moved_at_record_level(module: nn.Module, x: Tensor, clip: float) -> Tensor:
    """How one step on all examples at rate 1 moves the model, each gradient clipped by itself."""
    parameters, rows = list(module.parameters()), []
    for i in range(len(x)):
        found = torch.autograd.grad(F.cross_entropy(module(x[i : i + 1]), LABELS[i : i + 1]), parameters)
        rows.append(torch.cat([gradient.to_dense().flatten() for gradient in found]))
    each = torch.stack(rows)
    return -(each * (clip / each.norm(dim=1, keepdim=True)).clamp(max=1)).mean(0)


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


ENGINES = ["inline", pytest.param("pool", marks=pytest.mark.heavy), "stacked", "batched"]


# --- one layer under two names, one parameter in two places ----------------------------------------------------------


class Twice(nn.Module):
    """One layer with two names, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(5, 5)
        self.out = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.b(torch.tanh(self.a(x))))
        return logits


class Repeated(nn.Module):
    """One block three times in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh())] * 3), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(x)
        return logits


class OneTable(nn.Module):
    """One table for encoder and decoder, tied to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = self.decoder = nn.Embedding(9, 5)
        self.scores, self.out = nn.Linear(5, 9, bias=False), nn.Linear(9, 4)
        self.scores.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.tanh(self.scores(self.encoder(x).mean(1) + self.decoder(x).amax(1))))
        return logits


class Listed(nn.Module):
    """Parameters that are used by way of a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = nn.Parameter(0.3 * torch.randn(5, 5)), nn.Parameter(0.3 * torch.randn(5, 4))
        self.all, self.by_name = [self.v, self.w], {"v": (self.v,)}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.all[0] @ self.by_name["v"][0]) @ self.all[1]


def in_a_row() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(5, 4))


SHARED: list[Make] = [Twice, Repeated, OneTable, Listed, in_a_row]


@pytest.mark.few(3)
@pytest.mark.parametrize("engine", ["inline", "batched"])
@pytest.mark.parametrize("make", SHARED)
def test_what_is_shared_has_the_right_gradients_at_record_level(make: Make, engine: str, tmp_path: Path) -> None:
    module = seeded(make)
    x = examples(module)
    training = {"rounds": 1, "local": "dp-sgd", "local_steps": 1, "batch_size": 8, "example_clip": 0.05}
    sections: dict[str, Any] = {
        "training": training | {"optimizer": {"name": "sgd", "lr": 1.0}},
        "privacy": {"noise_multiplier": 1e-9, "delta": 1e-3, "unit": "record"},
    }
    found = trained(module, x, tmp_path, engine, "fedavg", **sections) - flat(module)
    assert apart(found, moved_at_record_level(module, x, 0.05)) < 1e-4


@pytest.mark.few(3)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", SHARED)
def test_what_is_shared_has_the_right_gradients_at_client_level(make: Make, engine: str, tmp_path: Path) -> None:
    module = seeded(make)
    x = examples(module)
    found = trained(module, x, tmp_path, engine, fv.DPFedAvg(clip=1e3), **CLIENT_LEVEL) - flat(module)
    assert apart(found, moved_at_client_level(module, x)) < 1e-4


@pytest.mark.parametrize("make", SHARED)
def test_a_module_has_its_own_parameters_again(make: Make) -> None:
    module = seeded(make)
    before, x = dict(module.named_parameters(remove_duplicate=False)), examples(module)
    lists = [value for part in module.modules() for value in vars(part).values() if isinstance(value, list)]
    zeros = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    assert not called_with(module, zeros, x).any()
    with pytest.raises(ZeroDivisionError):
        called_with(nn.Sequential(module, Failing()), {f"0.{name}": zero for name, zero in zeros.items()}, x)
    after = dict(module.named_parameters(remove_duplicate=False))
    assert all(after[name] is p for name, p in before.items())
    now = [value for part in module.modules() for value in vars(part).values() if isinstance(value, list)]
    assert all(one is other for one, other in zip(lists, now, strict=True))


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


# --- gradients that somebody changes -----------------------------------------------------------------------------------


class Reversing(nn.Module):
    """Turns the gradient of its first layer round, as domain adaptation does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda slope: -0.5 * slope)
        logits: Tensor = self.out(torch.tanh(hidden))
        return logits


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))


def hooked(hang: Callable[[nn.Sequential], object]) -> Make:
    def make() -> nn.Module:
        module = plain()
        hang(module)
        return module

    return make


def halve_in_place(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(-0.5)


def frozen_row(module: nn.Sequential) -> None:
    layer = module[1]
    assert isinstance(layer, nn.Linear)
    layer.weight.register_hook(partial(torch.mul, torch.tensor([[0.0]] + [[1.0]] * 5)))


def replaced_forward(module: nn.Sequential) -> None:
    module[2].forward = lambda x: torch.tanh(3 * x)  # type: ignore[assignment]


CHANGED: dict[str, Make] = {
    "tensor hook": Reversing,
    "parameter hook": hooked(frozen_row),
    "hook after adding up": hooked(lambda m: m[1].weight.register_post_accumulate_grad_hook(halve_in_place)),  # type: ignore[union-attr,operator]
    "backward hook": hooked(lambda m: m[2].register_full_backward_hook(lambda _, into, out: (-0.5 * into[0],))),
    "backward hook before": hooked(lambda m: m[2].register_full_backward_pre_hook(lambda _, out: (-0.5 * out[0],))),
    "forward hook": hooked(lambda m: m[2].register_forward_hook(lambda _, into, out: 2 * out - out.detach())),
    "forward": hooked(replaced_forward),
    "script": lambda: nn.Sequential(torch.jit.script(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 4)),
    "trace": lambda: nn.Sequential(torch.jit.trace(nn.Linear(5, 6), torch.zeros(2, 5)), nn.Tanh(), nn.Linear(6, 4)),
    "parametrization": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 4)),
    "padding row": lambda: nn.Sequential(nn.Embedding(9, 3, padding_idx=0), nn.Flatten(), nn.Linear(15, 4)),
    "by frequency": lambda: nn.Sequential(nn.Embedding(9, 3, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(15, 4)),
    "largest norm": lambda: nn.Sequential(nn.Embedding(9, 3, max_norm=0.7), nn.Flatten(), nn.Linear(15, 4)),
    "examples together": lambda: nn.Sequential(nn.Linear(5, 6), nn.Softmax(0), nn.Linear(6, 4)),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", CHANGED)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_changes_gradients_does_so_on_every_engine(
    kind: str, engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = seeded(CHANGED[kind])
    x = examples(module)
    found = trained(module, x, tmp_path, engine, fv.DPFedAvg(clip=1e3), **CLIENT_LEVEL) - flat(module)
    assert apart(found, moved_at_client_level(module, x)) < 1e-4
    assert sum("one at a time, because the network" in r.message for r in caplog.records) == (engine == "batched")


def test_dropout_is_that_of_inline(tmp_path: Path) -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 4)))
    x = examples(module)
    ends = [trained(module, x, tmp_path, engine, fv.DPFedAvg(clip=1e3), **CLIENT_LEVEL) for engine in ("inline", "batched")]
    assert apart(ends[1] - flat(module), ends[0] - flat(module)) < 1e-6


def test_a_copy_has_the_hooks_of_its_parameters() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mask = nn.Linear(2, 2, bias=False), torch.ones(2, 2)
            self.layer.weight.register_hook(self.masked)

        def masked(self, gradient: Tensor) -> Tensor:
            return gradient * self.mask

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out

    one = Masked()
    other = copied(one)
    assert isinstance(other, Masked)
    other.mask = torch.zeros(2, 2)  # the method that hangs there is the copy's
    for module, wanted in ((one, True), (other, False)):
        module(torch.ones(1, 2)).sum().backward()
        assert module.layer.weight.grad is not None
        assert bool(module.layer.weight.grad.any()) == wanted


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_copied_script_trains_itself_and_not_the_original() -> None:
    one = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    model = model_of(copied(one))
    model.module(torch.ones(1, 2)).sum().backward()
    assert bool(model.grad.any())
    assert all(p.grad is None for p in one.parameters())


# --- layers that are stacked -------------------------------------------------------------------------------------------

LAYERS: list[tuple[tuple[int, ...], nn.Module]] = [
    *(((6,), kind()) for kind in (nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU)),
    *(((6,), kind()) for kind in (nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.LogSigmoid)),
    *(((6,), kind()) for kind in (nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid)),
    ((6,), nn.ReLU(inplace=True)),
    ((6,), nn.Linear(6, 5, bias=False)),
    ((6,), nn.LayerNorm(6)),
    ((6,), nn.RMSNorm(6)),
    ((6,), nn.Dropout(0.0)),
    ((6,), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).requires_grad_(False)),
    ((6,), nn.Unflatten(1, (2, 3))),
    ((6,), nn.BatchNorm1d(6).requires_grad_(False)),
    ((6,), LoraLinear(nn.Linear(6, 5).requires_grad_(False), LoraOptions(targets=("*",), rank=2), torch.Generator())),
    ((6,), ResidualBlock(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential())),
    ((4, 8), nn.Conv1d(4, 6, 3, padding="same", groups=2)),
    ((4, 8), nn.MaxPool1d(2)),
    ((4, 8), nn.AvgPool1d(2)),
    ((4, 8), nn.AdaptiveAvgPool1d(3)),
    ((4, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)),
    ((4, 8, 8), nn.Conv2d(4, 4, 3, 2, 1, padding_mode="reflect")),
    ((4, 8, 8), nn.MaxPool2d(3, 2, 1)),
    ((4, 8, 8), nn.AvgPool2d(2)),
    ((4, 8, 8), nn.AdaptiveAvgPool2d((3, 5))),
    ((4, 8, 8), nn.GroupNorm(2, 4)),
    ((4, 8, 8), nn.BatchNorm2d(4).requires_grad_(False)),
    ((4, 8, 8), MaxPool2x2()),
    ((4, 8, 8), GlobalMean()),
    ((4, 4, 4), TokenMixer(4, 16, Transformer("t", 1, 2, 8))),
    ((4, 4, 4, 4), nn.Conv3d(4, 3, 3)),
    ((4, 4, 4, 4), nn.MaxPool3d(2)),
    ((4, 4, 4, 4), nn.AvgPool3d(2)),
    ((4, 4, 4, 4), nn.AdaptiveAvgPool3d(2)),
    ((4, 4, 4, 4), nn.BatchNorm3d(4).requires_grad_(False)),
]


class FirstSeen(nn.Module):
    """Lets the layer behind it be handed something that has a gradient."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def stacked_and_alone(module: nn.Module, xs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The gradients of three models whose batches differ in length, in one pass and by themselves."""
    ys = [torch.arange(len(x)) % 3 for x in xs]
    model = model_of(module)
    vectors = model.vector + 0.1 * torch.randn(len(xs), model.layout.dimension)
    learned = vectorised(module), model.layout, by_example(Classification())
    _, together = gradients(learned, spec_of(), vectors, *padded(xs, ys))
    alone = []
    for vector, x, y in zip(vectors, xs, ys, strict=True):
        model.load(vector)
        model.grad.zero_()
        F.cross_entropy(module(x.clone()), y).backward()  # type: ignore[no-untyped-call]
        alone.append(model.grad.clone())
    return together, torch.stack(alone)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("shape", "layer"), [pytest.param(*pair, id=type(pair[1]).__name__) for pair in LAYERS])
def test_layers_in_a_stack_have_the_gradients_of_each_alone(shape: tuple[int, ...], layer: nn.Module) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(FirstSeen(shape), layer, nn.Flatten())
    width = network(torch.randn(2, *shape)).shape[1]
    network.append(nn.Linear(width, 3))
    one, other = stacked_and_alone(network, [torch.randn(n, *shape) for n in (4, 1, 3)])
    assert apart(one, other) < 1e-5
    assert not one_by_one_because(model_of(nn.Sequential(layer, nn.Flatten(), nn.Linear(width, 3))), Classification())


def test_a_table_in_a_stack_has_the_gradients_of_each_alone() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))
    one, other = stacked_and_alone(network, [torch.randint(0, 9, (n, 5)) for n in (4, 1, 3)])
    assert apart(one, other) < 1e-5


def test_every_layer_that_is_stacked_was_compared() -> None:
    compared = {type(part) for _, layer in LAYERS for part in layer.modules()} | {nn.Sequential, nn.Flatten, nn.Embedding}
    assert compared == _STACKED | _STACKED_IF.keys()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Flatten(0, 1),
        nn.Unflatten(0, (1, -1)),
        nn.Dropout(0.1),
        nn.BatchNorm1d(4),
        nn.LSTM(4, 4),
        nn.Embedding(9, 4, sparse=True),
        nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0),
        nn.TransformerEncoderLayer(4, 2, 4, batch_first=True),
        nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True, activation=lambda x: x.sin()),
    ],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_options_by_which_gradients_may_differ_are_not_stacked(layer: nn.Module) -> None:
    assert one_by_one_because(model_of(nn.Sequential(layer, nn.Linear(4, 3))), Classification())


def test_hooks_of_all_modules_are_seen() -> None:
    model = model_of(plain())
    assert not one_by_one_because(model, Classification())
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        assert "hooks" in one_by_one_because(model, Classification())
    finally:
        handle.remove()
