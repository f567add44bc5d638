"""The gradients of a batch's examples from one forward and backward pass, for networks that are made of known layers alone.

Row i of what a layer sees must be example i. That holds by construction in `known` networks: no code but torch's and ours runs in
them, and none of it reorders a batch. Two made-up examples show the rest (`shapes_of`): every tap must hold, where the shapes say
an example is in the batch, what it holds for that example alone; so must the losses, and the gradients that come of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from types import BuiltinFunctionType
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedveil.release.gradient_blocks import Block, Dense, combined, rows
from fedveil.release.layer_rules import RULES
from fedveil.release.taps import Examples, NotByHand, Tap, Taps, Use, installed

if TYPE_CHECKING:
    from torch import Tensor

Losses = Callable[["Tensor", "Tensor"], "Tensor"]
"""(outputs, targets) -> the loss of each example [n]."""
Shapes = tuple[tuple[int, ...], ...]
"""Of each tapped output for one example."""

_LAYERS = frozenset(
    f"torch.nn.modules.{name}"
    for name in (
        *("activation", "batchnorm", "container", "conv", "dropout", "flatten", "fold", "instancenorm", "linear"),
        *("normalization", "padding", "pixelshuffle", "pooling", "sparse", "transformer", "upsampling"),
    )
)
"""Files of torch whose layers keep the order of a batch, whatever their options; recurrent ones return several tensors."""


def known(module: nn.Module) -> bool:
    """Whether no code but torch's and ours runs in a network, in layers that keep the order of a batch.

    That is a network of ours, or an `nn.Sequential` whose parts have exactly torch's types, without hooks, parametrizations or
    functions of somebody else's.
    """
    return all(map(_known_part, module.modules())) and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether a trained parameter has a hook, which acts on gradients of the ordinary backward pass alone."""
    return any(p._backward_hooks for p in trainable(module).values())


def _known_part(part: nn.Module) -> bool:
    kind, file = type(part), type(part).__module__
    if not file.startswith("fedveil.") and (file not in _LAYERS or getattr(sys.modules[file], kind.__name__, None) is not kind):
        return False
    return not any(
        (value and name.endswith("_hooks")) or name == "forward" or _foreign(value) for name, value in vars(part).items()
    )


def _foreign(value: object) -> bool:
    """Whether it is a function of somebody else's, such as the activation of a transformer."""
    if not callable(value) or isinstance(value, type | BuiltinFunctionType):
        return False
    return not (getattr(value, "__module__", None) or "").startswith(("torch.", "fedveil."))


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name, in order."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def gradients(module: nn.Module, x: Tensor, y: Tensor, losses: Losses, shapes: Shapes) -> tuple[list[Block], Tensor]:
    """The blocks of the trainable parameters, in order, and the losses [n].

    Args:
        shapes: what `shapes_of` found.

    Raises:
        NotByHand: the pass was not as these say.
    """
    taps, each = _tapped(module, x, y, losses)
    examples = [Examples.found(shape, tap.output.shape, len(y)) for tap, shape in zip(taps, shapes, strict=True)]
    parameters = trainable(module).values()
    slopes = _slopes(each, taps, parameters)
    parts: dict[int, list[Block]] = {id(p): [] for p in parameters}
    with torch.no_grad():
        for tap, where, slope in zip(taps, examples, slopes, strict=True):
            if where is None or not tap.untouched():
                raise NotByHand
            if slope is not None:
                blocks: dict[Use, Block] = {}
                for p, use in tap.uses:
                    if use not in blocks:
                        blocks[use] = use(slope.to(p.dtype), where)
                    parts[id(p)].append(blocks[use])
        idle = {id(p): Dense(p.new_zeros(len(y), p.numel())) for p in parameters if not parts[id(p)]}
    return [combined(found) if found else idle[key] for key, found in parts.items()], each.detach()


def _tapped(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> tuple[list[Tap], Tensor]:
    taps = Taps()
    with installed(taps, module, RULES):
        each = losses(module(x), y)
    if each.shape != (len(y),):
        raise NotByHand
    return taps.all, each


def _slopes(each: Tensor, taps: list[Tap], parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """The slopes of the losses at the taps; a parameter that has one of its own is used outside of known layers."""
    if not each.requires_grad:
        return [None] * len(taps)
    behind = [*(tap.output for tap in taps), *parameters]
    found = torch.autograd.grad(each, behind, torch.ones_like(each), allow_unused=True)
    if any(slope is not None for slope in found[len(taps) :]):
        raise NotByHand
    return list(found[: len(taps)])


# --- what two examples show --------------------------------------------------------------------------------------------


def shapes_of(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> Shapes:
    """The shape of each tapped output for one example, from two made-up examples.

    Raises:
        NotByHand: they are not together what each is alone, or cannot be told apart; other errors of the network.
    """
    state = _random_state(x)
    passes = _three(module, x, y, losses)
    draws = not torch.equal(state, _random_state(x))
    with _without_dropout(module) if draws else nullcontext():
        shapes = _compared(module, *(_three(module, x, y, losses) if draws else passes))
        _require_gradients(module, x, y, losses, shapes)
    return shapes


Pass = tuple[list[Tap], "Tensor"]


def _three(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> tuple[Pass, Pass, Pass]:
    """Both examples together, and each alone."""
    return (
        _tapped(module, x, y, losses),
        _tapped(module, x[:1], y[:1], losses),
        _tapped(module, x[1:], y[1:], losses),
    )


def _compared(module: nn.Module, both: Pass, first: Pass, second: Pass) -> Shapes:
    _slopes(both[1], both[0], trainable(module).values())
    differ = _equal(both[1], torch.cat((first[1], second[1])), Examples(2))
    for tap, one, other in zip(both[0], first[0], second[0], strict=True):
        examples = Examples.found(one.output.shape, tap.output.shape, 2)
        if examples is None or one.output.shape != other.output.shape or not tap.untouched():
            raise NotByHand
        told = _equal(tap.output, torch.cat((one.output, other.output), examples.dim), examples)
        if not told and examples.fold > 1:
            raise NotByHand
        differ = differ or told
    if not differ:
        raise NotByHand  # two examples that cannot be told apart show nothing
    return tuple(tuple(tap.output.shape) for tap in first[0])


def _require_gradients(module: nn.Module, x: Tensor, y: Tensor, losses: Losses, shapes: Shapes) -> None:
    """Two examples' gradients must be what they are alone: layers that start at zero hide what they are handed.

    In float32 the rounding of a batch of another size may turn a ReLU on or off; what differs then must agree in float64.
    """
    if _agree(module, x, y, losses, shapes):
        return
    if x.dtype != torch.float32 or not _agree(deepcopy(module).double(), x.double(), y, losses, shapes):
        raise NotByHand


def _agree(module: nn.Module, x: Tensor, y: Tensor, losses: Losses, shapes: Shapes) -> bool:
    blocks, _ = gradients(module, x, y, losses, shapes)
    by_hand, parameters = rows(blocks), list(trainable(module).values())
    for i, one in enumerate(by_hand):
        (loss,) = losses(module(x[i : i + 1]), y[i : i + 1])
        found = torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True) if loss.requires_grad else ()
        alone = torch.cat([g.to_dense().reshape(-1) for g in found]) if found else torch.zeros_like(one)
        if not bool((one - alone).norm() <= 1e-2 * alone.norm() + 1e-30):
            return False
    return True


def _equal(both: Tensor, alone: Tensor, examples: Examples) -> bool:
    """Whether two examples differ here; they must be together what they are alone."""
    one, other = examples.first(both.detach()), examples.first(alone.detach())
    margin = 1e-4 * float(other.abs().max()) + 1e-30 if other.numel() else 0.0
    if not (math.isfinite(margin) and bool(((one - other).abs() <= margin).all())):
        raise NotByHand
    return bool(((other[0] - other[1]).abs() > 10 * margin).any())


def _random_state(x: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()


@contextmanager
def _without_dropout(module: nn.Module) -> Iterator[None]:
    training = [layer for layer in module.modules() if layer.training]
    try:
        for layer in training:
            layer.training = False
        yield
    finally:
        for layer in training:
            layer.training = True
