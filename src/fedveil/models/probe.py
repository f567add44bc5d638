"""Public examples through a model before training: what it makes must be what the task needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fedveil.errors import ConfigError
from fedveil.release.noise import Randomness
from fedveil.tasks.task_check import check_task
from fedveil.training.params import trained_parameters

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.tasks.task import Task
    from fedveil.training.params import FlatModel


def check_output(model: FlatModel, x: Tensor, y: Tensor, task: Task) -> list[str]:
    """Pass public examples through the model as training does, up to the gradient; the model stays as it is.

    Args:
        x, y: examples [n, ...] and targets [n, ...] of the test set.

    Returns:
        What its owner should know, where it can be trained all the same.

    Raises:
        ConfigError: an output that the task cannot use, or a bad task (see `check_task`); nothing that is trained decides the
            output; or constants change.
    """
    name = type(model.module).__name__
    with _as_it_was(model):
        output = _output(model, x, name)
        check_task(task, output.detach().float().cpu(), y.cpu())
        _pass_sizes(model, x, name)
        model.remember_constants()
        output = _output(model, x, name)
        used = torch.autograd.grad(
            task.loss(output.float(), y), list(trained_parameters(model.module).values()), allow_unused=True
        )
        model.require_constants()
    unused = [layer for layer, gradient in zip(model.layout.names, used, strict=True) if gradient is None]
    if len(unused) == len(used):
        raise ConfigError(
            f"model: no trained parameter of {name} decides its output, so nothing would be learned: {_some(unused)}"
        )
    return [f"model: {_some(unused)} does not decide the output of {name}: it would get nothing but noise"] if unused else []


def fill_caches(model: FlatModel, x: Tensor) -> None:
    """Let the code of a network that is not built in keep what it makes of public examples, such as a cache of positions.

    Args:
        x: the examples [n, ...] that `check_output` was given.

    Raises:
        ConfigError: as `check_output`, of the forward pass alone.
    """
    if model.is_compared:
        with _as_it_was(model):
            name = type(model.module).__name__
            _passed(model, x, name)
            _pass_sizes(model, x, name)
            model.remember_constants()


def needs_pairs(model: FlatModel, x: Tensor, y: Tensor, task: Task) -> bool:
    """Whether the network or the task can learn from two of these examples and not from one, as under batch normalisation."""
    ours = not (model.is_compared or task.own)  # of these only batch normalisation asks for more than one
    if ours and not any(isinstance(layer, _BatchNorm) and layer.training for layer in model.module.modules()):
        return False
    with torch.no_grad(), _as_it_was(model):
        return not _learns(model, x[:1], y[:1], task) and _learns(model, x[:2], y[:2], task)


def _learns(model: FlatModel, x: Tensor, y: Tensor, task: Task) -> bool:
    try:
        output = model.module(x)
        return bool(output.isfinite().all()) and bool(task.loss(output.float(), y).isfinite())
    except Exception:
        return False


@contextmanager
def _as_it_was(model: FlatModel) -> Iterator[None]:
    """Put back afterwards what a pass changes: trained parameters, batch statistics, the mode, the states of generators."""
    vector, buffers = model.vector.clone(), model.buffers()
    try:
        with Randomness(0).forward(model.vector.device, "public examples"):
            yield
    finally:
        model.train()
        model.load(vector)
        model.load_buffers(buffers)


def _pass_sizes(model: FlatModel, x: Tensor, name: str) -> None:
    """Batches of other sizes, in training and in evaluation; what the module's code keeps of these it keeps before any data."""
    try:
        _output(model, x[:-1], name)
        model.eval()
        with torch.no_grad():
            _passed(model, x[:1], name)
    except ConfigError as error:
        raise ConfigError(f"{error}; it takes {len(x)} at once, and has to take any number: batches differ in size") from error
    finally:
        model.train()


def _output(model: FlatModel, x: Tensor, name: str) -> Tensor:
    output = _passed(model, x, name)
    if not output.requires_grad:
        raise ConfigError(f"model: the output of {name} has no gradient: it must not be computed under torch.no_grad")
    if not bool(output.isfinite().all()):
        raise ConfigError(
            f"model: the output of {name} is NaN or infinite on examples of the test set, before any training: look for a "
            f"division by zero or a logarithm in it, and for inputs that are not scaled (normalise=, mean= and std= of the data)"
        )
    return output


def _passed(model: FlatModel, x: Tensor, name: str) -> Tensor:
    try:
        output: Any = model.module(x)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        tokens = x.is_floating_point() and any(isinstance(part, torch.nn.Embedding) for part in model.module.modules())
        hint = " (tokens are int64 where the data say vocabulary=)" if tokens else ""
        raise ConfigError(f"model: {name} cannot take examples {_shape(x)}: {type(error).__name__}: {reason}{hint}") from error
    if not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.shape[:1] != x.shape[:1]:
        raise ConfigError(
            f"model: {name} makes {_shape(output)} of examples {_shape(x)}: it must return one floating-point tensor "
            f"[{len(x)}, ...], a row for each example"
        )
    return output


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return f"a {type(value).__name__} of {', '.join(f'{key}: {_shape(part)}' for key, part in value.items())}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {', '.join(map(_shape, value))}"
    return f"a {type(value).__name__}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
