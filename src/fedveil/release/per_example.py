"""The gradient of each example of a batch: an example is a call, so nothing of another one is in the reach of a user's code.

Known networks, of which no code is the user's, are computed in batches (`by_hand`); a user's loss sees one example all the same.
Every other network runs under `torch.func.vmap` over single examples. Layers of torch inside it leave the slope at their output
in the place of a gradient (`taps`), which costs little more than a batch; what else trains is differentiated as torch does it.

Each pass works on a copy of the network that shares its weights, so what the code writes on its module is gone afterwards.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from copy import deepcopy
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._C._functorch import _unwrap_for_grad, _wrap_for_grad
from torch._functorch.eager_transforms import enable_inplace_requires_grad, grad_increment_nesting
from torch.func import vmap

from fedveil.release import by_hand
from fedveil.release.by_hand import Losses, summed
from fedveil.release.gradient_blocks import Block, Dense
from fedveil.release.layer_rules import RULES
from fedveil.release.recurrent_rules import BY_PLACES
from fedveil.release.taps import NoRule, Taps, installed, places
from fedveil.tasks.task import Task
from fedveil.training.params import exchanged, trained_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from torch import Tensor

    from fedveil.release.taps import Made, Rule


def per_example_gradients(
    module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses, *, loop: bool = False
) -> tuple[list[Block], Tensor]:
    """The gradient of each example's loss in the trainable parameters, in the order of `named_parameters`, and the losses [n].

    Args:
        x: examples [n, ...], numbers or tokens. y: targets [n, ...]. losses_of: (outputs, targets) -> one loss an example, [n].
        loop: one backward pass for each example, for networks and losses that `torch.func.vmap` cannot run.
    """
    if loop or (len(y) == 1 and by_hand.known(module)):
        return one_by_one(module, x, y, losses_of)
    if by_hand.known(module):
        try:
            return by_hand.gradients(module, x, y, _apart(losses_of))
        except NoRule:
            pass
    return vectorised(module, x, y, losses_of)


def one_by_one(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """The same by one backward pass for each example."""
    parameters, n = list(trained_parameters(module).values()), len(y)
    each, found = [], []
    for i in range(n):
        (loss,) = losses_of(_copy(module)(x[i : i + 1].clone()), y[i : i + 1])
        each.append(loss.detach())
        if loss.requires_grad:
            found.append(torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True))
        else:
            found.append(tuple(map(torch.zeros_like, parameters)))
    return [_dense(torch.stack([g.to_dense() for g in grads]), n) for grads in zip(*found, strict=True)], torch.stack(each)


def _apart(losses: Losses) -> Losses:
    """Losses of which each is computed from its own example alone, unless they are those of a built-in task."""
    owner = getattr(losses, "__self__", None)
    if isinstance(owner, Task) and not owner.own:
        return losses
    return vmap(lambda output, target: losses(output[None], target[None])[0], randomness="different")


def _copy(module: nn.Module) -> nn.Module:
    """A copy that shares the parameters, and the scripts, which cannot be copied without theirs."""
    shared = (*module.parameters(), *(part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)))
    copied: nn.Module = _copied(module, {id(one): one for one in shared})
    return copied


_ATOMS = frozenset((type(None), bool, int, float, str))
_COPYING = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return what `copy.deepcopy` returns, ten times faster for modules; results of gradients are shared."""
    if type(value) in _ATOMS or (isinstance(value, torch.Tensor) and not value.is_leaf):
        return value
    if id(value) in memo:
        return memo[id(value)]
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        made = memo[id(value)] = kind()
        target, parts = made, value
    elif isinstance(value, nn.Module) and _by_attributes(cast("Hashable", kind)):
        made = memo[id(value)] = object.__new__(kind)
        target, parts = vars(made), vars(value)
    else:
        return deepcopy(value, memo)
    for name, part in parts.items():
        target[name] = _copied(part, memo)
    return made


@lru_cache(maxsize=1024)
def _by_attributes(kind: Hashable) -> bool:
    """Whether `copy.deepcopy` copies what is of a class attribute by attribute, as classes of torch are."""
    own = (vars(one)[name] for one in cast(type, kind).__mro__ for name in _COPYING if one is not object and name in vars(one))
    return all((getattr(function, "__module__", None) or "").startswith("torch.nn.") for function in own)


# --- vmap --------------------------------------------------------------------------------------------------------------


def vectorised(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """The same under `torch.func.vmap`."""
    try:
        return _in_one_pass(module, x, y, losses_of, RULES)
    except NoRule:
        return _in_one_pass(module, x, y, losses_of, {})


def _in_one_pass(
    module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses, rules: Mapping[type, Rule]
) -> tuple[list[Block], Tensor]:
    """All examples in one pass of vmap.

    Raises:
        NoRule: the network takes slopes itself, so that rules do not give its gradients.
    """
    parameters, network = list(trained_parameters(module).values()), _copy(module)
    values = [p.detach() for p in parameters]
    uses: list[tuple[int, Callable[..., Block], int]] = []

    def one(example: Tensor, target: Tensor) -> list[Tensor]:
        with grad_increment_nesting() as level, torch.enable_grad(), enable_inplace_requires_grad(True):
            leaves = [_wrap_for_grad(value, level).requires_grad_() for value in values]
            taps = Taps([None if p._backward_hooks else leaf for p, leaf in zip(parameters, leaves, strict=True)])
            with exchanged(zip(parameters, leaves, strict=True), module, network), installed(taps, network, rules):
                (loss,) = losses_of(network(_wrap_for_grad(example, level)[None]), _wrap_for_grad(target, level)[None])
                found = _uses(loss, taps, leaves, parameters)
            uses[:] = [(number, made, len(tensors)) for number, made, tensors in found]
            return [_unwrap_for_grad(t, level) for t in (loss.detach(), *(t for *_, tensors in found for t in tensors))]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        each, *found = (tensor.detach() for tensor in vmap(one, randomness="different")(x.clone(), y.clone()))
    left = iter(tensor.flatten(0, 1) if tensor.dim() > 2 else tensor for tensor in found)
    return summed(_together([(i, made, list(islice(left, count))) for i, made, count in uses], len(y)), parameters, len(y)), each


def _together(uses: list[Made], n: int) -> list[Made]:
    """Uses of which those of a layer that was called several times, as by a loop over steps, are one where that is possible."""
    calls: dict[Any, list[list[Tensor]]] = {}
    for place, (number, made, tensors) in enumerate(uses):
        calls.setdefault((number, made) if made in BY_PLACES else place, []).append(tensors)
    found = []
    for place, (number, made, tensors) in enumerate(uses):
        each = calls.pop((number, made) if made in BY_PLACES else place, [])
        if len(each) > 1:
            tensors = [torch.cat([places(part, n) for part in parts], 1) for parts in zip(*each, strict=True)]
        if each:
            found.append((number, made, tensors))
    return found


def _uses(loss: Tensor, taps: Taps, leaves: list[Tensor], parameters: list[nn.Parameter]) -> list[Made]:
    """The uses of the parameters by which one example's loss follows from them, as `Taps.uses` returns them."""
    if not loss.requires_grad:
        return []
    if taps.asked:
        raise NoRule
    recorded, taps.all = taps.all, []  # a checkpoint taps again in the backward pass
    behind: list[Any] = [*(tap.output for tap in recorded), *leaves]
    slopes = torch.autograd.grad(loss, behind, allow_unused=True)
    taps.all = recorded
    found = taps.uses(slopes[: len(recorded)])
    for number, (slope, p) in enumerate(zip(slopes[len(recorded) :], parameters, strict=True)):
        if slope is not None:
            found.append((number, _dense, [_hooked(slope, p)[None]]))
    return found


def _dense(slope: Tensor, n: int) -> Block:
    return Dense(slope.reshape(n, slope.numel() // n))


def _hooked(slope: Tensor, p: nn.Parameter) -> Tensor:
    """The gradient as the hooks of its parameter leave it."""
    for hook in list((p._backward_hooks or {}).values()):
        changed = hook(slope)
        slope = slope if changed is None else changed
    return slope
