"""Blocks of gradients, their norms and sums; what may be done by hand, and what is left as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedveil.gradients import per_example
from fedveil.gradients.gradient_blocks import Block, Dense, Products, clipped_sum, lookups, norms, products, rows, weighted_sum
from fedveil.gradients.per_example import Losses, one_by_one, per_example_gradients, vectorised
from fedveil.gradients.taps import NoRule, Taps
from fedveil.mechanism.plan import DpSgd
from fedveil.models.model_registry import build
from fedveil.release.dpsgd import PerExampleGradient
from fedveil.release.noise import Randomness
from fedveil.tasks.classification import Classification
from fedveil.tasks.task import Task
from fedveil.training.local import Local, LocalSpec
from fedveil.training.params import FlatModel

cross_entropy = Classification().losses


def examples(*shape: int, n: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(n, *shape, generator=g), torch.randint(0, 4, (n,), generator=g)


# --- networks of the registry --------------------------------------------------------------------------------------------


NETWORKS = {"linear": (1, 8, 8), "mlp": (1, 8, 8), "lenet5": (1, 28, 28), "resnet18": (3, 16, 16)}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "resnet18" else n for n in NETWORKS])
def test_built_in_networks_in_batches_and_one_example_at_a_time(name: str) -> None:
    module, (x, y) = build(name, NETWORKS[name], 4, 1).double(), examples(*NETWORKS[name])
    assert per_example.known(module)
    x, wanted = x.double(), stacked(module, cross_entropy, x.double(), y)
    for way in (per_example_gradients, vectorised, one_by_one):
        blocks, losses = way(module, x, y, cross_entropy)
        torch.testing.assert_close(rows(blocks), wanted, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(losses, cross_entropy(module(x), y), rtol=1e-12, atol=1e-12)


def test_gradients_leave_the_network_as_it_was() -> None:
    module, (x, y) = nn.Sequential(build("lenet5", (1, 28, 28), 4, 1), nn.ReLU(inplace=True)), examples(1, 28, 28)
    before, state = [p.clone() for p in module.parameters()], torch.get_rng_state()
    for _ in range(2):
        per_example_gradients(module, x, y, cross_entropy)
    assert all(p.requires_grad and p.grad is None and p.equal(b) for p, b in zip(module.parameters(), before, strict=True))
    assert not any("forward" in vars(layer) or layer._forward_hooks for layer in module.modules())
    assert module[1].inplace
    assert module.training
    assert torch.equal(state, torch.get_rng_state())
    assert not x.requires_grad


def test_nothing_is_computed_below_the_lowest_layer_that_trains() -> None:
    module, (x, y) = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), examples(6)
    module[0].requires_grad_(False)
    slopes: list[torch.Tensor] = []
    module[1].register_forward_hook(lambda _, inputs, output: slopes.append(output))
    assert rows(per_example_gradients(module, x, y, cross_entropy)[0]).shape == (3, 5 * 4 + 4)
    assert not any(output.requires_grad for output in slopes[-1:])


# --- single examples ------------------------------------------------------------------------------------------------------


class Decides(nn.Module):
    """Mixes the batch once a weight has gone far."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.first(x - x.mean(0) if self.out.bias.sum() < -1 else x)))


def test_a_network_that_decides_by_its_weights_may() -> None:
    module, (x, y) = Decides(), examples(6)
    for bias in (0.0, -1.0):
        with torch.no_grad():
            module.out.bias.fill_(bias)
        torch.testing.assert_close(*(rows(made(module, x, y, cross_entropy)[0]) for made in (per_example_gradients, one_by_one)))


class Itself(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Itself:
        return self


def test_a_layer_that_copies_itself_as_itself_has_its_gradients() -> None:
    module, (x, y) = nn.Sequential(Itself(6, 5), nn.Linear(5, 4)), examples(6)
    before = [p.clone() for p in module.parameters()]
    found = rows(per_example_gradients(module, x, y, cross_entropy)[0])
    torch.testing.assert_close(found, stacked(module, cross_entropy, x, y))
    assert all(map(torch.equal, before, module.parameters()))


class PlacesFirst(nn.Module):
    """Two tokens, of which the layer sees the first of all examples, then the second of all."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.tanh(self.layer(self.table(x.T).flatten(0, 1)))
        return self.head(seen.view(2, len(x), 5).mean(0))


def test_places_of_several_examples_in_turn() -> None:
    module, x, (_, y) = PlacesFirst(), torch.arange(16).view(8, 2) % 9, examples(n=8)
    torch.testing.assert_close(*(rows(made(module, x, y, cross_entropy)[0]) for made in (per_example_gradients, one_by_one)))


class AddsWhatStartsAtZero(nn.Module):
    """Hands the mean of the batch to a layer that makes nothing of it yet."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 4)
        nn.init.zeros_(self.b.weight)
        nn.init.zeros_(self.b.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        out: torch.Tensor = h + self.b(h.mean(0).expand_as(h))
        return out


class ScalesSlopes(nn.Module):
    """Mixes on the way back alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda slope: slope / slope.norm())
        out: torch.Tensor = self.b(h)
        return out


@pytest.mark.parametrize("kind", [AddsWhatStartsAtZero, ScalesSlopes])
def test_a_network_that_mixes_what_its_output_does_not_show_is_called_on_one_example(kind: type[nn.Module]) -> None:
    module, (x, y) = kind(), examples(6)
    with_others, alone = (rows(per_example_gradients(module, x[:n], y[:n], cross_entropy)[0])[0] for n in (3, 1))
    torch.testing.assert_close(with_others, alone)


class Hardest(Task):
    """Learns the examples of a batch whose loss is largest, with other numbers for each."""

    def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(output, target, reduction="none")
        return each * (each >= each.max() - 0.1) - each.mean() / 2


def stacked(module: nn.Module, losses: Losses, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One backward pass for each example [n, d]."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    each = (losses(module(x[i : i + 1]), y[i : i + 1]).sum() for i in range(len(y)))
    found = [torch.autograd.grad(one, parameters, materialize_grads=True, allow_unused=True) for one in each]
    return torch.stack([torch.cat([g.to_dense().flatten() for g in one]) for one in found])


def test_a_loss_of_ones_own_sees_one_example_even_where_the_network_is_done_by_hand() -> None:
    module, (x, y) = build("mlp", (1, 8, 8), 4, 1), examples(1, 8, 8, n=8)
    losses = Hardest(name="hardest").losses
    assert per_example.known(module)
    found, each = per_example_gradients(module, x, y, losses)
    torch.testing.assert_close(rows(found), stacked(module, losses, x, y), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(each, torch.cat([losses(module(x[i : i + 1]), y[i : i + 1]) for i in range(8)]))


def test_a_loss_that_draws_from_torch_draws_for_each_example() -> None:
    def noisy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, reduction="none") * torch.rand(len(outputs))

    module, (x, y) = nn.Linear(6, 4), examples(6)
    each = per_example_gradients(module, x[:1].expand(3, -1), y[:1].expand(3), noisy)[1]
    assert len(set(each.tolist())) == 3


class Sorted(nn.Module):
    """Puts the examples into the order of their sizes, and back; a GRU's tuple hides it from whoever looks at outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.r, self.b = nn.Linear(6, 5), nn.GRU(5, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x.sum(1).argsort()
        last: torch.Tensor = self.r(torch.tanh(self.a(x[order]))[:, None])[1][0]
        return self.b(last[order.argsort()])  # type: ignore[no-any-return]


class EvenFirst(nn.Module):
    """The same by place, so that two examples never show it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.cat([torch.arange(0, len(x), 2), torch.arange(1, len(x), 2)])
        return self.b(torch.tanh(self.a(x[order]))[order.argsort()])  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Takes no more than half of a batch each; those that are left over are passed on as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.a, self.b, self.out = (nn.Linear(6, n) for n in (2, 6, 6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score, room = self.gate(x)[:, 0], (len(x) + 1) // 2
        taken = (score.argsort(descending=True).argsort() < room)[:, None]
        return self.out(torch.where(taken, torch.tanh(self.a(x)), self.b(x)))  # type: ignore[no-any-return]


class Shouts(nn.Module):
    """Grows loud where the whole batch is large."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * torch.where(x.norm() > 6.0, 100.0, 1.0)  # type: ignore[no-any-return]


class Reorders(nn.Sequential):
    """What a class derived from one of torch's does to a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.arange(len(x)).roll(1)
        return super().forward(x[order])[order.argsort()]  # type: ignore[no-any-return]


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    module[0].register_forward_pre_hook(lambda layer, inputs: (inputs[0].roll(1, 0),))
    module[0].register_forward_hook(lambda layer, inputs, output: output.roll(-1, 0))
    return module


def with_a_forward() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    module[0].forward = lambda x: nn.functional.linear(x.roll(1, 0), module[0].weight, module[0].bias).roll(-1, 0)
    return module


def activated() -> nn.Module:
    def rolled(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.roll(1, 0)).roll(-1, 0)

    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, activation=rolled, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), layer, nn.Flatten(), nn.Linear(6, 4))


NOT_BY_ROW = [
    *(Sorted, EvenFirst, Experts, Shouts, hooked, with_a_forward, activated),
    lambda: Reorders(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)),
]


def attending(frozen: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True).requires_grad_(not frozen)
    return nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 4))


def around(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 5), *layers, nn.Tanh(), nn.Linear(5, 4))


ACROSS_ROWS = [
    *(lambda: attending(True), lambda: attending(False), around(nn.ZeroPad2d((0, 0, -1, 1))), around(nn.ConstantPad2d(0, 0.0))),
    *(around(nn.Softmax(0)), around(nn.LogSoftmax(-2)), around(nn.Flatten(0), nn.Unflatten(0, (-1, 5)))),
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("make", ACROSS_ROWS)
def test_layers_of_torch_that_reach_across_rows_are_called_on_one_example(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(2)
    module, (x, y) = make(), examples(6, n=9)
    assert not any(layer._forward_pre_hooks for layer in module.modules())
    with pytest.raises(NoRule):
        per_example.gradients(module, x, y, cross_entropy)
    assert not any(layer._forward_pre_hooks for layer in module.modules())
    found = rows(per_example_gradients(module, x, y, cross_entropy)[0])
    wanted = stacked(module, cross_entropy, x, y)
    assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())


@pytest.mark.parametrize("make", NOT_BY_ROW)
def test_what_code_of_ones_own_does_with_a_batch_moves_no_gradient(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(2)
    module, (x, y) = make(), examples(6, n=9)
    assert not per_example.known(module)
    found = rows(per_example_gradients(module, x, y, cross_entropy)[0])
    wanted = stacked(module, cross_entropy, x, y)
    assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())


@pytest.mark.parametrize("make", NOT_BY_ROW)
def test_a_gradient_is_the_same_to_the_bit_whoever_else_is_there(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(2)
    module, (x, y) = make(), examples(6, n=9)
    others = torch.cat([x[:1], 1e3 * x[1:].flip(0)])
    first, again = (rows(per_example_gradients(module, values, y, cross_entropy)[0])[0] for values in (x, others))
    assert torch.equal(first, again)


class Keeps(nn.Module):
    """Divides by a running scale of what it was handed before, kept where the module says."""

    scale: torch.Tensor

    def __init__(self, where: str) -> None:
        super().__init__()
        self.a, self.where, self.lately = nn.Linear(6, 4), where, [torch.ones(())]
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.lately[-1] if self.where == "list" else self.scale
        now = (before + x.detach().abs().mean()) / 2
        if self.where == "list":
            self.lately.append(now)
        else:
            self.scale = now
        return self.a(x / before)  # type: ignore[no-any-return]


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("where", ["list", "buffer"])
def test_what_code_writes_on_its_module_is_gone_after_the_pass(where: str, loop: bool) -> None:
    module, (x, y) = Keeps(where), examples(6, n=4)
    found = [rows(per_example_gradients(module, x, y, cross_entropy, loop=loop)[0]) for _ in range(2)]
    assert torch.equal(*found)
    assert len(module.lately) == 1
    assert float(module.scale) == 1.0


class Overwrites(nn.Module):
    """Writes into what a layer was handed, after the layer has computed with it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x)).clone()
        out: torch.Tensor = self.b(h)
        h.add_(1.0)
        return out


def test_an_input_that_is_overwritten_later_is_an_error_as_in_torch() -> None:
    module, (x, y) = Overwrites(), examples(6)
    with pytest.raises(RuntimeError, match="inplace operation"):
        stacked(module, cross_entropy, x, y)
    with pytest.raises(RuntimeError, match="input of a Linear is modified by an inplace operation"):
        per_example_gradients(module, x, y, cross_entropy)


def test_a_pass_leaves_nothing_that_only_a_collection_frees() -> None:
    module, (x, y) = Reorders(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), examples(6)
    gc.collect()
    gc.disable()
    try:
        per_example_gradients(module, x, y, cross_entropy)
        assert not [one for one in gc.get_objects() if type(one) is Taps]
    finally:
        gc.enable()


def test_dropout_under_vmap_draws_for_each_example_from_the_seed() -> None:
    module = Reorders(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 4))
    x, y = (part[:1].repeat(3, *[1] * (part.dim() - 1)) for part in examples(6))
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append(rows(per_example_gradients(module, x, y, cross_entropy)[0]))
    assert torch.equal(*drawn)
    dropped = drawn[0][:, : 6 * 40].unflatten(1, (40, 6)).abs().sum(2) == 0
    assert 0.2 < float(dropped.float().mean()) < 0.8
    assert not torch.equal(dropped[0], dropped[2])


def test_a_hook_on_a_weight_acts_on_the_gradient_of_each_example() -> None:
    module, (x, y) = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), examples(6)
    module[0].weight.register_hook(lambda slope: slope / slope.norm())
    found = rows(per_example_gradients(module, x, y, cross_entropy)[0])
    torch.testing.assert_close(found[:, :30].norm(dim=1), torch.ones(3))
    torch.testing.assert_close(found, stacked(module, cross_entropy, x, y))


class Checks(nn.Module):
    """Refuses large numbers where it stands alone, and under vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.linalg.cholesky(torch.eye(6) * (9 - x.abs().amax(1))[:, None, None])
        return self.a(x)  # type: ignore[no-any-return]


def test_an_error_on_an_example_leads_to_no_other_route() -> None:
    """Else one record would decide how the gradients of all others are rounded."""
    module, (x, y) = Checks(), examples(6)
    with pytest.raises(torch.linalg.LinAlgError):
        per_example_gradients(module, torch.cat([x[:2], x[2:] * 1e3]), y, cross_entropy)


def test_dropout_runs_drops_other_units_for_each_example_and_is_not_drawn_for_the_check() -> None:
    module = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 4))
    x, y = examples(6)
    x, y = x[:1].repeat(3, 1), y[:1].repeat(3)
    x[1] += 1  # two examples that differ show that it may be done by hand
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append(rows(per_example_gradients(module, x, y, cross_entropy)[0]))
    assert torch.equal(*drawn)
    assert per_example.known(module)
    dropped = drawn[0][:, : 6 * 40].unflatten(1, (40, 6)).abs().sum(2) == 0
    assert 0.2 < float(dropped.float().mean()) < 0.8
    assert not torch.equal(dropped[0], dropped[2])


def test_a_change_of_what_trains_is_seen() -> None:
    module, (x, y) = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), examples(6)
    assert rows(per_example_gradients(module, x, y, cross_entropy)[0]).shape[1] == 6 * 5 + 5 + 5 * 4 + 4
    module[0].weight.requires_grad_(False)
    torch.testing.assert_close(
        rows(per_example_gradients(module, x, y, cross_entropy)[0]), rows(one_by_one(module, x, y, cross_entropy)[0])
    )


def test_an_error_of_the_network_comes_back() -> None:
    module, (x, y) = nn.Linear(6, 4), examples(6)
    with pytest.raises(IndexError):
        per_example_gradients(module, x, y + 77, cross_entropy)


# --- blocks --------------------------------------------------------------------------------------------------------------


def some_blocks(seed: int, n: int) -> list[Block]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        sizes = 10.0 ** torch.randint(-4, 4, (n,), generator=g).view(n, *[1] * len(shape))
        return torch.randn(n, *shape, generator=g) * sizes

    index = torch.randint(0, 4, (n, 6), generator=g)
    return [products(draw(1, 5), draw(1, 7)), Dense(draw(5)), products(draw(3, 4), draw(3, 2)), lookups(index, draw(6, 3), 4)]


@given(st.integers(0, 2**31), st.integers(1, 5))
def test_norms_and_sums_of_blocks_are_those_of_the_flat_gradients(seed: int, n: int) -> None:
    blocks, weights = some_blocks(seed, n), torch.rand(n, generator=torch.Generator().manual_seed(seed)).double()
    flat = rows(blocks)
    assert flat.shape == (n, 5 * 7 + 5 + 4 * 2 + 4 * 3)
    assert norms(blocks).dtype == weighted_sum(blocks, weights).dtype == torch.float64
    exact, scale = flat.double(), float(flat.abs().max())
    # an outer product is multiplied in float64 here and was rounded to float32 in `rows`
    torch.testing.assert_close(norms(blocks), exact.norm(dim=1), rtol=1e-7, atol=0)
    torch.testing.assert_close(weighted_sum(blocks, weights), weights @ exact, rtol=1e-6, atol=1e-6 * scale)


def test_an_outer_product_is_laid_out_as_the_weight_of_a_linear_layer() -> None:
    block = Products(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]]))
    assert rows([block]).tolist() == [[3, 4, 5, 6, 8, 10]]
    assert weighted_sum([block], torch.tensor([2.0]).double()).tolist() == [6, 8, 10, 12, 16, 20]
    assert norms([block]).item() == pytest.approx((5 * 50) ** 0.5)


def test_a_row_that_is_looked_up_twice_gets_both_slopes() -> None:
    block = lookups(torch.tensor([[2, 0, 2]]), torch.tensor([[[1.0], [2.0], [3.0]]]), 4)
    assert rows([block]).tolist() == [[2, 0, 4, 0]]
    assert norms([block]).item() == pytest.approx(20**0.5)
    assert weighted_sum([block], torch.tensor([0.5]).double()).tolist() == [1, 0, 2, 0]


@given(st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 1e4]))
def test_a_sum_over_places_that_cancels_is_clipped_by_the_norm_of_what_is_left(seed: int, clip: float) -> None:
    g = torch.Generator().manual_seed(seed)
    left, right = torch.randn(4, 6, 5, generator=g), torch.randn(4, 6, 7, generator=g)
    left[:, 1::2] = -left[:, ::2]
    right[:, 1::2] = right[:, ::2] * (1 + 2.0**-20)
    index = torch.randint(0, 3, (4, 6), generator=g)
    for block in (products(left * 1e3, right), lookups(index, left * 1e3, 3)):
        for i in range(4):
            length = float(clipped_sum([block.without(torch.arange(4) != i)], clip).norm())
            wanted = min(clip, float(block.rows()[i].double().norm()))
            assert length == pytest.approx(wanted, rel=1e-12)


def test_an_example_that_is_not_finite_counts_as_zero_in_every_form() -> None:
    for value in (float("inf"), float("nan"), 3e38):
        for block in some_blocks(1, 3):
            parts = {name: part.clone() for name, part in vars(block).items() if isinstance(part, torch.Tensor)}
            for part in parts.values():
                if part.is_floating_point():
                    part[1] = value
            broken = type(block)(**{**{k: v for k, v in vars(block).items() if k in block.__dataclass_fields__}, **parts})
            total = clipped_sum([broken], 0.5)
            others = clipped_sum([block.without(torch.tensor([False, True, False]))], 0.5)
            if value == 3e38:
                assert total.isfinite().all()
                assert float(total.norm()) <= 1.5
            else:
                torch.testing.assert_close(total, others)


def sums(module: nn.Module, x: torch.Tensor, y: torch.Tensor, counts: Iterable[int]) -> list[torch.Tensor]:
    """The sum [d] of clipped gradients of the first so many examples, as a step of DP-SGD without noise computes it."""
    model, found = FlatModel(module), []
    for n in counts:
        source = PerExampleGradient(DpSgd(1.0, 0.0, 1.0, 1, 16.0, 40), Randomness(0, True), (0, 0))
        local = Local(model, model.vector, LocalSpec(), source, torch.Generator())
        for empty in source.batches(local, x[:n], y[:n]):
            source(local, *empty)
        found.append(16 * model.grad)
    return found


def test_each_example_counts_once_in_the_loss_of_training_however_full_its_pass_is() -> None:
    module, (x, y) = nn.Linear(6, 4), examples(6, n=9)
    model = FlatModel(module)
    source = PerExampleGradient(DpSgd(1.0, 0.0, 1.0, 1, 4.0, 9), Randomness(0, True), (0, 0))
    local = Local(model, model.vector, LocalSpec(), source, torch.Generator())
    for empty in source.batches(local, x, y):
        source(local, *empty)
    assert source.plan.together == 8
    assert sum(source.losses) / len(source.losses) == pytest.approx(cross_entropy(module(x), y).mean().item())


def test_weights_chosen_for_it_let_no_example_move_the_gradients_of_the_others() -> None:
    """In the second layer all cancels but rounding, which depends on the length of a pass."""
    half, width, draw = 64, 784, torch.Generator().manual_seed(0)
    first = torch.randint(-8, 8, (half, width), generator=draw) * 2.0**20
    first[-1] -= first.sum(0)
    signs, row = torch.tensor([0.25, -0.25]).repeat(32)[:, None], torch.cat([torch.ones(half), -torch.ones(half)])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        last = nn.Linear(64, 10)
    network = nn.Sequential(nn.Linear(width, 2 * half), nn.ReLU(), nn.Linear(2 * half, 64), nn.ReLU(), last)
    for layer, weight in ((network[0], torch.cat([first, -first])), (network[2], signs * row)):
        layer.load_state_dict({"weight": weight, "bias": torch.zeros(len(weight))})
    x, y = torch.randn(40, width, generator=draw), torch.randint(0, 10, (40,), generator=draw)
    moved = [float((more - fewer).norm()) for fewer, more in pairwise(sums(network, x, y, range(41)))]
    assert max(moved) <= 1 + 1e-5
    assert sum(length > 0.99 for length in moved) > 30, "gradients of zero would show nothing"
    whole = (clipped_sum(per_example_gradients(network, x[:n], y[:n], Classification().losses)[0], 1.0) for n in range(2, 41))
    if max(float((more - fewer).norm()) for fewer, more in pairwise(whole)) <= 1 + 1e-5:
        pytest.skip("this library adds in one order, whatever the length of a pass: nothing to see here")
