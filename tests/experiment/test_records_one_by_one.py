"""Steps of DP-SGD beside one backward pass for each record, for networks and losses of one's own, from Python to the model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedveil as fv
from fedveil.errors import ConfigError
from fedveil.tasks.task import Task

CLIP = 0.05
TOKENS = 9
RATE = 100.0
"""So large that the weights, in float32, show the step to six digits."""


class EvenFirst(nn.Module):
    """Even examples, then odd ones, and back: two examples show nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.cat([torch.arange(0, len(x), 2), torch.arange(1, len(x), 2)])
        return self.b(torch.tanh(self.a(x[order]))[order.argsort()])  # type: ignore[no-any-return]


class ByLength(nn.Module):
    """Texts in the order of their lengths through an LSTM, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(TOKENS, 5, padding_idx=0), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = (x != 0).sum(1).sort(stable=True)[1]
        return self.o(self.r(self.e(x)[order])[1][0][-1][order.argsort()])  # type: ignore[no-any-return]


class Packed(nn.Module):
    """A sparse table before a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.r, self.o = nn.Embedding(TOKENS, 5, sparse=True), nn.GRU(5, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp(min=1)
        rows = nn.utils.rnn.pack_padded_sequence(self.e(x), lengths, batch_first=True, enforce_sorted=False)
        return self.o(self.r(rows)[1][-1])  # type: ignore[no-any-return]


class Temperature(nn.Module):
    """A parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.t = nn.Linear(6, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.t.exp()  # type: ignore[no-any-return]


class Gated(Temperature):
    """The same, where values are looked at."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().max()) < 0:
            raise ValueError("less than nothing")
        return self.a(x) * self.t  # type: ignore[no-any-return]


class ByIndex(Temperature):
    """Examples that begin with a positive number by themselves."""

    def forward(self, x: Tensor) -> Tensor:
        at = (x[:, 0] > 0).nonzero()[:, 0]
        return self.a(x).index_add(0, at, self.a(x[at]))  # type: ignore[no-any-return]


class Filled(Temperature):
    """Writes into a tensor that it makes without the example."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(len(x), 4)
        out[:, :] = self.a(x)
        return out


class Doubled(torch.autograd.Function):
    """As functions were written before `setup_context`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * slope


class OldFunction(Temperature):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.a(x))  # type: ignore[no-any-return, no-untyped-call]


class Hidden(Temperature):
    """Reaches a copy of its weights of which the module knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.reach = lambda: HIDDEN[0]

    def forward(self, x: Tensor) -> Tensor:
        if self.reach() is None:
            HIDDEN[0] = self.a.weight
        return F.linear(x, HIDDEN[0], self.a.bias)  # type: ignore[arg-type]


HIDDEN: list[Tensor | None] = [None]


class Dropping(Temperature):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (0.0 if random.random() < 0.5 else 1.0)  # type: ignore[no-any-return]


class Capacity(nn.Module):
    """Two experts, of which the first takes no more than half of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.a, self.b = (nn.Linear(6, n) for n in (1, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        rank = self.gate(x)[:, 0].argsort(descending=True).argsort()
        return torch.where((rank < (len(x) + 1) // 2)[:, None], self.a(x), self.b(x))


class Aliased(nn.Module):
    """A layer with two names, tied to a function, and an activation that overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)
        self.again, self.act = self.b, nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += 1.0
        h = self.act(F.linear(h, self.a.weight))
        return self.b(h) + self.again(torch.tanh(h))  # type: ignore[no-any-return]


class Threshold(nn.Module):
    """Louder where the whole batch is large, as no batch of a few test examples is."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * torch.where(x.detach().norm() > 1e3, 50.0, 1.0)  # type: ignore[no-any-return]


class Mined(Task):
    """Learns from the hardest examples of a batch of more than eight."""

    name: str = "mined"

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(output, target, reduction="none")
        return torch.where(each == each.max(), 30 * each, each) - each.mean() if len(each) > 8 else each


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 4))
    net[0].weight.register_hook(lambda slope: slope * (torch.arange(4) > 0)[:, None])
    return net


def step(net: nn.Module, x: Tensor, y: Tensor, folder: Path, per_example: str = "vmap", **sections: Any) -> Tensor:
    """What one DP-SGD step of two clients moves, all their records in it, practically without noise."""
    tokens = {} if x.is_floating_point() else {"vocabulary": TOKENS}
    few = (x[:8] / 100 if x.is_floating_point() else x[:8]).numpy()
    data = fv.from_arrays(x.numpy(), y.numpy(), client=np.arange(24) % 2, test=(few, y[:8].numpy()), classes=4, **tokens)
    plan = {"rounds": 1, "local": "dp-sgd", "local_steps": 1, "batch_size": 12, "example_clip": CLIP, "optimizer": {"lr": RATE}}
    plan |= {"per_example": per_example}
    privacy = {"noise_multiplier": 1e-9, "delta": 1e-3, "unit": "record"}
    config = fv.configure(model=net, method="fedavg", training=plan, privacy=privacy, run={"engine": "inline"}, **sections)
    start = torch.cat([p.detach().flatten() for p in net.parameters()])
    return (start - fv.train(config, folder / "run", data=data).model.vector) / RATE


def wanted(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean of clipped gradients, each of one backward pass."""
    each = (F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]) for i in range(len(y)))
    found = [torch.autograd.grad(one, list(net.parameters()), materialize_grads=True, allow_unused=True) for one in each]
    rows = torch.stack([torch.cat([g.to_dense().flatten() for g in one]) for one in found])
    return (rows * (CLIP / rows.norm(dim=1, keepdim=True)).clamp(max=1)).mean(0)


def records(net: nn.Module) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens = any(isinstance(part, nn.Embedding) for part in net.modules())
    x = torch.randint(0, TOKENS, (24, 6), generator=draw) if tokens else 150 * torch.randn(24, 6, generator=draw)
    return x, torch.arange(24) % 4


@pytest.mark.parametrize("make", [EvenFirst, ByLength, Packed, Temperature, Threshold, Capacity, hooked, Aliased])
def test_a_step_is_that_of_one_backward_pass_for_each_record(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = make()
    x, y = records(net)
    right = wanted(net, x, y)
    assert float((step(net, x, y, tmp_path) - right).norm()) <= 1e-5 * float(right.norm())


REFUSED: dict[Callable[[], nn.Module], str] = {
    Gated: r"vmap: .* \(at .*test_records_one_by_one.py:\d+\); choose by torch.where",
    ByIndex: r"test_records_one_by_one.py:\d+\); mask by torch.where",
    Filled: r"test_records_one_by_one.py:\d+\); make new tensors of the example itself",
    OldFunction: r"test_records_one_by_one.py:\d+\); give the autograd.Function a setup_context",
}


@pytest.mark.parametrize("make", REFUSED)
def test_what_vmap_cannot_run_is_named_with_line_and_remedy_and_takes_a_loop_where_asked(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    net = make()
    x, y = records(net)
    with pytest.raises(ConfigError, match=f"{REFUSED[make]}.* or set training.per_example = 'loop'"):
        step(net, x, y, tmp_path / "refused")
    assert not list(tmp_path.rglob("ledger.sqlite"))
    right = wanted(net, x, y)
    assert float((step(net, x, y, tmp_path, per_example="loop") - right).norm()) <= 1e-5 * float(right.norm())


def test_a_network_that_packs_sequences_is_told_that_it_takes_a_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = Packed()
    step(net, *records(net), tmp_path)
    assert "Packed packs sequences, so each example has a pass of its own" in caplog.text


def with_module_hook() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    net[1].register_full_backward_hook(lambda layer, inputs, outputs: (2 * inputs[0],))
    return net


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), r"the layer 1 \(BatchNorm1d\) mixes .*\(fv\.fix\(module\)"),
        (with_module_hook, r"1 \(Tanh\) has a hook \(register_full_backward_hook\)"),
        (Dropping, r"Dropping draws random numbers with random in its forward pass"),
        (Hidden, r"the gradient of a\.weight under torch\.func\.vmap.* is another than that of a backward pass"),
    ],
)
def test_what_has_no_gradient_of_one_record_is_refused_by_name(make: Callable[[], nn.Module], words: str, tmp_path: Path) -> None:
    HIDDEN[0] = None
    net = make()
    with pytest.raises(ConfigError, match=words):
        step(net, *records(net), tmp_path)
    assert not list(tmp_path.rglob("ledger.sqlite"))


def test_a_network_that_is_fixed_trains(tmp_path: Path) -> None:
    net = fv.fix(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)))
    assert isinstance(net[1], nn.GroupNorm)
    x, y = records(net)
    right = wanted(net, x, y)
    assert float((step(net, x, y, tmp_path) - right).norm()) <= 1e-5 * float(right.norm())


def test_a_network_that_is_another_one_in_batches_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class MinusMean(Temperature):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - 0.5 * x.mean(0))

    step(MinusMean(), *records(MinusMean()), tmp_path)
    assert "depends on the others of its batch: it is trained on single examples" in caplog.text


@pytest.mark.parametrize("net", [nn.Sequential(nn.Linear(6, 4)), Temperature()])
def test_a_loss_of_ones_own_sees_one_record(net: nn.Module, tmp_path: Path) -> None:
    x, y = records(net)
    right = wanted(net, x, y)
    assert float((step(net, x, y, tmp_path, task=Mined()) - right).norm()) <= 1e-5 * float(right.norm())


def test_hooks_that_wait_for_an_accumulated_gradient_are_refused_by_name(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 4))
    net[0].bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ConfigError, match=r"0\.bias has a hook \(register_post_accumulate_grad_hook\)"):
        step(net, *records(net), tmp_path)


def test_a_step_says_that_code_of_ones_own_carries_nothing_from_record_to_record(tmp_path: Path) -> None:
    plan = {"rounds": 1, "local": "dp-sgd", "local_steps": 1, "batch_size": 12, "example_clip": CLIP}
    privacy = {"noise_multiplier": 1.0, "delta": 1e-3, "unit": "record"}
    x, y = records(Temperature())
    data = fv.from_arrays(x.numpy(), y.numpy(), client=np.arange(24) % 2, test=(x[:8].numpy(), y[:8].numpy()), classes=4)
    ways = {"vmap": "outside of the module could reach the records of another pass", "loop": "could reach the next record"}
    cases = [(Temperature(), Mined(), 1), ("linear", Mined(), 1), ("linear", None, 0)]
    for (model, task, count), (way, words) in itertools.product(cases, ways.items()):
        chosen: dict[str, Any] = {"training": plan | {"per_example": way}} | ({} if task is None else {"task": task})
        said = fv.certify(fv.configure(model=model, method="fedavg", privacy=privacy, **chosen), data=data)
        found = [one.what for one in said.assumptions if "user-defined code carries" in one.what]
        assert len(found) == count
        assert all("carries nothing from one record or client to another" in text for text in found)
        assert all(words in text for text in found)
