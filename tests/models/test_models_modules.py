"""The built networks: shapes as announced, deterministic, finite, and the same function as an independent writing of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.models import model_registry as registry

MNIST, CIFAR, HAR, DIGITS = (1, 28, 28), (3, 32, 32), (9, 128), (1, 8, 8)
SMALL = [
    ("linear", DIGITS, {}),
    ("mlp", (561,), {}),
    ("mlp", DIGITS, {"hidden": (16,), "activation": "tanh"}),
    ("lenet5", MNIST, {}),
    ("lenet5", MNIST, {"padding": 0}),
    ("lenet5", CIFAR, {"activation": "sigmoid", "pool": "avg"}),
    ("lenet5", HAR, {}),
    ("lenet-dlg", MNIST, {}),
    ("lenet-dlg", CIFAR, {"activation": "softplus"}),
    ("cnn2", DIGITS, {}),
    ("cnn2", (2, 17, 11), {"channels": (3, 4), "hidden": 5}),
    ("cnn3", DIGITS, {}),
    ("cnn3", HAR, {}),
    ("cnn-lstm", HAR, {}),
    ("cnn-lstm", (3, 4), {"hidden": 2}),
    ("vit-small", DIGITS, {"width": 12, "depth": 2, "heads": 3}),
    ("vit-small", (3, 11, 9), {"patch": 3, "width": 6, "depth": 1, "heads": 2, "hidden": 5}),
]
RESNETS = [
    ("resnet18", DIGITS, {}),
    ("resnet18", (3, 11, 9), {"norm": "batch"}),
    ("resnet34", DIGITS, {"groups": 2}),
]


@pytest.mark.parametrize(("name", "shape", "options"), SMALL + RESNETS)
def test_shapes_are_those_of_the_built_network(name: str, shape: tuple[int, ...], options: dict[str, object]) -> None:
    model = registry.build(name, shape, 7, seed=3, **options)
    announced = registry.shapes(name, shape, 7, **options)
    assert list(announced.items()) == [(key, tuple(p.shape)) for key, p in model.named_parameters()]
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
    assert bool(list(model.buffers())) == (options.get("norm") == "batch")


def test_shapes_of_resnet152_as_built() -> None:
    model = registry.build("resnet152", CIFAR, 10, seed=0)
    assert registry.shapes("resnet152", CIFAR, 10) == {key: tuple(p.shape) for key, p in model.named_parameters()}


@pytest.mark.few(8)
@pytest.mark.parametrize(("name", "shape", "options"), SMALL + RESNETS)
def test_logits_and_gradients_are_finite(name: str, shape: tuple[int, ...], options: dict[str, object]) -> None:
    model = registry.build(name, shape, 7, seed=3, **options).train()
    sizes = (4,) if options.get("norm") == "batch" else (1, 4)
    for batch in sizes:
        model.zero_grad()
        logits = model(torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch)))
        assert logits.shape == (batch, 7)
        F.cross_entropy(logits, torch.arange(batch) % 7).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert torch.isfinite(parameter.grad).all()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (model[-1].weight, model[-1].bias))


@pytest.mark.parametrize("name", ["mlp", "lenet5", "cnn-lstm"])
def test_the_seed_alone_decides(name: str) -> None:
    shape = HAR if name == "cnn-lstm" else MNIST
    torch.manual_seed(11)
    first = registry.build(name, shape, 10, seed=5)
    torch.manual_seed(12)
    again, other = registry.build(name, shape, 10, seed=5), registry.build(name, shape, 10, seed=6)
    for (key, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), key
        assert not torch.equal(a, c), key


def test_global_random_state_is_untouched() -> None:
    before = torch.random.get_rng_state()
    registry.build("lenet5", MNIST, 10, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)


def classic_lenet5(p: dict[str, Tensor], x: Tensor, padding: int) -> Tensor:
    """LeNet-5 by hand, with ReLU before pooling as it is usually drawn."""
    x = F.max_pool2d(F.relu(F.conv2d(x, p["conv1.weight"], p["conv1.bias"], padding=padding)), 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, p["conv2.weight"], p["conv2.bias"])), 2).flatten(1)
    x = F.relu(F.linear(x, p["fc1.weight"], p["fc1.bias"]))
    x = F.relu(F.linear(x, p["fc2.weight"], p["fc2.bias"]))
    return F.linear(x, p["fc3.weight"], p["fc3.bias"])


@pytest.mark.parametrize(("shape", "padding"), [(MNIST, 2), (CIFAR, 0)])
def test_lenet5_is_the_classic_network_bit_for_bit(shape: tuple[int, ...], padding: int) -> None:
    model = registry.build("lenet5", shape, 10, seed=1)
    parameters = dict(model.named_parameters())
    x = torch.rand(8, *shape, generator=torch.Generator().manual_seed(2))
    x[:, :, :10] = 0.0  # flat regions: ties inside pooling windows
    labels = torch.arange(8)
    ours, hand = model(x), classic_lenet5(parameters, x, padding)
    assert torch.equal(ours, hand)
    wanted = torch.autograd.grad(F.cross_entropy(hand, labels), list(parameters.values()))
    got = torch.autograd.grad(F.cross_entropy(ours, labels), list(parameters.values()))
    for key, a, b in zip(parameters, got, wanted, strict=True):
        assert torch.equal(a, b), key


def test_a_residual_block_by_hand() -> None:
    model = registry.build("resnet18", DIGITS, 10, seed=1)
    block = model.get_submodule("block2_1")
    x = torch.randn(2, 64, 8, 8, generator=torch.Generator().manual_seed(2))
    p = dict(block.named_parameters())

    def normalised(h: Tensor, prefix: str) -> Tensor:
        grouped = h.reshape(len(h), 32, -1)
        mean, var = grouped.mean(-1, keepdim=True), grouped.var(-1, correction=0, keepdim=True)
        h = ((grouped - mean) / (var + 1e-5).sqrt()).reshape(h.shape)
        return h * p[f"{prefix}.weight"][:, None, None] + p[f"{prefix}.bias"][:, None, None]

    h = F.relu(normalised(F.conv2d(x, p["body.conv1.weight"], stride=2, padding=1), "body.norm1"))
    h = normalised(F.conv2d(h, p["body.conv2.weight"], padding=1), "body.norm2")
    short = normalised(F.conv2d(x, p["shortcut.conv1.weight"], stride=2), "shortcut.norm1")
    torch.testing.assert_close(block(x), h + short, rtol=1e-4, atol=1e-5)


def test_a_vit_by_hand() -> None:
    """Patches, positions, two pre-norm blocks of attention and GELU, layer norm, mean over the tokens, classifier."""
    model = registry.build("vit-small", DIGITS, 10, seed=1, width=6, depth=2, heads=2, hidden=5)
    p = {name: value.detach() for name, value in model.named_parameters()}
    x = torch.randn(3, *DIGITS, generator=torch.Generator().manual_seed(2))

    def normalised(h: Tensor, name: str) -> Tensor:
        centred = h - h.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * p[f"transformer.{name}.weight"] + p[f"transformer.{name}.bias"]

    def linear(h: Tensor, name: str) -> Tensor:
        return h @ p[f"transformer.{name}.weight"].mT + p[f"transformer.{name}.bias"]

    patches = x.reshape(3, 2, 4, 2, 4).permute(0, 1, 3, 2, 4).reshape(3, 4, 16)  # four tokens of 16 pixels, row by row
    h = patches @ p["patches.weight"].reshape(6, 16).mT + p["patches.bias"] + p["transformer.positions.weight"]
    for block in ("blocks.0", "blocks.1"):
        projected = normalised(h, f"{block}.norm1") @ p[f"transformer.{block}.self_attn.in_proj_weight"].mT
        parts = (projected + p[f"transformer.{block}.self_attn.in_proj_bias"]).reshape(3, 4, 3, 2, 3).permute(2, 0, 3, 1, 4)
        q, k, v = parts  # [3 examples, 2 heads, 4 tokens, 3]
        mixed = (torch.softmax(q @ k.mT / 3**0.5, -1) @ v).transpose(1, 2).reshape(3, 4, 6)
        h = h + linear(mixed, f"{block}.self_attn.out_proj")
        inner = linear(normalised(h, f"{block}.norm2"), f"{block}.linear1")
        h = h + linear(inner * 0.5 * (1 + torch.erf(inner / 2**0.5)), f"{block}.linear2")
    features = normalised(h, "norm").mean(1)
    for training in (True, False):
        model.train(training)
        torch.testing.assert_close(model(x), features @ p["fc.weight"].mT + p["fc.bias"], rtol=1e-4, atol=1e-5)


def test_cnn_lstm_state_by_hand() -> None:
    model = registry.build("cnn-lstm", HAR, 6, seed=1)
    x = torch.randn(2, 64, 9, generator=torch.Generator().manual_seed(2))
    lstm = model.get_submodule("lstm")
    p = dict(lstm.named_parameters())
    state, cell = torch.zeros(2, 64), torch.zeros(2, 64)
    for t in range(9):
        gates = x[:, :, t] @ p["weight_ih_l0"].T + p["bias_ih_l0"] + state @ p["weight_hh_l0"].T + p["bias_hh_l0"]
        i, f, g, o = gates.chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        state = o.sigmoid() * cell.tanh()
    torch.testing.assert_close(lstm(x), state, rtol=1e-4, atol=1e-5)


def test_the_last_layer_is_the_classifier() -> None:
    for name, shape, options in SMALL:
        model = registry.build(name, shape, 7, seed=3, **options)
        x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
        assert isinstance(model[-1], nn.Linear)
        assert torch.equal(model[-1](model[:-1](x)), model(x))


@pytest.mark.parametrize(("name", "shape"), [("lenet5", MNIST), ("cnn-lstm", HAR), ("resnet18", DIGITS)])
def test_parameters_may_become_views_of_one_buffer(name: str, shape: tuple[int, ...]) -> None:
    model = registry.build(name, shape, 10, seed=1)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2))
    before = model(x)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = 0
    for p in model.parameters():
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    torch.testing.assert_close(model(x), before)
    flat.zero_()
    assert torch.equal(model(x), torch.zeros(2, 10))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("lenet5", MNIST, {}),
        ("lenet5", MNIST, {"activation": "sigmoid", "pool": "avg"}),
        ("lenet-dlg", MNIST, {}),
        ("cnn2", DIGITS, {"activation": "softplus"}),
        ("cnn-lstm", (9, 16), {}),
        ("resnet18", DIGITS, {}),
    ],
)
def test_gradients_can_be_differentiated_again(name: str, shape: tuple[int, ...], options: dict[str, object]) -> None:
    model = registry.build(name, shape, 10, seed=1, **options).double()
    draw = torch.Generator().manual_seed(2)
    x = torch.rand(1, *shape, generator=draw, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(x.shape, generator=draw, dtype=torch.float64)

    def squared_gradient(x: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), torch.tensor([3]))
        return sum((g**2).sum() for g in torch.autograd.grad(loss, list(model.parameters()), create_graph=True))  # type: ignore[return-value]

    (slope,) = torch.autograd.grad(squared_gradient(x), x)
    h = 1e-6
    difference = (squared_gradient(x + h * direction) - squared_gradient(x - h * direction)) / (2 * h)
    torch.testing.assert_close((slope * direction).sum(), difference, rtol=1e-4, atol=1e-8)


def test_networks_work_functionally() -> None:
    model = registry.build("lenet5", MNIST, 10, seed=1)
    other = dict(registry.build("lenet5", MNIST, 10, seed=2).named_parameters())
    x = torch.rand(3, *MNIST, generator=torch.Generator().manual_seed(2))
    assert torch.equal(functional_call(model, other, (x,)), registry.build("lenet5", MNIST, 10, seed=2)(x))


def test_batch_norm_needs_more_than_one_example_where_one_pixel_is_left() -> None:
    model = registry.build("resnet18", DIGITS, 10, seed=1, norm="batch").train()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.zeros(1, *DIGITS))
