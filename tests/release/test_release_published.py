"""Gradients of single examples for networks that other people published, beside one backward pass for each example.

Twelve are rewritten here, each small; those of torchvision, timm and transformers are tried where these are installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from fedveil.gradients.gradient_blocks import rows
from fedveil.gradients.per_example import per_example_gradients
from fedveil.models.trainable import fix
from fedveil.tasks.classification import Classification

CLASSES, SYMBOLS = 3, 11
cross_entropy = Classification().losses


class DenseNet(nn.Module):
    """Huang et al. 2017: each layer is handed all before it; batch normalisation is left to `fix`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self._layer(4 + 3 * i) for i in range(3))
        self.first, self.head = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Linear(13, CLASSES)

    @staticmethod
    def _layer(width: int) -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, 3, 3, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.head(torch.cat(found, 1).mean((2, 3)))  # type: ignore[no-any-return]


class MobileNet(nn.Module):
    """Sandler et al. 2018, with squeeze and excitation (Hu et al. 2018) and the hard swish of Howard et al. 2019."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(4, 8, 1)
        self.deep, self.narrow = nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.Conv2d(8, 4, 1)
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.first(x))
        h = F.hardswish(self.norm(self.deep(F.hardswish(self.wide(x)))))
        h = h * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(h, 1)))))
        x = x + self.narrow(h)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))  # type: ignore[no-any-return]


class ConvNeXt(nn.Module):
    """Liu et al. 2022: channels last between convolutions, and a scale of each channel that is a parameter by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(2, 4, 2, 2), nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 16), nn.Linear(16, 4)
        self.scale, self.head = nn.Parameter(0.1 * torch.ones(4)), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = self.down(F.gelu(self.up(self.norm(self.deep(x).permute(0, 2, 3, 1)))))
        x = x + (self.scale * h).permute(0, 3, 1, 2)
        return self.head(x.mean([-2, -1]))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Ronneberger et al. 2015."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 5, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(5, 3, 2, 2), nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = F.relu(self.down(x))
        h = self.up(F.relu(self.deep(F.max_pool2d(left, 2))))
        return self.out(torch.cat([left, h], dim=1)).mean((2, 3))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. 2021: a class token and places that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(2, 8, 4, 4), nn.Parameter(torch.zeros(1, 1, 8))
        self.places = nn.Parameter(0.02 * torch.randn(1, 5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder, self.norm = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.places
        return self.head(self.norm(self.encoder(h))[:, 0])  # type: ignore[no-any-return]


class MlpMixer(nn.Module):
    """Tolstikhin et al. 2021."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.one, self.two = nn.Conv2d(2, 6, 4, 4), nn.LayerNorm(6), nn.LayerNorm(6)
        self.tokens = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.channels = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).mT
        h = h + self.tokens(self.one(h).mT).mT
        return self.head((h + self.channels(self.two(h))).mean(1))  # type: ignore[no-any-return]


class Tcn(nn.Module):
    """Bai et al. 2018: dilated causal convolutions with weight normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(weight_norm(nn.Conv1d(4, 4, 2, padding=2**i, dilation=2**i)) for i in range(3))
        self.table, self.head = nn.Embedding(SYMBOLS, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x).transpose(1, 2)
        for layer in self.layers:
            h = F.relu(layer(h)[..., : h.shape[-1]] + h)
        return self.head(h[:, :, -1])  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Radford et al. 2019: one product for query, key and value, a mask that is a buffer, and the table as the last layer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(SYMBOLS, 8), nn.Embedding(16, 8)
        self.qkv, self.out, self.norms = nn.Linear(8, 24), nn.Linear(8, 8), nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, SYMBOLS, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.size()
        h = self.table(x) + self.places(torch.arange(t))
        q, k, v = (part.view(n, t, 2, 4).transpose(1, 2) for part in self.qkv(self.norms[0](h)).split(8, dim=2))
        scores = (q @ k.transpose(-2, -1) / math.sqrt(4)).masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        h = h + self.out((F.softmax(scores, -1) @ v).transpose(1, 2).contiguous().view(n, t, 8))
        h = h + self.down(F.gelu(self.up(self.norms[1](h))))
        return self.head(h).mean(1)[:, :CLASSES]  # type: ignore[no-any-return]


class TextCnn(nn.Module):
    """Kim 2014."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SYMBOLS, 5, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv2d(1, 4, (k, 5)) for k in (2, 3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x).unsqueeze(1)
        found = [F.relu(conv(h)).squeeze(3) for conv in self.convolutions]
        return self.head(torch.cat([F.max_pool1d(i, i.size(2)).squeeze(2) for i in found], 1))  # type: ignore[no-any-return]


class Attentive(nn.Module):
    """Bahdanau et al. 2015: a decoder of cells that looks at the states of a recurrent encoder in two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.encoder = nn.Embedding(SYMBOLS, 4), nn.GRU(4, 5, batch_first=True, bidirectional=True)
        self.of_state, self.of_memory = nn.Linear(6, 6), nn.Linear(10, 6, bias=False)
        self.score, self.cell, self.head = nn.Linear(6, 1), nn.LSTMCell(10, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        memory, _ = self.encoder(self.table(x))
        state = (memory.new_zeros(x.size(0), 6), memory.new_zeros(x.size(0), 6))
        for _ in range(3):
            weights = self.score(torch.tanh(self.of_state(state[0])[:, None] + self.of_memory(memory)))
            state = self.cell((F.softmax(weights, 1) * memory).sum(1), state)
        return self.head(state[0])  # type: ignore[no-any-return]


class PointNet(nn.Module):
    """Qi et al. 2017: a transformation of the points that the points choose, and the largest value over them."""

    def __init__(self) -> None:
        super().__init__()
        self.chooses, self.turn = nn.Conv1d(3, 6, 1), nn.Linear(6, 9)
        self.points, self.head = nn.Conv1d(3, 8, 1), nn.Linear(8, CLASSES)
        self.norm = nn.InstanceNorm1d(8, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        turn = self.turn(torch.max(F.relu(self.chooses(x)), 2)[0]).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)
        h = torch.bmm(x.transpose(2, 1), turn).transpose(2, 1)
        return self.head(torch.max(F.relu(self.norm(self.points(h))), 2)[0])  # type: ignore[no-any-return]


class DeepFm(nn.Module):
    """Guo et al. 2017: products of all pairs of looked-up rows beside a deep network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.EmbeddingBag(SYMBOLS, CLASSES, mode="sum"), nn.Embedding(SYMBOLS, 4)
        self.deep = nn.Sequential(nn.Linear(32, 10), nn.LeakyReLU(), nn.Dropout(0.0), nn.Linear(10, CLASSES))
        self.bias = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x)
        pairs = 0.5 * (rows.sum(1).pow(2) - rows.pow(2).sum(1)).sum(1, keepdim=True)
        return self.first(x) + pairs + self.deep(rows.flatten(1)) + self.bias  # type: ignore[no-any-return]


PICTURES, POINTS = (2, 8, 8), (3, 9)
PUBLISHED: dict[type[nn.Module], tuple[int, ...]] = {
    **dict.fromkeys((DenseNet, MobileNet, ConvNeXt, UNet, VisionTransformer, MlpMixer), PICTURES),
    **dict.fromkeys((Tcn, Gpt, TextCnn, Attentive, DeepFm), (8,)),
    PointNet: POINTS,
}


def examples(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(0, SYMBOLS, (4, *shape), generator=draw) if len(shape) == 1 else torch.randn(4, *shape, generator=draw)
    return x, torch.arange(4) % CLASSES


def off(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """How far the gradients are from those of one backward pass for each example, beside the largest of these."""
    parameters = list(net.parameters())
    losses = (cross_entropy(net(x[i : i + 1]), y[i : i + 1])[0] for i in range(len(y)))
    each = [torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True) for loss in losses]
    right = torch.stack([torch.cat([slope.flatten() for slope in one]) for one in each])
    found = rows(per_example_gradients(net, x, y, cross_entropy)[0])
    assert float(right.norm(dim=1).min()) > 1e-3, "gradients of zero would show nothing"
    return float((found - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("kind", PUBLISHED)
def test_networks_of_others_have_the_gradients_of_one_backward_pass_each(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x, y = examples(PUBLISHED[kind])
    assert off(fix(kind()).double(), x.double() if x.is_floating_point() else x, y) <= 1e-10


def _torchvision(name: str) -> Callable[[], nn.Module]:
    models = pytest.importorskip("torchvision.models", reason="needs torchvision", exc_type=(ImportError, RuntimeError))
    return lambda: getattr(models, name)(num_classes=CLASSES)  # type: ignore[no-any-return]


def _timm(name: str) -> Callable[[], nn.Module]:
    timm = pytest.importorskip("timm", reason="needs timm", exc_type=ImportError)
    return lambda: timm.create_model(name, num_classes=CLASSES)  # type: ignore[no-any-return]


def _transformers(name: str) -> Callable[[], nn.Module]:
    library: Any = pytest.importorskip("transformers", reason="needs transformers", exc_type=ImportError)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    options = {"vocab_size": SYMBOLS, "num_labels": CLASSES, "pad_token_id": 0, "num_key_value_heads": 2} | sizes
    config = getattr(library, f"{name}Config")(**options, attn_implementation="eager")

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = getattr(library, f"{name}ForSequenceClassification")(config).eval()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(input_ids=x, attention_mask=torch.ones_like(x)).logits  # type: ignore[no-any-return]

    return Logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "name"),
    [
        *((_torchvision, name) for name in ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "regnet_y_400mf")),
        *((_timm, name) for name in ("resnet10t", "edgenext_xx_small", "mobilevit_xxs", "pvt_v2_b0")),
        *((_transformers, name) for name in ("Bert", "GPT2", "Llama", "Albert")),
    ],
)
def test_networks_of_libraries_have_the_gradients_of_one_backward_pass_each(library: Any, name: str) -> None:
    make = library(name)
    torch.manual_seed(0)
    net, (x, y) = fix(make()).double(), examples((8,) if library is _transformers else (3, 64, 64))
    for layer in net.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    assert off(net, x if library is _transformers else x.double(), y) <= 1e-10
