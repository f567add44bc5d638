"""Gradients of single examples: by hand, by torch.func, and one backward pass for each example."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedveil.models.model_registry import build
from fedveil.release import per_example
from fedveil.release.per_example import Block, norms, per_example_gradients, rows, transformed, weighted_sum
from fedveil.tasks.classification import Classification


def examples(*shape: int, n: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(n, *shape, generator=g), torch.randint(0, 4, (n,), generator=g)


def one_by_one(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    losses = [F.cross_entropy(module(x[i : i + 1]), y[i : i + 1]) for i in range(len(y))]
    gradients = [torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True) for loss in losses]
    return torch.stack([torch.cat([p.flatten() for p in g]) for g in gradients]), torch.stack(losses).detach()


class Twice(nn.Module):
    """Uses one layer two times, and declares its layers in another order than it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(6, 4), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(torch.relu(self.first(x))))
        return out


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(6, 4)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(self.b(self.a(x)).relu())
        return out


class Idle(nn.Module):
    """Its second layer's output goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(x) + 0 * self.b(x).detach()
        return out


class Scaled(nn.Linear):
    """A linear layer that is not quite one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


class Rows(nn.Module):
    """A linear layer on each row of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x).relu().sum(1)
        return out


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: build("linear", (1, 8, 8), 4, 1), (1, 8, 8)),
    "mlp": (lambda: build("mlp", (1, 8, 8), 4, 1), (1, 8, 8)),
    "lenet5": (lambda: build("lenet5", (1, 28, 28), 4, 1), (1, 28, 28)),
    "strides": (lambda: build("lenet-dlg", (3, 16, 16), 4, 1), (3, 16, 16)),
    "uneven": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 0), bias=False), nn.Flatten(), nn.LazyLinear(4)),
        (2, 7, 6),
    ),
    "same": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding="same"), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)), (2, 5, 5)),
    "dilated": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, dilation=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)), (2, 7, 7)),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)), (2, 5, 5)),
    "circular": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.LazyLinear(4)),
        (2, 5, 5),
    ),
    "rows": (Rows, (5, 6)),
    "twice": (Twice, (6,)),
    "tied": (Tied, (6,)),
    "not quite linear": (lambda: nn.Sequential(Scaled(6, 4)), (6,)),
    "in place": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 4)), (6,)),
    "one layer idle": (Idle, (6,)),
    "resnet18": (lambda: build("resnet18", (3, 16, 16), 4, 1), (3, 16, 16)),
}
BY_HAND = {"linear", "mlp", "lenet5", "strides", "uneven", "rows", "one layer idle"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.heavy) if n == "resnet18" else n for n in NETWORKS])
def test_gradients_equal_one_backward_pass_for_each_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    module, (x, y) = make(), examples(*shape)
    module(x)  # makes lazy layers
    used: list[str] = []
    monkeypatch.setattr(per_example, "transformed", lambda *arguments: used.append(name) or transformed(*arguments))
    blocks, losses = per_example_gradients(module, x, y, Classification().losses)
    assert bool(used) == (name not in BY_HAND)
    flat, exact = one_by_one(module, x, y)
    torch.testing.assert_close(rows(blocks), flat, rtol=2e-3, atol=2e-5)
    torch.testing.assert_close(losses, exact, rtol=1e-5, atol=1e-6)


def test_gradients_leave_the_network_as_it_was() -> None:
    module, (x, y) = build("lenet5", (1, 28, 28), 4, 1), examples(1, 28, 28)
    before = [p.clone() for p in module.parameters()]
    per_example_gradients(module, x, y, Classification().losses)
    assert all(p.requires_grad and p.grad is None and p.equal(b) for p, b in zip(module.parameters(), before, strict=True))
    assert not any(layer._forward_hooks for layer in module.modules())
    assert not x.requires_grad


def some_blocks(seed: int, n: int) -> list[Block]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 10.0 ** torch.randint(-4, 4, (n, 1), generator=g)

    return [(draw(n, 5), draw(n, 7)), draw(n, 5), draw(n, 12)]


@given(st.integers(0, 2**31), st.integers(1, 5))
def test_norms_and_sums_of_blocks_are_those_of_the_flat_gradients(seed: int, n: int) -> None:
    blocks, weights = some_blocks(seed, n), torch.rand(n, generator=torch.Generator().manual_seed(seed)).double()
    flat = rows(blocks)
    assert flat.shape == (n, 5 * 7 + 5 + 12)
    assert norms(blocks).dtype == weighted_sum(blocks, weights).dtype == torch.float64
    exact, scale = flat.double(), float(flat.abs().max())
    # an outer product is multiplied in float64 here and was rounded to float32 in `rows`
    torch.testing.assert_close(norms(blocks), exact.norm(dim=1), rtol=1e-7, atol=0)
    torch.testing.assert_close(weighted_sum(blocks, weights), weights @ exact, rtol=1e-6, atol=1e-6 * scale)


def test_an_outer_product_is_laid_out_as_the_weight_of_a_linear_layer() -> None:
    left, right = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]])
    assert rows([(left, right)]).tolist() == [[3, 4, 5, 6, 8, 10]]
    assert weighted_sum([(left, right)], torch.tensor([2.0])).tolist() == [6, 8, 10, 12, 16, 20]
    assert norms([(left, right)]).item() == pytest.approx((5 * 50) ** 0.5)
