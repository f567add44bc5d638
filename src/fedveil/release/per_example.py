"""The gradient of each example of a batch: an example is a call, so nothing of another one is in the reach of a user's code.

Known networks, of which no code is the user's, are computed in batches (`by_hand`); a user's loss sees one example all the same.
Every other network runs under `torch.func.vmap` over single examples. Layers of torch inside it leave the slope at their output
in the place of a gradient (`taps`), which costs little more than a batch; what else trains is differentiated as torch does it.

Each pass works on a copy of the network that shares its weights, so what the code writes on its module is gone afterwards.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C._functorch import _unwrap_for_grad, _wrap_for_grad, get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.eager_transforms import _create_differentiable, grad_increment_nesting
from torch.func import vmap

from fedveil.release import by_hand
from fedveil.release.by_hand import Losses, summed, trainable
from fedveil.release.gradient_blocks import Block, Dense, tensors_of, with_tensors
from fedveil.release.layer_rules import RULES
from fedveil.release.taps import NoRule, Taps, installed
from fedveil.tasks.task import Task
from fedveil.training.params import exchanged

if TYPE_CHECKING:
    from torch import Tensor


def per_example_gradients(
    module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses, *, loop: bool = False
) -> tuple[list[Block], Tensor]:
    """The gradient of each example's loss in the trainable parameters, in the order of `named_parameters`, and the losses [n].

    Args:
        x: examples [n, ...], numbers or tokens. y: targets [n, ...]. losses_of: (outputs, targets) -> one loss an example, [n].
        loop: one backward pass for each example, for networks and losses that `torch.func.vmap` cannot run.
    """
    if loop or len(y) == 1 and by_hand.known(module):
        return one_by_one(module, x, y, losses_of)
    if by_hand.known(module):
        try:
            return by_hand.gradients(module, x, y, _apart(losses_of))
        except NoRule:
            pass
    return vectorised(module, x, y, losses_of)


def one_by_one(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """The same by one backward pass for each example."""
    parameters = list(trainable(module).values())
    each, found = [], []
    for i in range(len(y)):
        (loss,) = losses_of(_copy(module)(x[i : i + 1].clone()), y[i : i + 1])
        found.append(_backward(loss, parameters))
        each.append(loss.detach())
    stacked = (torch.stack(g) for g in zip(*found, strict=True))
    return [Dense(g.reshape(len(y), p.numel())) for g, p in zip(stacked, parameters, strict=True)], torch.stack(each)


def _backward(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Dense gradients; zeros where the loss follows from none of the parameters."""
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    return [g.to_dense() for g in torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True)]


def _apart(losses: Losses) -> Losses:
    """Losses of which each is computed from its own example alone, unless they are those of a built-in task."""
    owner = getattr(losses, "__self__", None)
    if isinstance(owner, Task) and not owner.own:
        return losses
    return vmap(lambda output, target: losses(output[None], target[None])[0], randomness="different")


def _copy(module: nn.Module) -> nn.Module:
    """A copy that shares the parameters, and the scripts, which cannot be copied without theirs."""
    shared = (*module.parameters(), *(part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)))
    return deepcopy(module, {id(one): one for one in shared})


# --- vmap --------------------------------------------------------------------------------------------------------------


def vectorised(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """The same under `torch.func.vmap`."""
    parameters, network = list(trainable(module).values()), _copy(module)
    values, forms = [p.detach() for p in parameters], list[tuple[int, Block]]()

    def one(example: Tensor, target: Tensor) -> tuple[Tensor, list[dict[str, Tensor]]]:
        with grad_increment_nesting() as level, torch.enable_grad():
            leaves = [_create_differentiable(_wrap_for_grad(value, level)) for value in values]
            taps = Taps(leaves, _leaf, _version, [bool(p._backward_hooks) for p in parameters])
            with exchanged(zip(parameters, leaves, strict=True), module, network), installed(taps, network, RULES):
                (loss,) = losses_of(network(_wrap_for_grad(example, level)[None]), _wrap_for_grad(target, level)[None])
                blocks = _blocks(loss, taps, parameters)
            forms[:] = blocks
            found = [{name: _unwrap_for_grad(t, level) for name, t in tensors_of(block).items()} for _, block in blocks]
            return _unwrap_for_grad(loss.detach(), level), found

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        each, found = vmap(one, randomness="different")(x.clone(), y.clone())
    parts: dict[int, list[Block]] = {}
    for (number, form), tensors in zip(forms, found, strict=True):
        block = with_tensors(form, {name: t.detach().flatten(0, 1) for name, t in tensors.items()})
        parts.setdefault(number, []).append(block)
    return [summed(parts.get(i, []), p, len(y)) for i, p in enumerate(parameters)], each.detach()


def _blocks(loss: Tensor, taps: Taps, parameters: list[nn.Parameter]) -> list[tuple[int, Block]]:
    """What the uses of each parameter, by number, contribute to the gradient of one example."""
    if not loss.requires_grad:
        return []
    before = list(taps.all)  # a checkpoint taps again in the backward pass
    behind = [*(tap.output for tap in before), *taps.parameters]
    slopes = torch.autograd.grad(loss, behind, allow_unused=True)
    taps.all = before
    with torch.no_grad():
        parts = taps.gradients(slopes[: len(before)], 1)
        found = [(number, block) for number, blocks in parts.items() for block in blocks]
        for number, (slope, p) in enumerate(zip(slopes[len(before) :], parameters, strict=True)):
            if slope is not None:
                found.append((number, Dense(_hooked(slope, p).reshape(1, -1))))
    return found


def _hooked(slope: Tensor, p: nn.Parameter) -> Tensor:
    """The gradient as the hooks of its parameter leave it."""
    for hook in list((p._backward_hooks or {}).values()):
        changed = hook(slope)
        slope = slope if changed is None else changed
    return slope


def _leaf(output: Tensor) -> Tensor:
    """An output with a slope, which may be overwritten, unlike a leaf itself."""
    made: Tensor = _create_differentiable(output) + 0.0
    return made


def _version(tensor: Tensor) -> int:
    """How often the memory of a tensor was overwritten, below all transformations."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor._version
