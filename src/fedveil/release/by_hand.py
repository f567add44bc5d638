"""The gradients of a batch's examples from one forward and backward pass, where known layers allow it.

Two made-up examples at made-up weights show whether that is right (`plan_for`): were they the client's, or the weights those that
the process meets first, how all gradients are rounded would follow from them. The network must be a function of one example,
which `torch.func.vmap` proves: it stops at a decision that depends on values. And every tap must hold, where the shapes say an
example is in the batch, what it holds for that example alone; so must the losses, and the gradients that come of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch.func import vmap
from torch.nn.modules.batchnorm import _NormBase

from fedveil.release.gradient_blocks import Block, Dense, combined, rows
from fedveil.release.layer_rules import RULES
from fedveil.release.noise import Randomness
from fedveil.release.taps import Examples, NotByHand, Tap, Taps, Use, installed
from fedveil.training.params import called_with

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor, nn

Losses = Callable[["Tensor", "Tensor"], "Tensor"]
"""(outputs, targets) -> the loss of each example [n]."""


@dataclass(frozen=True)
class Plan:
    """How a network's batches are done.

    Args:
        shapes: of each tapped output for one example; None where they are not done by hand.
        transforms: whether `torch.func` can do the network.
    """

    shapes: tuple[tuple[int, ...], ...] | None = None
    transforms: bool = True


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name, in order."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def gradients(module: nn.Module, x: Tensor, y: Tensor, losses: Losses, plan: Plan) -> tuple[list[Block], Tensor]:
    """The blocks of the trainable parameters, in order, and the losses [n].

    Raises:
        NotByHand: the pass was not as planned.
    """
    taps, each = _tapped(module, x, y, losses)
    examples = [Examples.found(shape, tap.output.shape, len(y)) for tap, shape in zip(taps, plan.shapes or (), strict=True)]
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


# --- what two made-up examples show ------------------------------------------------------------------------------------

_PLANS: WeakKeyDictionary[nn.Module, dict[Hashable, Plan]] = WeakKeyDictionary()
_MOST_PLANS = 64


def plan_for(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> Plan:
    """The plan for batches of such examples, found once for a network and kept.

    Only the shapes and types of the examples are looked at, and of the weights that train: it is the same whenever it is found.
    """
    plans = _PLANS.setdefault(module, {})
    key = _key(module, x, y, losses)
    if key not in plans:
        with Randomness(0).forward(x.device, "route"):  # the same numbers each time, and none of the run's
            found = _found(module, *_made_up(x, y), losses)
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[key] = found
    return plans[key]


@contextmanager
def transformable(module: nn.Module) -> Iterator[None]:
    """Known layers compute in ways that `torch.func` can transform; what it does slowly it does without a warning."""
    with installed(Taps(live=False), module, RULES), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def _key(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> Hashable:
    owner = getattr(losses, "__self__", losses)  # a method is another object each time, and so may be its owner
    kind = getattr(losses, "__func__", None), owner if type(owner).__hash__ is not None else type(owner)
    flags = tuple(
        (layer.training, *(p is not None and p.requires_grad for p in layer._parameters.values())) for layer in module.modules()
    )
    return x.shape[1:], x.dtype, x.device, y.shape[1:], y.dtype, kind, flags


def _made_up(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two examples and targets of the same shapes and types: numbers from 0 to 1; of whole ones, tokens 0 and 1 and class 0.

    The second example is all ones, and each row of the first is zeros after its first place: one example's places in a row, and
    the places of both in turn, are never the same tokens; and neither example is all padding where 0 pads.
    """
    draw = torch.Generator().manual_seed(0)

    def like(values: Tensor, second: int) -> Tensor:
        made = torch.zeros(2, *values.shape[1:])
        if values.is_floating_point():
            made.uniform_(generator=draw)
        else:
            made[1] = second
            if values.dim() > 1 and values.shape[-1] > 1:
                made[0, ..., 0] = second
        return made.to(values.device, values.dtype)

    return like(x, 1), like(y, 0)


def _with_made_up_weights(module: nn.Module) -> nn.Module:
    """A copy, which shares the frozen parameters. Matrices are random and scaled by what goes into them, vectors lie around 1.

    None are zero, as where a layer starts, since that hides what the layer is handed. Statistics of batches are 0 and 1.
    """
    made = deepcopy(module, {id(p): p for p in module.parameters() if not p.requires_grad})
    draw, own = torch.Generator().manual_seed(0), {p.data_ptr() for p in trainable(module).values()}
    if any(p.data_ptr() in own for p in trainable(made).values() if p.numel()):
        raise NotByHand  # a layer that copies itself otherwise
    with torch.no_grad():
        for p in trainable(made).values():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=draw) / math.sqrt(max(1, p[0].numel())))
            else:
                p.copy_(torch.rand(p.shape, generator=draw) + 0.5)
    for layer in made.modules():
        parameters = list(layer.parameters())
        if isinstance(layer, _NormBase) and (not parameters or any(p.requires_grad for p in parameters)):
            layer.reset_running_stats()
    return made


def _found(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> Plan:
    try:
        module = _with_made_up_weights(module)
    except Exception:
        return Plan()
    try:
        with transformable(module):
            vmap(lambda one, target: losses(module(one[None]), target[None]), randomness="different")(x, y)
    except Exception:
        return Plan(transforms=False)
    try:
        _require_no_decision_on_weights(module, x, y, losses)
        state = _random_state(x)
        passes = _three(module, x, y, losses)
        draws = not torch.equal(state, _random_state(x))
        with _without_dropout(module) if draws else nullcontext():
            plan = _compared(module, *(_three(module, x, y, losses) if draws else passes))
            _require_gradients(module, x, y, losses, plan)
        return plan or Plan()  # two examples that cannot be told apart show nothing
    except Exception:
        return Plan()


def _require_no_decision_on_weights(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> None:
    """Else the network is another one at other weights, of which made-up ones show nothing."""
    weights = {name: torch.stack([p.detach(), p.detach()]) for name, p in trainable(module).items()}
    with transformable(module):
        vmap(lambda own, one, target: losses(called_with(module, own, one[None]), target[None]), randomness="different")(
            weights, x, y
        )


Pass = tuple[list[Tap], "Tensor"]


def _three(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> tuple[Pass, Pass, Pass]:
    """Both examples together, and each alone."""
    return (
        _tapped(module, x, y, losses),
        _tapped(module, x[:1], y[:1], losses),
        _tapped(module, x[1:], y[1:], losses),
    )


def _compared(module: nn.Module, both: Pass, first: Pass, second: Pass) -> Plan | None:
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
    return Plan(tuple(tuple(tap.output.shape) for tap in first[0])) if differ else None


def _require_gradients(module: nn.Module, x: Tensor, y: Tensor, losses: Losses, plan: Plan | None) -> None:
    """Two examples' gradients must be what they are alone: layers that start at zero hide what they are handed.

    In float32 the rounding of a batch of another size may turn a ReLU on or off; what differs then must agree in float64.
    """
    if plan is None or _agree(module, x, y, losses, plan):
        return
    if x.dtype != torch.float32 or not _agree(deepcopy(module).double(), x.double(), y, losses, plan):
        raise NotByHand


def _agree(module: nn.Module, x: Tensor, y: Tensor, losses: Losses, plan: Plan) -> bool:
    blocks, _ = gradients(module, x, y, losses, plan)
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
