"""Trial of the gradients of single examples, which DP-SGD needs, on public examples before any release."""

from __future__ import annotations

import random
import traceback
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fedveil.errors import ConfigError, frames_of, users_place
from fedveil.gradients.gradient_blocks import rows
from fedveil.gradients.per_example import per_example_gradients
from fedveil.release.noise import Randomness
from fedveil.training.params import trained_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fedveil.gradients.gradient_blocks import Block
    from fedveil.tasks.task import Task
    from fedveil.training.params import FlatModel

_REMEDIES = {
    "running_mean": "take the normalisation without running statistics",
    ".item()": "choose by torch.where in the place of a decision on values, and leave .item() out",
    "dynamic shape": "mask by torch.where in the place of selecting by values",
    "inplace randomness": "draw by torch.rand or torch.bernoulli in the place of drawing into a tensor, as bernoulli_ does",
    "inplace": "make new tensors of the example itself, as by x.new_zeros, torch.zeros_like or torch.stack, and write into these",
    "autograd.Function": "give the autograd.Function a setup_context and generate_vmap_rule = True",
    "data pointer": "compute with torch in the place of numpy",
    "Sparse": "leave sparse=True out",
}
"""Remedies, by the part of an error's text that shows what `torch.func.vmap` cannot run."""
_LOOP = "or set training.per_example = 'loop': each example has a pass of its own, which is slower"


def check_single_examples(model: FlatModel, x: Tensor, y: Tensor, task: Task, *, loop: bool) -> list[str]:
    """Compute the gradients of single examples as training does, without changing the model.

    Args:
        x, y: public examples [n, ...] and targets [n, ...]. loop: as training.per_example = 'loop'.

    Returns:
        Remarks for the owner of a model that can be trained.

    Raises:
        ConfigError: what cannot be done, where in the user's code, and what to do.
    """
    _refuse_by_type(model, loop=loop)
    if not (model.is_custom or task.is_user_defined):
        return []
    name = type(model.module).__name__
    if elsewhere := _drawn_by(model, x) - {"torch"}:
        raise ConfigError(
            f"training.local = 'dp-sgd' protects single examples, and {name} draws random numbers with "
            f"{' and '.join(sorted(elsewhere))} in its forward pass, where one number may serve several examples: draw them with "
            f"torch, such as torch.rand"
        )
    gradients = partial(per_example_gradients, model.module, x, y, task.losses_in_full)
    tried = _tried(model, partial(gradients, loop=loop))
    alone = tried if loop else _tried(model, partial(gradients, loop=True))
    if isinstance(tried, Exception):
        if isinstance(alone, Exception):
            raise ConfigError(f"model: {name} cannot be trained on a single example: {_described(alone)}") from alone
        raise ConfigError(
            f"model: {name} is called on single examples by torch.func.vmap, which cannot run this: {_described(tried)}; "
            f"{_remedy(tried)}{_LOOP}"
        ) from tried
    if _drawn_by(model, x):
        return []
    _refuse_others(model, tried, alone)
    return _of_batches(model, x)


def packs(model: FlatModel, x: Tensor) -> bool:
    """Return whether the network packs sequences: shapes then depend on values, so vmap cannot run it, and it needs the loop.

    Args:
        x: public examples [n, ...].
    """
    if not model.has_user_code:
        return False
    watch = _Packing()
    with torch.no_grad(), Randomness(0).forward(x.device, "single examples"), model.restoring(), suppress(Exception), watch:
        model.module(x[:2].clone())
    return watch.seen


class _Packing(TorchFunctionMode):
    """Records whether a sequence is packed, in this thread only."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or getattr(func, "__name__", "") == "_pack_padded_sequence"
        return func(*args, **(kwargs or {}))


def _refuse_by_type(model: FlatModel, *, loop: bool) -> None:
    for name, layer in model.module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise ConfigError(
                f"training.local = 'dp-sgd' protects single examples, and the layer {name} ({type(layer).__name__}) mixes the "
                f"examples of a batch: take nn.GroupNorm or nn.LayerNorm (fv.fix(module) makes a copy with nn.GroupNorm), or "
                f"batch normalisation with frozen statistics (leave its parameters out of model.trainable)"
            )
        if not loop and (layer._backward_hooks or layer._backward_pre_hooks):
            raise ConfigError(
                f"training.local = 'dp-sgd' takes the gradient of each example, and {name or 'the network'} "
                f"({type(layer).__name__}) has a hook (register_full_backward_hook), which torch.func.vmap cannot run: hang it "
                f"on a tensor or a parameter by register_hook, {_LOOP}"
            )
    if late := [name for name, p in trained_parameters(model.module).items() if p._post_accumulate_grad_hooks]:
        raise ConfigError(
            f"training.local = 'dp-sgd' takes the gradient of each example, and {', '.join(late[:4])} has a hook "
            f"(register_post_accumulate_grad_hook) that acts on accumulated gradients alone: use register_hook"
        )


def _drawn_by(model: FlatModel, x: Tensor) -> set[str]:
    """Return the libraries from whose global generators a forward pass draws."""
    with torch.no_grad(), Randomness(0).forward(x.device, "single examples"), model.restoring():
        before = _states(x.device)
        model.module(x[:2].clone())
        return {library for library, state in _states(x.device).items() if state != before[library]}


def _states(device: torch.device) -> dict[str, str]:
    drawn = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    elsewhere = np.random.get_state()  # noqa: NPY002 : to detect its use
    return {"random": repr(random.getstate()), "numpy.random": repr(elsewhere), "torch": repr(drawn.tolist())}


def _tried(model: FlatModel, gradients: Callable[[], tuple[list[Block], Tensor]]) -> Tensor | Exception:
    """Return the gradients [n, d], or the error."""
    with Randomness(0).forward(model.vector.device, "single examples"), model.restoring():
        try:
            return rows(gradients()[0])
        except Exception as error:
            return error


def _described(error: Exception) -> str:
    place = users_place(frames_of(error))
    return f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}{f' (at {place})' if place else ''}"


def _remedy(error: Exception) -> str:
    text = f"{error} {' '.join(frame.name for frame in traceback.extract_tb(error.__traceback__))}"
    return next((f"{remedy}, " for sign, remedy in _REMEDIES.items() if sign in text), "")


def _refuse_others(model: FlatModel, together: Tensor, alone: Tensor | Exception) -> None:
    """Refuse a network whose gradients under vmap differ from those of backward passes, as when it hides its weights."""
    if isinstance(alone, Exception):
        return
    for name, one, other in zip(model.layout.names, model.layout.split(together.T), model.layout.split(alone.T), strict=True):
        if not bool((one - other).norm() <= 0.1 * other.norm() + 1e-6 * alone.norm()):
            raise ConfigError(
                f"model: the gradient of {name} under torch.func.vmap, which calls {type(model.module).__name__} on single "
                f"examples, is another than that of a backward pass: its code must reach it as a parameter of the module, {_LOOP}"
            )


def _of_batches(model: FlatModel, x: Tensor) -> list[str]:
    with torch.no_grad(), Randomness(0).forward(x.device, "single examples"), model.restoring():
        together, alone = model.module(x.clone())[0], model.module(x[:1].clone())[0]
    if together.shape != alone.shape or not bool(((together - alone).abs() <= 1e-3 * alone.abs().max() + 1e-6).all()):
        return [
            f"model: what {type(model.module).__name__} makes of an example depends on the others of its batch: it is trained on "
            f"single examples (training.local = 'dp-sgd') and scored in batches"
        ]
    return []
