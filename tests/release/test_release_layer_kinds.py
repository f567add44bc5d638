"""Gradients of single examples for the layers that people use, beside one backward pass for each example.

Sequences have as many places as batches have examples, so that shapes alone never say which is which.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedveil.gradients import per_example
from fedveil.gradients.gradient_blocks import Block, rows
from fedveil.gradients.layer_rules import RULES
from fedveil.gradients.per_example import one_by_one, per_example_gradients, vectorised
from fedveil.models.model_registry import build
from fedveil.training.params import copied

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
N = 4
BATCH, ALONE, LOOP = "batch", "alone", "loop"
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Layers by name, and what is done with them."""

    def __init__(self, forward: Forward, **layers: Any) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


@dataclass(frozen=True)
class Kind:
    """A network, an example's shape (of tokens where `tokens`), and how its gradients can be taken: in a batch, or alone."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    route: str = BATCH
    tokens: int = 0


def last(forward: Forward, **layers: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Net(forward, **{name: make() for name, make in layers.items()})


def causal(steps: int) -> torch.Tensor:
    return torch.triu(torch.full((steps, steps), -torch.inf), diagonal=1)


def cells(net: Any, x: torch.Tensor) -> torch.Tensor:
    state = None
    for step in x.unbind(1):
        state = net.cell(step, state)
    return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]


def listed(net: Any, x: torch.Tensor) -> torch.Tensor:
    state = [x.new_zeros(len(x), 5)] * 2
    for step in x.unbind(1):
        state = list(net.cell(step, state))
    return state[0]


def checkpointed(net: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = net.b(checkpoint(net.a, x, use_reentrant=False))
    return out


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return nn.Sequential(torch.jit.script(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3))


def one_row(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([net.b(net.c(torch.tanh(net.a(row))[None])[0]) for row in x])


def with_inner_gradient(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    slope = torch.autograd.grad(torch.tanh(net.a(x)).sum(), x, create_graph=True)[0]
    out: torch.Tensor = net.b(slope)
    return out


def under_func(net: Any, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.grad(lambda x: torch.tanh(net.a(x)).sum())(x)
    out: torch.Tensor = torch.func.vmap(net.b)(slope)
    return out


def slope_turned(net: Any, x: torch.Tensor) -> torch.Tensor:
    h = net.a(x)
    if h.requires_grad:
        h.register_hook(lambda slope: -0.5 * slope / slope.norm())
    out: torch.Tensor = net.b(torch.tanh(h))
    return out


def wide() -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        return Net(
            lambda net, x: net.b(torch.cat([net.a(x), net.o(x)], 1)), a=nn.Linear(5, 4), o=nn.Linear(5, 0), b=nn.Linear(4, 3)
        )


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, 0.0, **options)


def padded(net: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = (x == 0) & (torch.arange(N) > 0)
    h = net.table(x)
    out: torch.Tensor = net.attention(h, h, h, key_padding_mask=hidden, attn_mask=causal(N).bool())[0]
    return out


def tied(net: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.tanh(net.middle(net.table(x))), net.table.weight)


def tied_layers() -> nn.Module:
    net = Net(lambda net, x: net.out(torch.tanh(net.table(x))), table=nn.Embedding(7, 5), out=nn.Linear(5, 7))
    net.out.weight = net.table.weight
    return net


def frozen(net: nn.Module, *names: str) -> nn.Module:
    for name, p in net.named_parameters():
        p.requires_grad_(not name.startswith(names))
    return net


def scaled(layer: nn.Module, factor: float) -> nn.Module:
    for p in layer.parameters():
        p.data.mul_(factor)
    return layer


def evaluated(net: nn.Module) -> nn.Module:
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean, layer.running_var = torch.rand(3), torch.rand(3) + 0.5
            layer.eval()
    return net


def overwriting(net: Any, x: torch.Tensor) -> torch.Tensor:
    h: torch.Tensor = net.a(x)
    h += 1.0
    out: torch.Tensor = net.b(torch.tanh(h))
    return out


def overwriting_later(net: Any, x: torch.Tensor) -> torch.Tensor:
    h: torch.Tensor = net.b(torch.tanh(net.a(x)))
    h += 1.0
    return h


def deciding(net: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = net.a(x) if float(x.sum()) > 0 else net.b(x)
    return out


def filling(net: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype)
    for i in range(x.shape[1]):
        out[:, i] = net.a(x[:, i])
    return out


def reversed_batch(net: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = net.b(torch.tanh(net.a(x.flip(0))).flip(0))
    return out


def time_major_rows(net: Any, x: torch.Tensor) -> torch.Tensor:
    h = x.transpose(0, 1).reshape(-1, x.shape[-1])
    return net.b(torch.tanh(net.a(h))).view(x.shape[1], len(x), -1).transpose(0, 1)  # type: ignore[no-any-return]


def packed(net: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = (x != 0).sum(1).clamp(min=1)
    rows = nn.utils.rnn.pack_padded_sequence(net.table(x), lengths, batch_first=True, enforce_sorted=False)
    out: torch.Tensor = net.r(rows)[1][-1]
    return out


def alias() -> nn.Module:
    net = Net(lambda net, x: net.b(torch.tanh(net.a(x))), a=nn.Linear(5, 5))
    net.b = net.a
    return net


def in_a_list() -> nn.Module:
    net = Net(lambda net, x: x @ net.weights[0].T + net.a.bias, a=nn.Linear(5, 3))
    net.weights = [net.a.weight]  # type: ignore[assignment]
    return net


def cut_off(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h = net.a(x)
    out: torch.Tensor = net.b(torch.tanh(h))
    return out


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def sequence(make: Callable[[], nn.Module], *, first: bool = False, **options: Any) -> Kind:
    """A recurrent layer between two linear ones, with examples or steps first."""

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.a(x)
        h = net.layer(h if first else h.transpose(0, 1))[0]
        out: torch.Tensor = net.b(h)
        return out if first else out.transpose(0, 1)

    def built() -> nn.Module:
        layer: Any = make()
        width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        return Net(run, a=nn.Linear(3, 4), layer=layer, b=nn.Linear(width, 3))

    return Kind(built, (N, 3), **options)


def ab(forward: Forward, width: int = 5) -> Callable[[], nn.Module]:
    return last(forward, a=lambda: nn.Linear(5, width), b=lambda: nn.Linear(width, 3))


KINDS: dict[str, Kind] = {
    "Linear": Kind(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)), (5,)),
    "Linear on a sequence": Kind(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (N, 5)),
    "Linear on a grid": Kind(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (2, N, 5)),
    "Linear, steps first": Kind(ab(lambda net, x: net.b(torch.tanh(net.a(x.transpose(0, 1)))).transpose(0, 1)), (N, 5)),
    "Linear on examples' rows in one dimension": Kind(
        ab(lambda net, x: net.b(torch.tanh(net.a(x.flatten(0, 1)))).unflatten(0, (-1, N))), (N, 5)
    ),
    "Linear on steps' rows in one dimension": Kind(ab(time_major_rows), (N, 5), ALONE),
    "Linear on shuffled channels": Kind(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Unflatten(1, (6, 1)), nn.ChannelShuffle(2), nn.Flatten(), nn.Linear(6, 3)),
        (5,),
        ALONE,
    ),
    "Linear with an activation of somebody's own": Kind(
        lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0, activation=lambda x: torch.relu(x) ** 2, batch_first=True),
        (N, 8),
        ALONE,
    ),
    "a number": Kind(
        last(lambda net, x: net.a(x) * net.gain.exp(), a=lambda: nn.Linear(5, 3), gain=lambda: nn.Parameter(torch.tensor(0.3))),
        (5,),
        ALONE,
    ),
    "a number, one example after the other": Kind(
        last(
            lambda net, x: net.a(x) * (net.gain if float(x.sum()) > 0 else -net.gain),
            a=lambda: nn.Linear(5, 3),
            gain=lambda: nn.Parameter(torch.tensor(0.3)),
        ),
        (5,),
        LOOP,
    ),
    "Embedding, sparse": Kind(lambda: nn.Sequential(nn.Embedding(7, 5, sparse=True), nn.Linear(5, 3)), (N,), tokens=7),
    "EmbeddingBag, sparse": Kind(lambda: nn.EmbeddingBag(7, 5, mode="sum", sparse=True), (N,), tokens=7),
    "sparse lookups by function": Kind(
        last(lambda net, x: F.embedding(x, net.table, sparse=True), table=lambda: nn.Parameter(torch.randn(7, 5))),
        (N,),
        LOOP,
        tokens=7,
    ),
    "Embedding, sparse, and a packed sequence": Kind(
        last(packed, table=lambda: nn.Embedding(7, 5, sparse=True), r=lambda: nn.GRU(5, 4, batch_first=True)),
        (N,),
        LOOP,
        tokens=7,
    ),
    "one layer under two names": Kind(alias, (5,), ALONE),
    "a weight kept in a list": Kind(in_a_list, (5,), ALONE),
    "Linear on a batch turned around": Kind(ab(reversed_batch), (5,), ALONE),
    "Bilinear": Kind(last(lambda net, x: net.a(x, x.roll(1, -1)), a=lambda: nn.Bilinear(5, 5, 3)), (5,)),
    "Bilinear on a sequence": Kind(last(lambda net, x: net.a(x, x * x), a=lambda: nn.Bilinear(5, 5, 3, False)), (N, 5)),
    "Conv1d": Kind(lambda: nn.Sequential(nn.Conv1d(3, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv1d(4, 2, 2)), (3, 9)),
    "Conv1d, same, dilated": Kind(lambda: nn.Sequential(nn.Conv1d(3, 4, 4, padding="same", dilation=2)), (3, 9)),
    "Conv2d": Kind(
        lambda: nn.Sequential(nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0)), nn.ReLU(), nn.Conv2d(4, 2, 2)), (3, 8, 7)
    ),
    "Conv2d, same": Kind(lambda: nn.Conv2d(3, 4, (5, 3), padding="same"), (3, 5, 5)),
    "Conv2d, circular": Kind(lambda: nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="circular"), (3, 5, 5)),
    "Conv2d, reflect": Kind(lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", stride=2), (3, 5, 5)),
    "Conv2d, dilated": Kind(lambda: nn.Conv2d(3, 4, 3, dilation=(2, 1), stride=(1, 2)), (3, 8, 8)),
    "Conv2d, grouped": Kind(lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "Conv2d, depthwise": Kind(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(), nn.Conv2d(6, 2, 1)), (3, 5, 5)),
    "Conv2d on frames": Kind(
        last(lambda net, x: net.a(x.flatten(0, 1)).unflatten(0, (-1, 2)), a=lambda: nn.Conv2d(3, 4, 3)), (2, 3, 5, 5)
    ),
    "Conv3d": Kind(lambda: nn.Conv3d(2, 4, (2, 3, 1), stride=(1, 2, 1), padding=(0, 1, 0), groups=2), (2, 4, 5, 3)),
    "ConvTranspose1d": Kind(lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1), (3, 5)),
    "ConvTranspose2d": Kind(
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, (3, 2), stride=2, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 1)), (4, 4, 3)
    ),
    "ConvTranspose2d, dilated": Kind(lambda: nn.ConvTranspose2d(3, 4, 3, dilation=3, output_padding=2, bias=False), (3, 4, 4)),
    "ConvTranspose3d": Kind(lambda: nn.ConvTranspose3d(2, 3, 2, stride=(2, 1, 2)), (2, 2, 3, 2)),
    "Embedding": Kind(lambda: nn.Sequential(nn.Embedding(7, 5), nn.Tanh(), nn.Linear(5, 3)), (N,), tokens=7),
    "Embedding, padding": Kind(lambda: nn.Sequential(nn.Embedding(7, 5, padding_idx=2), nn.Linear(5, 3)), (N,), tokens=7),
    "Embedding on a grid": Kind(lambda: nn.Embedding(7, 5), (2, N), tokens=7),
    "Embedding of positions": Kind(
        last(
            lambda net, x: net.out(torch.tanh(net.table(x) + net.place(torch.arange(N).expand_as(x)))),
            table=lambda: nn.Embedding(7, 5),
            place=lambda: nn.Embedding(N, 5),
            out=lambda: nn.Linear(5, 3),
        ),
        (N,),
        tokens=7,
    ),
    "Embedding of positions, once for all examples": Kind(
        last(
            lambda net, x: torch.tanh(net.table(x) + net.place(torch.arange(N))),
            table=lambda: nn.Embedding(7, 5),
            place=lambda: nn.Embedding(N, 5),
        ),
        (N,),
        ALONE,
        tokens=7,
    ),
    "EmbeddingBag, sum": Kind(lambda: nn.EmbeddingBag(7, 5, mode="sum"), (N,), tokens=7),
    "EmbeddingBag, mean, padding": Kind(
        lambda: nn.Sequential(nn.EmbeddingBag(7, 5, mode="mean", padding_idx=1), nn.Linear(5, 3)), (N,), tokens=7
    ),
    "EmbeddingBag, max": Kind(lambda: nn.EmbeddingBag(7, 5, mode="max"), (N,), ALONE, tokens=7),
    "LayerNorm": Kind(lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)), (N, 5)),
    "LayerNorm over two dimensions": Kind(lambda: nn.Sequential(nn.LayerNorm((N, 5)), nn.Linear(5, 3)), (2, N, 5)),
    "LayerNorm without bias": Kind(lambda: nn.Sequential(nn.LayerNorm(5, bias=False), nn.Linear(5, 3)), (5,)),
    "LayerNorm without parameters": Kind(lambda: nn.Sequential(nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 3)), (5,)),
    "RMSNorm": Kind(lambda: nn.Sequential(nn.Linear(5, 6), nn.RMSNorm(6), nn.Linear(6, 3)), (N, 5)),
    "GroupNorm": Kind(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 2)), (3, 6, 6)),
    "GroupNorm without bias": Kind(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4, bias=False)), (3, 6, 6)),
    "GroupNorm on vectors": Kind(lambda: nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(1, 6)), (5,)),
    "InstanceNorm1d": Kind(lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4, affine=True)), (3, 7)),
    "InstanceNorm2d": Kind(lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True), nn.Conv2d(3, 2, 2)), (3, 5, 5)),
    "InstanceNorm3d": Kind(lambda: nn.InstanceNorm3d(2, affine=True), (2, 3, 4, 3)),
    "BatchNorm2d with fixed statistics": Kind(
        lambda: evaluated(nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 2))), (2, 5, 5)
    ),
    "BatchNorm2d, frozen": Kind(
        lambda: frozen(evaluated(nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 2))), "1."), (2, 5, 5)
    ),
    "RNN": sequence(lambda: nn.RNN(4, 5)),
    "RNN, relu, two layers": sequence(lambda: nn.RNN(4, 5, 2, nonlinearity="relu", batch_first=True), first=True),
    "GRU": sequence(lambda: nn.GRU(4, 5)),
    "GRU, two directions, two layers": sequence(lambda: nn.GRU(4, 5, 2, bidirectional=True, batch_first=True), first=True),
    "GRU without bias": sequence(lambda: nn.GRU(4, 5, bias=False)),
    "LSTM": sequence(lambda: nn.LSTM(4, 5)),
    "LSTM, batch first": sequence(lambda: nn.LSTM(4, 5, batch_first=True), first=True),
    "LSTM, two directions, two layers": sequence(lambda: nn.LSTM(4, 5, 2, bidirectional=True)),
    "LSTM, one step": Kind(
        last(lambda net, x: net.r(x[:, None])[0][:, 0], r=lambda: nn.LSTM(3, 5, 2, batch_first=True, bidirectional=True)), (3,)
    ),
    "LSTM, steep gates": sequence(lambda: scaled(nn.LSTM(4, 5), 4.0)),
    "LSTM without bias, two directions": sequence(
        lambda: nn.LSTM(4, 5, bias=False, bidirectional=True, batch_first=True), first=True
    ),
    "LSTM without bias": sequence(lambda: nn.LSTM(4, 5, bias=False)),
    "LSTM, projections": sequence(lambda: nn.LSTM(4, 5, 2, proj_size=3, bidirectional=True)),
    "LSTM's last state": Kind(
        last(
            lambda net, x: net.out(net.r(x)[1][1][-1]), r=lambda: nn.LSTM(3, 5, 2, batch_first=True), out=lambda: nn.Linear(5, 2)
        ),
        (N, 3),
    ),
    "LSTM from a first state": Kind(
        last(lambda net, x: net.r(x, (x[None, :, 0] * 2, x[None, :, 1].cos()))[0], r=lambda: nn.LSTM(3, 3, batch_first=True)),
        (N, 3),
    ),
    "LSTM cells with states as lists": Kind(last(listed, cell=lambda: nn.LSTMCell(3, 5)), (N, 3)),
    "RNNCell": Kind(last(cells, cell=lambda: nn.RNNCell(3, 5)), (N, 3)),
    "RNNCell, relu": Kind(last(cells, cell=lambda: nn.RNNCell(3, 5, nonlinearity="relu", bias=False)), (N, 3)),
    "GRUCell": Kind(last(cells, cell=lambda: nn.GRUCell(3, 5)), (N, 3)),
    "LSTMCell": Kind(last(cells, cell=lambda: nn.LSTMCell(3, 5)), (N, 3)),
    "MultiheadAttention": Kind(
        last(lambda net, x: net.a(x, x, x)[0], a=lambda: nn.MultiheadAttention(6, 2, batch_first=True)), (N, 6)
    ),
    "MultiheadAttention, steps first": Kind(
        last(
            lambda net, x: net.a(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1),
            a=lambda: nn.MultiheadAttention(6, 2),
        ),
        (N, 6),
    ),
    "MultiheadAttention, its weights": Kind(
        last(lambda net, x: net.a(2 * x, 2 * x, x)[1], a=lambda: nn.MultiheadAttention(6, 2, bias=False, batch_first=True)),
        (N, 6),
    ),
    "MultiheadAttention across": Kind(
        last(
            lambda net, x: net.a(x[:, :2], x[:, 1:].cos(), x[:, 1:])[0], a=lambda: nn.MultiheadAttention(6, 3, batch_first=True)
        ),
        (N, 6),
    ),
    "MultiheadAttention, memory": Kind(
        last(
            lambda net, x: net.a(x[:, :2], *[x[:, 1:, :4]] * 2)[0],
            a=lambda: nn.MultiheadAttention(6, 2, kdim=4, vdim=4, batch_first=True),
        ),
        (N, 6),
    ),
    "MultiheadAttention, masks": Kind(
        last(padded, table=lambda: nn.Embedding(5, 6), attention=lambda: nn.MultiheadAttention(6, 2, batch_first=True)),
        (N,),
        tokens=5,
    ),
    "MultiheadAttention, added keys": Kind(
        last(lambda net, x: net.a(x, x, x)[0], a=lambda: nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True)),
        (N, 6),
        ALONE,
    ),
    "TransformerEncoderLayer": Kind(lambda: encoder(batch_first=True), (N, 8)),
    "TransformerEncoderLayer, norm first, gelu": Kind(
        lambda: encoder(batch_first=True, norm_first=True, activation="gelu"), (N, 8)
    ),
    "TransformerEncoder, causal, steps first": Kind(
        last(
            lambda net, x: net.t(x.transpose(0, 1), mask=causal(N).to(x)).transpose(0, 1),
            t=lambda: nn.TransformerEncoder(encoder(), 2, enable_nested_tensor=False),
        ),
        (N, 8),
    ),
    "TransformerDecoderLayer": Kind(
        last(
            lambda net, x: net.t(x[:, :3], torch.tanh(x[:, 1:]), tgt_mask=causal(3).to(x)),
            t=lambda: nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True),
        ),
        (N, 8),
    ),
    "Transformer": Kind(
        last(lambda net, x: net.t(x[:, :2], x[:, 1:]), t=lambda: nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True)), (N, 8)
    ),
    "PReLU": Kind(lambda: nn.Sequential(nn.Linear(5, 6), nn.PReLU(), nn.Linear(6, 3)), (N, 5)),
    "PReLU by channel": Kind(lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.PReLU(3), nn.Conv2d(3, 2, 2)), (2, 4, 4)),
    "a raw parameter": Kind(
        last(lambda net, x: net.a(x) * net.gain, a=lambda: nn.Linear(5, 3), gain=lambda: nn.Parameter(torch.ones(3))), (5,), ALONE
    ),
    "a raw parameter and an LSTM": Kind(
        last(
            lambda net, x: net.r(x + net.place)[0],
            r=lambda: nn.LSTM(3, 4, batch_first=True),
            place=lambda: nn.Parameter(torch.ones(N, 3)),
        ),
        (N, 3),
        ALONE,
    ),
    "a table that is the output's weight": Kind(
        last(tied, table=lambda: nn.Embedding(7, 5), middle=lambda: nn.Linear(5, 5)), (N,), ALONE, tokens=7
    ),
    "a table and a layer with one weight": Kind(tied_layers, (N,), tokens=7),
    "a layer called twice": Kind(ab(lambda net, x: net.b(net.a(torch.tanh(net.a(x))))), (5,)),
    "a layer called twice on sequences": Kind(ab(lambda net, x: net.b(net.a(torch.tanh(net.a(x))))), (N, 5)),
    "a layer that is not called": Kind(ab(lambda net, x: net.a(x)), (5,)),
    "a layer whose output goes nowhere": Kind(ab(lambda net, x: net.a(x) + net.b(x).detach().sum(1, keepdim=True)), (5,)),
    "a layer without gradients": Kind(ab(cut_off), (5,)),
    "a checkpoint": Kind(ab(checkpointed), (5,)),
    "a script": Kind(scripted, (5,), ALONE),
    "layers on a row without examples": Kind(
        last(one_row, a=lambda: nn.Linear(5, 6), c=lambda: nn.Conv1d(1, 1, 2), b=lambda: nn.Linear(5, 3)), (5,)
    ),
    "a gradient in the network": Kind(ab(with_inner_gradient), (5,), ALONE),
    "transformations in the network": Kind(ab(under_func), (5,), ALONE),
    "a hook on a slope": Kind(ab(slope_turned), (5,)),
    "a layer of width zero": Kind(wide, (5,), ALONE),
    "many places in a table": Kind(
        last(lambda net, x: net.b(net.a(x).mean(1)), a=lambda: nn.Embedding(9, 5), b=lambda: nn.Linear(5, 3)), (300,), tokens=9
    ),
    "a table with a largest norm": Kind(lambda: nn.Sequential(nn.Embedding(7, 5, max_norm=0.5), nn.Linear(5, 3)), (N,), tokens=7),
    "a subclass": Kind(lambda: nn.Sequential(Scaled(5, 4), nn.Tanh(), nn.Linear(4, 3)), (5,), ALONE),
    "parametrized weights": Kind(
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)), (5,), ALONE
    ),
    "frozen layers": Kind(lambda: frozen(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), "0."), (5,)),
    "a frozen weight with a bias that trains": Kind(
        lambda: frozen(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), "0.weight", "2."), (5,)
    ),
    "a frozen transformer under a head": Kind(
        lambda: frozen(nn.Sequential(nn.Embedding(7, 8), encoder(batch_first=True).eval(), nn.Linear(8, 3)), "0.", "1."),
        (N,),
        tokens=7,
    ),
    "a vision transformer": Kind(lambda: build("vit-small", (1, 8, 8), 3, 1, width=12, depth=2, heads=3), (1, 8, 8)),
    "activations that overwrite": Kind(
        lambda: nn.Sequential(
            nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Hardtanh(inplace=True), nn.Linear(6, 3)
        ),
        (5,),
    ),
    "an output overwritten": Kind(ab(overwriting), (5,), ALONE),
    "an output overwritten further up": Kind(ab(overwriting_later), (5,), ALONE),
    "a decision about values": Kind(last(deciding, a=lambda: nn.Linear(5, 3), b=lambda: nn.Linear(5, 3)), (5,), LOOP),
    "a result filled in": Kind(ab(filling), (N, 5), LOOP),
    "Softmax, pooling": Kind(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 1),
            nn.AvgPool2d(2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 4),
            nn.Softmax(1),
        ),
        (2, 10, 10),
    ),
    "activations": Kind(
        lambda: nn.Sequential(
            *(
                part
                for act in (nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.LeakyReLU, nn.Mish, nn.Sigmoid, nn.Hardswish)
                for part in (nn.Linear(5, 5), act())
            )
        ),
        (5,),
    ),
    "GLU, LogSoftmax, local responses": Kind(
        lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.LocalResponseNorm(2), nn.GLU(1), nn.Conv1d(2, 3, 1), nn.LogSoftmax(1)),
        (2, 6),
    ),
    "PixelShuffle, Upsample": Kind(
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 2),
            nn.PixelShuffle(2),
            nn.Conv2d(2, 2, 2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2, 1, 2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
        ),
        (2, 5, 5),
    ),
    "Unfold, Fold, Unflatten": Kind(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 1),
            nn.Unfold(2, stride=2),
            nn.Flatten(),
            nn.Linear(32, 32),
            nn.Unflatten(1, (8, 4)),
            nn.Fold((4, 4), 2, stride=2),
        ),
        (1, 4, 4),
    ),
    "padding layers": Kind(
        lambda: nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(2, 3, 2), nn.ZeroPad2d(1), nn.Conv2d(3, 2, 3), nn.ReplicationPad2d(1)
        ),
        (2, 4, 4),
    ),
    "AlphaDropout and Dropout at 0": Kind(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.0), nn.Linear(6, 4), nn.AlphaDropout(0.0), nn.Linear(4, 3)), (5,)
    ),
    "ParameterList": Kind(
        last(lambda net, x: x @ net.parts[0] + net.parts[1], parts=lambda: nn.ParameterList([torch.randn(5, 3), torch.randn(3)])),
        (5,),
        ALONE,
    ),
}


def losses(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Smooth, unlike in every coordinate of the output, and dependent on the target."""
    flat = out.flatten(1)
    ramp = torch.linspace(0.5, 2.0, flat.shape[1], dtype=flat.dtype)
    return (torch.sin(flat + target[:, None]) * ramp).mean(1)


def batch(kind: Kind, dtype: torch.dtype, n: int = N) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = kind.make().to(dtype)
    with torch.no_grad():
        for p in net.parameters():
            p += 0.05 * torch.randn_like(p)
    x = torch.randint(0, kind.tokens, (n, *kind.shape)) if kind.tokens else torch.randn(n, *kind.shape, dtype=dtype)
    return net, x, torch.rand(n, dtype=dtype)


CASES = [(name, vectorised) for name, kind in KINDS.items() if kind.route != LOOP]
CASES += [(name, per_example_gradients) for name, kind in KINDS.items() if kind.route == BATCH]


@pytest.mark.few(80)
@pytest.mark.parametrize(
    ("name", "made", "dtype", "tolerance"),
    [(*case, torch.float64, 1e-12) for case in CASES]
    + [pytest.param(*case, torch.float32, 1e-6, marks=[pytest.mark.slow] * (i % 4 > 0)) for i, case in enumerate(CASES)],
)
def test_gradients_equal_one_backward_pass_for_each_example(
    name: str, made: Callable[..., tuple[list[Block], torch.Tensor]], dtype: torch.dtype, tolerance: float
) -> None:
    kind = KINDS[name]
    net, x, y = batch(kind, dtype)
    exact, alone = one_by_one(net, x, y, losses)
    blocks, each = made(net, x, y, losses)
    wanted, found = rows(exact), rows(blocks)
    assert wanted.shape == found.shape == (N, sum(p.numel() for p in net.parameters() if p.requires_grad))
    assert float(wanted.abs().max()) > 1e-3, "gradients of zero would show nothing"
    truth = rows(one_by_one(copied(net).double(), x if kind.tokens else x.double(), y.double(), losses)[0])
    own = float((wanted - truth).abs().max())  # what rounding does to one example after the other, by processor
    assert own <= 4 * tolerance * float(truth.abs().max())
    assert float((found - truth).abs().max()) <= tolerance * float(truth.abs().max()) + own
    torch.testing.assert_close(each, alone, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.route == LOOP])
def test_what_vmap_cannot_run_takes_a_loop_only_where_it_is_asked_for(name: str) -> None:
    net, x, y = batch(KINDS[name], torch.float32)
    with pytest.raises((RuntimeError, NotImplementedError)):
        per_example_gradients(net, x, y, losses)
    assert rows(per_example_gradients(net, x, y, losses, loop=True)[0]).isfinite().all()


@pytest.mark.parametrize("name", [name for name in KINDS if name != "EmbeddingBag, max"])  # its rules do not fit this option
def test_networks_of_known_layers_alone_are_computed_in_batches(name: str) -> None:
    net = KINDS[name].make()
    assert per_example.known(net) == (KINDS[name].route == BATCH and not isinstance(net, Net))


def test_every_rule_has_a_kind() -> None:
    used = {type(layer) for kind in KINDS.values() for layer in kind.make().modules()}
    assert {t for t in RULES if t not in used} <= {nn.BatchNorm1d, nn.BatchNorm3d}
    assert len(used & set(RULES)) >= 25


def gradients(name: str, chosen: torch.Tensor) -> torch.Tensor:
    net, x, y = batch(KINDS[name], torch.float32, 24)
    torch.manual_seed(0)
    return rows(per_example_gradients(net, x[chosen], y[chosen], losses, loop=KINDS[name].route == LOOP)[0])


@pytest.mark.few(30)
@pytest.mark.parametrize("name", KINDS)
def test_in_passes_of_one_length_a_gradient_has_the_same_bits_whoever_else_is_there(name: str) -> None:
    others = torch.arange(24).flip(0).index_fill(0, torch.arange(12, 24), 0)
    others[:12] = torch.arange(12)
    assert torch.equal(gradients(name, others)[:12], gradients(name, torch.arange(24))[:12])


@pytest.mark.few(20)
@pytest.mark.parametrize("name", KINDS)
def test_where_in_its_pass_an_example_is_moves_its_gradient_by_rounding_alone(name: str) -> None:
    """Functions such as tanh may round otherwise at the end of a vector. `pytest -rP` prints by how much."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    own = gradients(name, torch.arange(24))[order]
    apart = (gradients(name, order) - own).norm(dim=1) / own.norm(dim=1)
    print(f"{float(apart.nan_to_num().max()):.1e} {name}")
    assert bool((apart.nan_to_num() <= 1e-6).all())
