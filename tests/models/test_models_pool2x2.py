"""The fast 2x2 max-pooling is torch's, bit for bit: values, gradients, ties, second derivatives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from fedveil.models import modules
from fedveil.models.modules import MaxPool2x2, max_pool_2x2


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32, levels: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if levels is None:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(levels, shape, generator=generator).to(dtype)


@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(0, 3),
    channels=st.integers(1, 4),
    height=st.integers(2, 9),
    width=st.integers(2, 9),
    levels=st.sampled_from([1, 2, 3, None]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=150, deadline=None)
def test_values_and_gradients_are_those_of_torch(
    seed: int, batch: int, channels: int, height: int, width: int, levels: int | None, dtype: torch.dtype
) -> None:
    x = draw(seed, batch, channels, height, width, dtype=dtype, levels=levels).requires_grad_()
    ours, theirs = max_pool_2x2(x), F.max_pool2d(x, 2)
    assert torch.equal(ours, theirs)
    flow = draw(seed + 1, *ours.shape, dtype=dtype)
    assert torch.equal(torch.autograd.grad(ours, x, flow)[0], torch.autograd.grad(theirs, x, flow)[0])


def test_the_fast_kernel_is_really_used() -> None:
    assert max_pool_2x2(draw(0, 1, 2, 4, 6).requires_grad_()).grad_fn.__class__.__name__ == "_MaxPoolBackward"


@pytest.mark.parametrize(
    "window",
    [((1, 1), (1, 1)), ((0, 1), (1, 0)), ((0, 1), (1, 1)), ((0, 0), (1, 1)), ((-1, -1), (-2, -1)), ((0, 0), (0, 1))],
)
def test_a_tie_goes_to_the_first_in_reading_order(window: tuple[tuple[float, float], tuple[float, float]]) -> None:
    x = torch.tensor([[window]], dtype=torch.float32, requires_grad=True)
    (gradient,) = torch.autograd.grad(max_pool_2x2(x).sum(), x)
    first = x.detach().flatten().tolist().index(x.max().item())
    assert gradient.flatten().tolist() == [1.0 if i == first else 0.0 for i in range(4)]


def test_gradcheck_twice() -> None:
    x = (torch.randperm(2 * 3 * 4 * 6, generator=torch.Generator().manual_seed(1)).double() / 10).view(2, 3, 4, 6)
    x.requires_grad_()
    assert torch.autograd.gradcheck(max_pool_2x2, (x,))
    assert torch.autograd.gradgradcheck(lambda z: max_pool_2x2(z).sin(), (x,))


def test_third_derivative() -> None:
    x = draw(3, 1, 1, 2, 2, dtype=torch.float64).requires_grad_()
    y = max_pool_2x2(x).pow(4).sum()
    for factor, power in ((4, 3), (12, 2), (24, 1)):
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        y = g.sum()
        assert y.item() == pytest.approx(factor * x.max().item() ** power)


def test_nan_comes_out() -> None:
    x = torch.zeros(1, 1, 2, 4)
    x[0, 0, 1, 2] = torch.nan
    assert torch.equal(max_pool_2x2(x).isnan(), torch.tensor([[[[False, True]]]]))


def test_other_formats_are_left_to_torch() -> None:
    x = draw(5, 2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    pooled = max_pool_2x2(x)
    assert torch.equal(pooled, F.max_pool2d(x, 2))
    assert pooled.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("in_dim", [0, 1])
def test_per_example_gradients_under_torch_func(in_dim: int) -> None:
    x = draw(6, 5, 2, 4, 4, levels=3)
    each = vmap(grad(lambda image: max_pool_2x2(image[None]).square().sum()), in_dims=in_dim)(x.movedim(0, in_dim).contiguous())
    together = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(F.max_pool2d(together, 2).square().sum(), together)
    assert torch.equal(each, wanted)


def test_second_derivatives_under_torch_func() -> None:
    x = draw(6, 3, 1, 2, 2)
    curvature = vmap(grad(lambda z: grad(lambda image: max_pool_2x2(image[None]).pow(3).sum())(z).sum()))(x)
    wanted = torch.zeros(3, 4).scatter_(1, x.flatten(1).argmax(1, keepdim=True), 6 * x.flatten(1).amax(1, keepdim=True))
    torch.testing.assert_close(curvature.flatten(1), wanted)


def test_batched_backward() -> None:
    x = draw(7, 2, 1, 4, 4).requires_grad_()
    y = max_pool_2x2(x)
    flows = draw(8, 3, *y.shape)
    (batched,) = torch.autograd.grad(y, x, flows, is_grads_batched=True, retain_graph=True)
    for flow, got in zip(flows, batched, strict=True):
        assert torch.equal(got, torch.autograd.grad(y, x, flow, retain_graph=True)[0])


def test_without_the_private_question_the_result_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(9, 2, 3, 4, 6, levels=2).requires_grad_()
    flow = draw(10, 2, 3, 2, 3)
    (wanted,) = torch.autograd.grad(F.max_pool2d(x, 2), x, flow)
    monkeypatch.setattr(modules, "_transformed", lambda: True)
    pooled = MaxPool2x2()(x)
    assert torch.equal(pooled, F.max_pool2d(x, 2))
    assert torch.equal(torch.autograd.grad(pooled, x, flow)[0], wanted)
