"""Where recurrent layers are tapped: at what drives their gates, of which input and last state are linear functions.

A step's gates depend on W x_t + U h_(t-1) + b. The slope there is the slope of W x_t, which one product gives for all steps;
so W, U and b get their gradients from one tap for each layer and direction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.release.taps import NoRule, Taps, Use, outer, product, scale, shift

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.release.gradient_blocks import Block

    State = tuple[Tensor, ...]


def recurrent(taps: Taps, layer: nn.RNNBase, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """The forward of `nn.RNN`, `nn.GRU` and `nn.LSTM`."""
    if not isinstance(x, torch.Tensor) or x.dim() != 3:
        raise NoRule  # packed sequences, and a single one
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
    """The forward of `nn.RNNCell`, `nn.GRUCell` and `nn.LSTMCell`."""
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
    """One layer in one direction: the outputs [steps, batch, width] for x [steps, batch, ...], and the last state."""
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
    """The slope at what the last state of a GRU adds to the gates, of which the third is multiplied by the reset gate."""
    size = reset.shape[-1]
    return torch.cat((slope[..., : 2 * size], slope[..., 2 * size :] * reset), -1)


def _gru_shift(slope: Tensor, n: int, reset: Tensor) -> Block:
    return shift(_at_state(slope, reset), n)


def _gru_outer(slope: Tensor, n: int, before: Tensor, reset: Tensor) -> Block:
    return outer(_at_state(slope, reset), n, before)


BY_PLACES = frozenset((outer, shift, _gru_outer, _gru_shift))
"""Uses whose slopes and inputs at several calls of a layer may be put together, as if it had been called once."""


def _step(mode: str, drive: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> tuple[State, Tensor]:
    """The next state, and the reset gate of a GRU."""
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
    """All steps of an LSTM with few calls a step; U counts as a constant. Returned are the outputs, the last cell, and what the
    slopes need: the gates, the new values, the cells before and after."""

    @staticmethod
    def forward(drive: Tensor, h: Tensor, c: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        gates, hidden = torch.empty_like(drive), drive.new_empty(*drive.shape[:2], h.shape[-1])
        cells, squashed, news = torch.empty_like(hidden), torch.empty_like(hidden), torch.empty_like(hidden)
        parts = gates, *gates.chunk(4, -1), news, cells, squashed, hidden
        before, back = c, weight.t()
        # views of all steps are made at once: one by one they would take as long as the arithmetic
        for now, step, i, f, g, o, new, cell, tanh, out in zip(drive, *(part.unbind(0) for part in parts), strict=True):
            torch.addmm(now, h, back, out=step)
            _tanh(g, new)
            step.sigmoid_()  # that of g, which is not used, costs less than leaving it out
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
    """The slopes at the drive and at the first state, from what `_Lstm` returned and the slopes of its outputs."""

    @staticmethod
    def forward(
        gates: Tensor, new: Tensor, before: Tensor, squashed: Tensor, weight: Tensor, of_hidden: Tensor, of_cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        i, f, _, o = gates.chunk(4, -1)
        into_cell = o * (1 - squashed.square())
        # the slope of each gate is that of the cell, for o that of the output, by a factor
        factors = torch.cat((new, before, i, squashed), -1).mul_(gates).mul_(1 - gates)
        torch.mul(i, 1 - new.square(), out=factors.chunk(4, -1)[2])
        steps, n, size = gates.shape
        slopes = gates.new_empty(n, steps, size).transpose(0, 1)  # an example's are together, as the products need them
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
    """The function for n examples at once, whose batches follow each other in the dimension `rows` of each input."""

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
    """tanh into `out`; on CPUs by numpy, several times as fast as torch."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return torch.tanh(x, out=out)
    np.tanh(x.numpy(), out=out.numpy())
    return out
