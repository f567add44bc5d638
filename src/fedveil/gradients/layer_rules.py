"""Closed forms of per-example gradients by layer: linear maps, convolutions, tables, norms, attention, recurrent layers.

A rule computes the forward of its layer with the parameters as constants, and places a tap at the output (see `taps`).

In a recurrent layer, the gates of a step depend on W x_t + U h_(t-1) + b. The slope (derivative of the loss) at this sum is the
slope at W x_t, which is one product for all steps; so one tap per layer and direction gives the gradients of W, U and b.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.gradients.gradient_blocks import Block, Dense, lookups
from fedveil.gradients.taps import NoRule, Rule, Taps, Use, channel_scale, folded, lookup, outer, places, product, scale, shift

if TYPE_CHECKING:
    from torch import Tensor

    State = tuple[Tensor, ...]


def recurrent(taps: Taps, layer: nn.RNNBase, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """Compute the forward of `nn.RNN`, `nn.GRU` and `nn.LSTM`."""
    if not isinstance(x, torch.Tensor) or x.dim() != 3:
        raise NoRule  # packed sequences, and a single sequence without a batch
    x = x.transpose(0, 1) if layer.batch_first else x
    directions = 2 if layer.bidirectional else 1
    starts = _starts(layer, x, state, directions)
    where: tuple[Taps, nn.Module, str] = (taps, layer, layer.mode)
    ends: list[State] = []
    for level in range(layer.num_layers):
        outputs = []
        for reverse in range(directions):
            names = [
                f"{name}_l{level}{'_reverse' if reverse else ''}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ]
            projection = getattr(layer, names[1].replace("hh", "hr"), None)
            parameters = [getattr(layer, name, None) for name in names]
            start = tuple(part[len(ends)] for part in starts)
            output, end = _sweep(where, x.flip(0) if reverse else x, start, parameters, projection)
            outputs.append(output.flip(0) if reverse else output)
            ends.append(end)
        x = torch.cat(outputs, -1) if reverse else outputs[0]
        if level + 1 < layer.num_layers:
            x = F.dropout(x, layer.dropout, layer.training)
    last = tuple(torch.stack(part) for part in zip(*ends, strict=True))
    return x.transpose(0, 1) if layer.batch_first else x, last if layer.mode == "LSTM" else last[0]


def cell(taps: Taps, layer: Any, x: Tensor, state: Any = None) -> Any:
    """Compute the forward of `nn.RNNCell`, `nn.GRUCell` and `nn.LSTMCell`."""
    if x.dim() != 2:
        raise NoRule
    mode = {nn.GRUCell: "GRU", nn.LSTMCell: "LSTM"}.get(type(layer)) or f"RNN_{layer.nonlinearity.upper()}"
    zero = x.new_zeros(len(x), layer.hidden_size)
    start = _states(((zero, zero) if mode == "LSTM" else zero) if state is None else state)
    parameters = [layer.weight_ih, layer.weight_hh, layer.bias_ih, layer.bias_hh]
    _, end = _sweep((taps, layer, mode), x[None], start, parameters, None)
    return end if mode == "LSTM" else end[0]


def _starts(layer: nn.RNNBase, x: Tensor, state: Any, directions: int) -> State:
    if state is not None:
        return _states(state)
    n, levels = x.shape[1], layer.num_layers * directions
    hidden = x.new_zeros(levels, n, layer.proj_size or layer.hidden_size)
    return (hidden, x.new_zeros(levels, n, layer.hidden_size)) if layer.mode == "LSTM" else (hidden,)


def _states(state: Any) -> State:
    return (state,) if isinstance(state, torch.Tensor) else tuple(state)


def _sweep(
    where: tuple[Taps, nn.Module, str], x: Tensor, state: State, parameters: list[Any], projection: nn.Parameter | None
) -> tuple[Tensor, State]:
    """Run one layer in one direction; return the outputs [steps, batch, width] for x [steps, batch, ...], and the last state."""
    taps, layer, mode = where
    of_input, of_state, input_bias, state_bias = parameters
    weight, bias = taps.constant(of_state), taps.constant(state_bias)
    shift = taps.constant(input_bias)
    if mode != "GRU" and bias is not None:
        shift, bias = shift + bias, None
    drive = F.linear(x, taps.constant(of_input), shift)
    before: list[Tensor] = []  # h_(t-1) of all steps
    resets: list[Tensor] = []

    by_input = by_state = scale()
    by_weight = Use(outer, lambda: (before[0],))
    if mode == "GRU":
        by_state = Use(_gru_shift, lambda: (torch.stack(resets),))
        by_weight = Use(_gru_outer, lambda: (before[0], torch.stack(resets)))
    uses = (of_input, product(x)), (of_state, by_weight), (input_bias, by_input), (state_bias, by_state)
    drive = taps.tap(layer, drive, *uses)
    if mode == "LSTM" and len(x) > 1 and projection is None and drive.dtype == weight.dtype:
        first = state[0]
        hidden, cells, *_ = _Lstm.apply(drive, *state, weight)  # type: ignore[no-untyped-call]
        before.append(torch.cat((first[None], hidden[:-1])))
        return hidden, (hidden[-1], cells)
    hidden, kept = [], [state[0]]
    for step in drive.unbind(0):
        state, reset = _step(mode, step, state, weight, bias)
        if projection is not None:
            short = F.linear(state[0], taps.constant(projection))
            state = (taps.tap(layer, short, (projection, product(state[0]))), *state[1:])
        hidden.append(state[0])
        resets.append(reset)
    before.append(torch.stack(kept + hidden[:-1]))
    return torch.stack(hidden), state


def _at_state(slope: Tensor, reset: Tensor) -> Tensor:
    """Return the slope at the contribution of a GRU's last state to the gates; the third is multiplied by the reset gate."""
    size = reset.shape[-1]
    return torch.cat((slope[..., : 2 * size], slope[..., 2 * size :] * reset), -1)


def _gru_shift(slope: Tensor, n: int, reset: Tensor) -> Block:
    return shift(_at_state(slope, reset), n)


def _gru_outer(slope: Tensor, n: int, before: Tensor, reset: Tensor) -> Block:
    return outer(_at_state(slope, reset), n, before)


BY_PLACES = frozenset((outer, shift, _gru_outer, _gru_shift))
"""Uses for which the slopes and inputs of several calls of a layer may be concatenated, as if it had been called once."""


def _step(mode: str, drive: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> tuple[State, Tensor]:
    """Return the next state, and the reset gate of a GRU."""
    h = state[0]
    from_state = F.linear(h, weight, bias)
    if mode == "GRU":
        reset, update = torch.sigmoid(drive + from_state).chunk(3, -1)[:2]
        new = torch.tanh(drive.chunk(3, -1)[2] + reset * from_state.chunk(3, -1)[2])
        return (new + update * (h - new),), reset
    if mode == "LSTM":
        i, f, g, o = (drive + from_state).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return (torch.sigmoid(o) * torch.tanh(c), c), h
    activation = torch.tanh if mode == "RNN_TANH" else torch.relu
    return (activation(drive + from_state),), h


class _Lstm(torch.autograd.Function):
    """All steps of an LSTM with few calls per step; U counts as a constant.

    It returns the outputs, the last cell, and the inputs of the backward pass: gates, new values, cells before and after.
    """

    @staticmethod
    def forward(drive: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        gates, hidden = torch.empty_like(drive), drive.new_empty(*drive.shape[:2], h.shape[-1])
        cells, squashed, news = torch.empty_like(hidden), torch.empty_like(hidden), torch.empty_like(hidden)
        parts = gates, *gates.chunk(4, -1), news, cells, squashed, hidden
        before, back = c, weight.t()
        # make the views of all steps at once: one by one they would take as long as the arithmetic
        for now, step, i, f, g, o, new, cell, tanh, out in zip(drive, *(part.unbind(0) for part in parts), strict=True):
            torch.addmm(now, h, back, out=step)
            _tanh(g, new)
            step.sigmoid_()  # includes g, which is not used: leaving it out would cost more
            c = torch.mul(i, new, out=cell).addcmul_(f, c)
            h = torch.mul(o, _tanh(c, tanh), out=out)
        return hidden, c.clone(), gates, news, torch.cat((before[None], cells[:-1])), squashed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*output[2:], inputs[3])

    @staticmethod
    def backward(ctx: Any, of_hidden: Tensor, of_cell: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *_LstmSlopes.apply(*ctx.saved_tensors, of_hidden, of_cell), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _batched(_Lstm, info.batch_size, (1, 0, 0, None), in_dims, inputs)


class _LstmSlopes(torch.autograd.Function):
    """The slopes at the input term and at the first state, from the results of `_Lstm` and the slopes at its outputs."""

    @staticmethod
    def forward(
        gates: Tensor, new: Tensor, before: Tensor, squashed: Tensor, weight: Tensor, of_hidden: Tensor, of_cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        i, f, _, o = gates.chunk(4, -1)
        into_cell = o * (1 - squashed.square())
        # the slope of each gate is a factor times the slope of the cell, or for o that of the output
        factors = torch.cat((new, before, i, squashed), -1).mul_(gates).mul_(1 - gates)
        torch.mul(i, 1 - new.square(), out=factors.chunk(4, -1)[2])
        steps, n, size = gates.shape
        slopes = gates.new_empty(n, steps, size).transpose(0, 1)  # grouped by example, as the products need them
        parts = of_hidden, into_cell, f, factors, slopes
        back, c = torch.zeros_like(of_hidden[0]), of_cell
        for slope, into, keep, factor, step in zip(*(p.unbind(0)[::-1] for p in parts), strict=True):
            h = back.add_(slope)
            c = torch.addcmul(c, h, into)
            torch.mul(factor, torch.cat((c, c, c, h), -1), out=step)
            back = step @ weight
            c.mul_(keep)
        return slopes, back, c

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _batched(_LstmSlopes, info.batch_size, (1, 1, 1, 1, None, 1, 0), in_dims, inputs)


def _batched(
    function: Any, n: int, rows: tuple[int | None, ...], in_dims: Any, inputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the function for n examples at once, whose batches are concatenated in dimension `rows` of each input."""

    def folded(tensor: Tensor, row: int | None, dim: int | None) -> Tensor:
        if row is None:
            return tensor if dim is None else tensor.select(dim, 0)  # weights are the same for all examples
        whole = (
            tensor.unsqueeze(row).expand(*tensor.shape[:row], n, *tensor.shape[row:]) if dim is None else tensor.movedim(dim, row)
        )
        return whole.flatten(row, row + 1).contiguous()

    found = function.apply(*map(folded, inputs, rows, in_dims))
    return tuple(out.unflatten(-2, (n, -1)) for out in found), tuple(out.dim() - 2 for out in found)


def _tanh(x: Tensor, out: Tensor) -> Tensor:
    """Write tanh to `out`; on CPUs by numpy, which is several times as fast as torch."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return torch.tanh(x, out=out)
    np.tanh(x.numpy(), out=out.numpy())
    return out


_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


def attention(taps: Taps, layer: nn.MultiheadAttention, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the layer's forward. `is_causal` is only a hint about `attn_mask`, so the mask is used as given."""
    bound = _SIGNATURE.bind(layer, *arguments, **options)
    bound.apply_defaults()
    said = bound.arguments
    query, mask = said["query"], said["attn_mask"]
    added_keys = layer.bias_k is not None or layer.add_zero_attn
    if query.dim() != 3 or added_keys or (said["is_causal"] and mask is None):
        raise NoRule
    q, k, v = (_heads(layer, part) for part in _projected(taps, layer, query, said["key"], said["value"]))
    hidden = _mask(layer, mask, said["key_padding_mask"], q)
    scores = (q / math.sqrt(layer.head_dim)) @ k.mT
    weights = torch.softmax(scores if hidden is None else scores + hidden, -1)
    weights = F.dropout(weights, layer.dropout, layer.training)
    mixed = (weights @ v).transpose(1, 2).flatten(2)
    mixed = mixed if layer.batch_first else mixed.transpose(0, 1)
    last = layer.out_proj
    out = F.linear(mixed, taps.constant(last.weight), taps.constant(last.bias))
    out = taps.tap(layer, out, (last.weight, product(mixed)), (last.bias, scale()))
    if not said["need_weights"]:
        return out, None
    return out, weights.mean(1) if said["average_attn_weights"] else weights


def _projected(taps: Taps, layer: Any, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return projected query, key and value; equal tensors share one product."""
    size, bias, packed = layer.embed_dim, layer.in_proj_bias, layer.in_proj_weight
    inputs = query, key, value
    parts: list[Tensor] = []
    while len(parts) < 3:
        start = stop = len(parts)
        x, table = inputs[start], packed if packed is not None else getattr(layer, f"{'qkv'[start]}_proj_weight")
        while stop == start or (packed is not None and stop < 3 and inputs[stop] is x):
            stop += 1
        rows, around = slice(start * size, stop * size), (start * size, (3 - stop) * size)

        def widened(slope: Tensor, around: tuple[int, int] = around) -> Tensor:
            return F.pad(slope, around) if any(around) else slope

        weight, shift = taps.constant(table), taps.constant(bias)
        out = F.linear(x, weight if packed is None else weight[rows], None if bias is None else shift[rows])
        use = product(x) if packed is None else product(x, widened)
        parts += torch.split(taps.tap(layer, out, (table, use), (bias, scale(slopes=widened))), size, -1)
    return parts


def _heads(layer: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """Return [batch, heads, tokens, width] from the order of the layer."""
    x = x if layer.batch_first else x.transpose(0, 1)
    return torch.unflatten(x, 2, (layer.num_heads, layer.head_dim)).transpose(1, 2)


def _mask(layer: nn.MultiheadAttention, mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the term that is added to the scores [batch, heads, tokens, tokens]; True hides, as in the layer."""

    def added(hidden: Tensor) -> Tensor:
        if hidden.dtype == torch.bool:
            return torch.zeros_like(hidden, dtype=like.dtype).masked_fill(hidden, -math.inf)
        return hidden.to(like.dtype)

    total = None
    if mask is not None:
        total = added(mask)
        total = torch.unflatten(total, 0, (-1, layer.num_heads)) if mask.dim() == 3 else total
    if padding is not None:
        hidden = added(padding)[:, None, None, :]
        total = hidden if total is None else total + hidden
    return total


def _linear(taps: Taps, layer: nn.Linear, x: Tensor) -> Tensor:
    out = F.linear(x, taps.constant(layer.weight), taps.constant(layer.bias))
    return taps.tap(layer, out, (layer.weight, product(x)), (layer.bias, scale()))


def _bilinear(taps: Taps, layer: nn.Bilinear, left: Tensor, right: Tensor) -> Tensor:
    out = F.bilinear(left, right, taps.constant(layer.weight), taps.constant(layer.bias))

    def weight(slope: Tensor, n: int, left: Tensor, right: Tensor) -> Block:
        return outer(slope, n, (left[..., :, None] * right[..., None, :]).flatten(-2))

    return taps.tap(layer, out, (layer.weight, Use(weight, (left, right))), (layer.bias, scale()))


# --- convolutions ------------------------------------------------------------------------------------------------------


def _convolution(taps: Taps, layer: Any, x: Tensor) -> Tensor:
    if x.dim() != layer.weight.dim():
        raise NoRule
    out: Tensor = layer._conv_forward(x, taps.constant(layer.weight), taps.constant(layer.bias))

    def weight(slope: Tensor, n: int, x: Tensor) -> Block:
        padding = layer._reversed_padding_repeated_twice
        mode = {"zeros": "constant"}.get(layer.padding_mode, layer.padding_mode)
        return _kernel(layer, slope, _windows(F.pad(x, padding, mode=mode), layer, slope.shape[2:]), n)

    return taps.tap(layer, out, (layer.weight, Use(weight, (x,))), (layer.bias, channel_scale()))


def _transposed_convolution(taps: Taps, layer: Any, x: Tensor, output_size: list[int] | None = None) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if x.dim() != weight.dim():
        raise NoRule
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[weight.dim() - 3]
    sides = weight.dim() - 2
    extra = layer._output_padding(x, output_size, layer.stride, layer.padding, layer.kernel_size, sides, layer.dilation)
    constants = taps.constant(weight), taps.constant(bias)
    out: Tensor = convolve(x, *constants, layer.stride, layer.padding, extra, layer.groups, layer.dilation)

    def by_weight(slope: Tensor, n: int, x: Tensor) -> Block:
        padding = [side for side in reversed(layer.padding) for _ in range(2)]
        return _kernel(layer, x, _windows(F.pad(slope, padding), layer, x.shape[2:]), n)

    return taps.tap(layer, out, (weight, Use(by_weight, (x,))), (bias, channel_scale()))


def _windows(x: Tensor, layer: Any, sizes: torch.Size) -> Tensor:
    """Return the windows of a kernel on padded images [n, channels, *sides]: [n, places, channels * kernel].

    This is much faster than `F.unfold` on a CPU.
    """
    for i, (size, stride, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        x = x.unfold(2 + i, dilation * (size - 1) + 1, stride).narrow(2 + i, 0, sizes[i])[..., ::dilation]
    sides = range(2, 2 + len(sizes))
    ordered = x.permute(0, 1, *(i + len(sizes) for i in sides), *sides)
    return ordered.reshape(len(x), x.shape[1] * layer.weight[0, 0].numel(), -1).mT


def _kernel(layer: Any, narrow: Tensor, windows: Tensor, n: int) -> Block:
    """Return the gradient of a kernel [a, b / groups, ...] from values [n, a, *places] and windows [n, places, b * kernel]."""
    left = torch.unflatten(narrow.flatten(2), 1, (layer.groups, -1))
    right = torch.unflatten(windows, 2, (layer.groups, -1)).transpose(1, 2)
    each = (left[:, 0].bmm(right[:, 0]) if layer.groups == 1 else left @ right).flatten(1)
    return Dense(folded(each, n))


# --- tables ------------------------------------------------------------------------------------------------------------


def _embedding(taps: Taps, layer: nn.Embedding, index: Tensor) -> Tensor:
    if layer.scale_grad_by_freq:
        raise NoRule
    out = F.embedding(index, taps.constant(layer.weight), layer.padding_idx)
    if layer.max_norm is not None:  # torch writes it into the table
        size = torch.linalg.vector_norm(out.detach(), layer.norm_type, -1, keepdim=True)
        out = out * torch.where(size > layer.max_norm, layer.max_norm / (size + 1e-7), 1.0)
    return taps.tap(layer, out, (layer.weight, lookup(index, layer.num_embeddings, layer.padding_idx)))


def _embedding_bag(
    taps: Taps, layer: nn.EmbeddingBag, index: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> Tensor:
    plain = layer.max_norm is None and not layer.scale_grad_by_freq and layer.mode != "max"
    if not plain or index.dim() != 2 or per_sample_weights is not None:
        raise NoRule
    table, padding = taps.constant(layer.weight), layer.padding_idx
    out = F.embedding_bag(index, table, offsets, mode=layer.mode, padding_idx=padding)
    counted = (torch.ones_like(index) if padding is None else index != padding).to(out.dtype)

    def weight(slope: Tensor, n: int, index: Tensor, counted: Tensor) -> Block:
        shares = counted / counted.sum(1, keepdim=True).clamp_min(1) if layer.mode == "mean" else counted
        return lookups(index.reshape(n, -1), places(slope[:, None] * shares[..., None], n), layer.num_embeddings)

    return taps.tap(layer, out, (layer.weight, Use(weight, (index, counted))))


# --- normalisation and activation --------------------------------------------------------------------------------------


def _layer_norm(taps: Taps, layer: nn.LayerNorm, x: Tensor) -> Tensor:
    return _scaled(taps, layer, F.layer_norm(x, layer.normalized_shape, None, None, layer.eps))


def _rms_norm(taps: Taps, layer: nn.RMSNorm, x: Tensor) -> Tensor:
    return _scaled(taps, layer, F.rms_norm(x, layer.normalized_shape, None, layer.eps))


def _scaled(taps: Taps, layer: Any, normal: Tensor) -> Tensor:
    """Apply scale and shift along the last dimensions."""
    out, bias, size = normal, getattr(layer, "bias", None), layer.weight.numel()
    out = out * taps.constant(layer.weight)
    out = out if bias is None else out + taps.constant(bias)
    return taps.tap(layer, out, (layer.weight, scale(normal, size=size)), (bias, scale(size=size)))


def _group_norm(taps: Taps, layer: nn.GroupNorm, x: Tensor) -> Tensor:
    return _scaled_channels(taps, layer, F.group_norm(x, layer.num_groups, None, None, layer.eps))


def _instance_norm(taps: Taps, layer: Any, x: Tensor) -> Tensor:
    layer._check_input_dim(x)
    if layer.track_running_stats or x.dim() == layer._get_no_batch_dim():
        raise NoRule
    return _scaled_channels(taps, layer, F.instance_norm(x, eps=layer.eps))


def _batch_norm(taps: Taps, layer: Any, x: Tensor) -> Tensor:
    layer._check_input_dim(x)
    if layer.training or layer.running_mean is None:
        raise NoRule
    return _scaled_channels(taps, layer, F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps))


def _scaled_channels(taps: Taps, layer: Any, normal: Tensor) -> Tensor:
    channels = (-1, *[1] * (normal.dim() - 2))
    out = normal * taps.constant(layer.weight).view(channels)
    out = out if layer.bias is None else out + taps.constant(layer.bias).view(channels)
    return taps.tap(layer, out, (layer.weight, channel_scale(normal)), (layer.bias, channel_scale()))


def _prelu(taps: Taps, layer: nn.PReLU, x: Tensor) -> Tensor:
    out = F.prelu(x, taps.constant(layer.weight))

    def single(slope: Tensor, n: int, x: Tensor) -> Block:
        return Dense((slope * x.clamp_max(0)).reshape(n, -1).sum(1, keepdim=True))

    return taps.tap(layer, out, (layer.weight, Use(single, (x,)) if layer.num_parameters == 1 else channel_scale(x.clamp_max(0))))


RULES: Mapping[type, Rule] = {
    nn.Linear: _linear,
    nn.Bilinear: _bilinear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _transposed_convolution),
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding_bag,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _instance_norm),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    nn.PReLU: _prelu,
    **dict.fromkeys((nn.RNN, nn.GRU, nn.LSTM), recurrent),
    **dict.fromkeys((nn.RNNCell, nn.GRUCell, nn.LSTMCell), cell),
    nn.MultiheadAttention: attention,
}
