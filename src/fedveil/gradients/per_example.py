"""The gradient of each example of a batch: by closed forms, or with one call per example.

A known network has no user-defined code, and runs on whole batches. Row i of the input of each layer is then example i, since its
layers, with their options and the number of dimensions of their inputs, neither mix nor reorder the rows of a batch. A
user-defined loss is still called for single examples.

Any other network runs under `torch.func.vmap` over single examples. Layers of torch inside it record the slope (derivative of the
loss) at their output instead of a gradient (`taps`), at little more than the cost of a batch; torch differentiates the rest.

Each pass uses a copy of the network with shared weights, so attributes that its code sets on the module do not persist.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import islice
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._C._functorch import _unwrap_for_grad, _wrap_for_grad
from torch._functorch.eager_transforms import enable_inplace_requires_grad, grad_increment_nesting
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fedveil.gradients.gradient_blocks import Block, Dense, combined
from fedveil.gradients.layer_rules import BY_PLACES, RULES
from fedveil.gradients.taps import NoRule, Taps, installed, places
from fedveil.tasks.task import Task
from fedveil.training.params import exchanged, trained_parameters

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from fedveil.gradients.taps import Made, Rule


Losses = Callable[["Tensor", "Tensor"], "Tensor"]
"""(outputs, targets) -> the loss of each example [n]."""

_LAYERS = frozenset(
    f"torch.nn.modules.{name}"
    for name in (
        *("activation", "batchnorm", "container", "conv", "dropout", "flatten", "fold", "instancenorm", "linear"),
        *("normalization", "padding", "pixelshuffle", "pooling", "sparse", "transformer", "upsampling"),
    )
)
"""Files of torch whose layers process the rows of a batch independently, with the limits below; recurrent ones return tuples."""


_LEAST: Mapping[type, int] = {
    **dict.fromkeys((nn.Linear, nn.GroupNorm, nn.ConstantPad1d, nn.ZeroPad1d), 2),
    **dict.fromkeys((nn.Conv1d, nn.ConvTranspose1d, nn.ConstantPad2d, nn.ZeroPad2d, nn.Fold, nn.MultiheadAttention), 3),
    **dict.fromkeys((nn.Conv2d, nn.ConvTranspose2d, nn.ConstantPad3d, nn.ZeroPad3d, nn.Unfold, nn.Softmax2d), 4),
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle), 4),
    **dict.fromkeys((nn.Conv3d, nn.ConvTranspose3d), 5),
}
"""The least dimensions of a batch: with fewer, a layer takes its input for one example, or mixes examples."""
_WITHIN: Mapping[type, str] = {
    **dict.fromkeys((nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.GLU, nn.Unflatten), "dim"),
    nn.Flatten: "start_dim",
}
"""Layers that work along a dimension, and the name of that option; it must not be the dimension of the examples."""


def _require_rows(layer: Any, inputs: tuple[Tensor, ...]) -> None:
    """Raise NoRule if this call of a layer would not process the rows of a batch independently."""
    x, along = inputs[0], _WITHIN.get(type(layer))
    if x.dim() < _LEAST.get(type(layer), len(getattr(layer, "normalized_shape", ())) + 1):
        raise NoRule
    if along is not None and not (isinstance(dim := getattr(layer, along), int) and dim % x.dim()):
        raise NoRule


def known(module: nn.Module) -> bool:
    """Return whether a network runs only code of torch and fedveil, in layers that process the rows of a batch independently.

    This holds for built-in networks, and for an `nn.Sequential` whose parts have exactly torch's types, without hooks,
    parametrizations or user-defined functions. All trained parameters must belong to layers with a rule.
    """
    return all(map(_known_part, module.modules()))


def _known_part(part: nn.Module) -> bool:
    kind, file = type(part), type(part).__module__
    if not file.startswith("fedveil.") and (file not in _LAYERS or getattr(sys.modules[file], kind.__name__, None) is not kind):
        return False
    if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None):
        return False
    if isinstance(part, nn.MultiheadAttention) and not part.batch_first:
        return False
    trained = [p for p in part.parameters(recurse=False) if p.requires_grad]
    if trained and kind not in RULES and kind is not NonDynamicallyQuantizableLinear:  # the last layer of attention
        return False
    return not any(p._backward_hooks for p in trained) and not any(
        (value and name.endswith("_hooks")) or name == "forward" or _foreign(value) for name, value in vars(part).items()
    )


def _foreign(value: object) -> bool:
    """Return whether this is a user-defined function, such as the activation of a transformer."""
    if not callable(value) or isinstance(value, type | BuiltinFunctionType):
        return False
    return not (getattr(value, "__module__", None) or "").startswith(("torch.", "fedveil."))


def gradients(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> tuple[list[Block], Tensor]:
    """Return the blocks of the trainable parameters of a known network, in order, and the losses [n].

    Raises:
        NoRule: the options of a layer do not fit its rule, or it does not process rows independently.
    """
    parameters, n = list(trained_parameters(module).values()), len(y)
    taps = Taps(parameters, strict=True)
    checks = [part.register_forward_pre_hook(_require_rows) for part in module.modules() if type(part).__module__ in _LAYERS]
    try:
        with installed(taps, module, RULES):
            each = losses(module(x), y)
    finally:
        for check in checks:
            check.remove()
    if each.shape != (n,):
        raise NoRule
    slopes: tuple[Tensor | None, ...] = (None,) * len(taps.all)
    if each.requires_grad:
        slopes = torch.autograd.grad(each, [tap.output for tap in taps.all], torch.ones_like(each), allow_unused=True)
    with torch.no_grad():
        return summed(taps.uses(slopes), parameters, n), each.detach()


def summed(uses: Iterable[tuple[int, Callable[..., Block], list[Tensor]]], parameters: Sequence[Tensor], n: int) -> list[Block]:
    """Return the gradients of all parameters, each the sum over its uses; zeros without a use."""
    parts: dict[int, list[Block]] = {}
    for number, made, (slope, *seen) in uses:
        parts.setdefault(number, []).append(made(slope, n, *seen))
    return [combined(parts[i]) if i in parts else Dense(p.new_zeros(n, p.numel())) for i, p in enumerate(parameters)]


def per_example_gradients(
    module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses, *, loop: bool = False
) -> tuple[list[Block], Tensor]:
    """Return the gradient of each example's loss by the trainable parameters, in the order of `named_parameters`, and losses [n].

    Args:
        x: examples [n, ...], numbers or tokens. y: targets [n, ...]. losses_of: (outputs, targets) -> one loss per example, [n].
        loop: one backward pass for each example, for networks and losses that `torch.func.vmap` cannot run.
    """
    if loop or (len(y) == 1 and known(module)):
        return one_by_one(module, x, y, losses_of)
    if known(module):
        try:
            return gradients(module, x, y, _apart(losses_of))
        except NoRule:
            pass
    return vectorised(module, x, y, losses_of)


def one_by_one(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """Return per-example gradients by one backward pass for each example."""
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
    """Return losses, each computed from its example alone, unless the task is built in."""
    owner = getattr(losses, "__self__", None)
    if isinstance(owner, Task) and not owner.is_user_defined:
        return losses
    return vmap(lambda output, target: losses(output[None], target[None])[0], randomness="different")


def _copy(module: nn.Module) -> nn.Module:
    """Return a copy that shares the parameters and the scripts, since scripts cannot be copied without their parameters."""
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
    """Return whether `copy.deepcopy` copies objects of a class by attributes, as it does for classes of torch."""
    own = (vars(one)[name] for one in cast(type, kind).__mro__ for name in _COPYING if one is not object and name in vars(one))
    return all((getattr(function, "__module__", None) or "").startswith("torch.nn.") for function in own)


# --- vmap --------------------------------------------------------------------------------------------------------------


def vectorised(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """Return per-example gradients under `torch.func.vmap`."""
    try:
        return _in_one_pass(module, x, y, losses_of, RULES)
    except NoRule:
        return _in_one_pass(module, x, y, losses_of, {})


def _in_one_pass(
    module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses, rules: Mapping[type, Rule]
) -> tuple[list[Block], Tensor]:
    """Return per-example gradients of all examples in one pass of vmap.

    Raises:
        NoRule: the network takes gradients itself, so that rules do not give its gradients.
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
    """Merge the uses of a layer that was called several times, such as in a loop over steps, where possible."""
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
    """Return the uses of the parameters in one example's loss, as `Taps.uses` does."""
    if not loss.requires_grad:
        return []
    if taps.asked:
        raise NoRule
    recorded, taps.all = taps.all, []  # a checkpoint runs the forward, and so its taps, again in the backward pass
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
    """Return the gradient after the hooks of its parameter."""
    for hook in list((p._backward_hooks or {}).values()):
        changed = hook(slope)
        slope = slope if changed is None else changed
    return slope
