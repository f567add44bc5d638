"""One public batch through a model before training: what it makes must be what the task needs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from fedveil.errors import ConfigError
from fedveil.tasks.task_check import check_task
from fedveil.training.params import trained_parameters

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.tasks.task import Task
    from fedveil.training.params import FlatModel

_log = logging.getLogger(__name__)


def check_output(model: FlatModel, x: Tensor, y: Tensor, task: Task) -> None:
    """Pass public examples through the model as training does, up to the gradient; the model stays as it is.

    Args:
        x, y: examples [n, ...] and targets [n, ...] of the test set.

    Raises:
        ConfigError: an output that the task cannot use, or a bad task (see `check_task`); nothing that is trained decides the
            output; or constants change.
    """
    name, device = type(model.module).__name__, model.vector.device
    x, y = x.to(device), y.to(device)
    kept = model.buffers()
    try:
        with torch.random.fork_rng(devices=[]):
            output = _output(model, x, name)
            check_task(task, output.detach().float().cpu(), y.cpu())
            _try_sizes(model, x, name)
            model.remember_constants()
            output = _output(model, x, name)
        used = torch.autograd.grad(
            task.loss(output.float(), y), list(trained_parameters(model.module).values()), allow_unused=True
        )
        model.require_constants()
    finally:
        model.load_buffers(kept)
    unused = [layer for layer, gradient in zip(model.layout.names, used, strict=True) if gradient is None]
    if len(unused) == len(used):
        raise ConfigError(
            f"model: no trained parameter of {name} decides its output, so nothing would be learned: {_some(unused)}"
        )
    if unused:
        _log.warning("model: %s does not decide the output of %s: it would get nothing but noise", _some(unused), name)


def _try_sizes(model: FlatModel, x: Tensor, name: str) -> None:
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
