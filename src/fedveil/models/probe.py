"""Check of a model on public examples before training: its output must fit the task."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fedveil.errors import ConfigError, frames_of, users_place
from fedveil.release.noise import Randomness
from fedveil.tasks.task_check import check_task
from fedveil.training.params import statistics_names, trained_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fedveil.tasks.task import Task
    from fedveil.training.params import FlatModel


def check_output(model: FlatModel, x: Tensor, y: Tensor, task: Task) -> list[str]:
    """Pass public examples through the model as training does, up to the gradient, without changing the model.

    Args:
        x, y: examples [n, ...] and targets [n, ...] of the test set.

    Returns:
        Warnings for the user about a model that can be trained.

    Raises:
        ConfigError: the task is invalid (see `check_task`) or cannot use the output; the output does not depend on any trained
            parameter; or constants change.
    """
    name, device = type(model.module).__name__, model.vector.device
    x, y = x.to(device), y.to(device)
    with torch.random.fork_rng(devices=[]):
        with model.restoring() as first:
            output = _output(model, x, name)
            check_task(task, output.detach().float().cpu(), y.cpu())
        with model.restoring():
            _try_sizes(model, x, name)
        with model.restoring() as each_time:
            used = _gradients(model, x, y, task)
            lost = model.replaced_parameters()
    if lost:
        raise ConfigError(
            f"model: {name} replaces the data of its parameters in its forward pass ({_some(lost)}), so it no longer uses the "
            f"trained values: write into the data, as in p.data.copy_(value)"
        )
    if once := first - each_time:
        raise ConfigError(
            f"model: {name} sets {_some(sorted(once))} in its first pass, from the examples of that pass: run it once on public "
            f"examples, and pass in the resulting module"
        )
    unused = [layer for layer, gradient in zip(model.layout.names, used, strict=True) if gradient is None]
    if len(unused) == len(used):
        raise ConfigError(
            f"model: no trained parameter of {name} decides its output, so nothing would be learned: {_some(unused)}"
        )
    remarks = [f"model: {_some(unused)} does not decide the output of {name}: it would get nothing but noise"] if unused else []
    if written := sorted(each_time - statistics_names(model.module)):
        spectral = any(buffer.endswith(("._u", "weight_u")) for buffer in written)
        remarks.append(
            f"model: {name} writes {_some(written)} in its forward pass: each client starts from the values of the module that "
            f"you passed in, and its changes are discarded"
            + "; of spectral norm so is its estimate: take torch.nn.utils.parametrizations.weight_norm"
            * spectral
        )
    return remarks


def needs_pairs(model: FlatModel, x: Tensor, y: Tensor, task: Task) -> bool:
    """Return whether the network or the task can learn from two of these examples but not from one, as with batch norm."""
    ours = not (model.is_custom or task.is_user_defined)  # of fedveil's parts only batch normalisation needs more than one
    if ours and not any(isinstance(layer, _BatchNorm) and layer.training for layer in model.module.modules()):
        return False
    with torch.no_grad(), _as_it_was(model):
        return not _learns(model, x[:1], y[:1], task) and _learns(model, x[:2], y[:2], task)


def _learns(model: FlatModel, x: Tensor, y: Tensor, task: Task) -> bool:
    try:
        output = model.module(x.clone())
        return bool(output.isfinite().all()) and bool(task.loss(output.float(), y).isfinite())
    except Exception:
        return False


@contextmanager
def _as_it_was(model: FlatModel) -> Iterator[None]:
    """Restore at the end everything that a pass changes, including the states of generators."""
    with Randomness(0).forward(model.vector.device, "public examples"), model.restoring():
        yield


def _gradients(model: FlatModel, x: Tensor, y: Tensor, task: Task) -> tuple[Tensor | None, ...]:
    """Return the gradient of the loss by each trained parameter, None if the loss does not depend on it."""
    name = type(model.module).__name__

    def compute() -> tuple[Tensor | None, ...]:
        loss = task.loss(_output(model, x, name).float(), y)
        return torch.autograd.grad(loss, list(trained_parameters(model.module).values()), allow_unused=True)

    try:
        return compute()
    except ConfigError:
        raise
    except Exception as error:
        reason, remedy = _reason(error), "every operation between parameters and output needs a gradient that torch can compute"
        if "use_reentrant" in reason:
            remedy = "call torch.utils.checkpoint.checkpoint with use_reentrant=False"
        elif "inplace operation" in reason:
            remedy = "a result is changed in place after it was computed: use operations that make new tensors (not add_ or +=)"
        place = _at(users_place(frames_of(error))) or _place_of_forward(compute)
        raise ConfigError(f"model: the gradients of {name}{place} cannot be computed: {reason}; {remedy}") from error


def _place_of_forward(compute: Callable[[], object]) -> str:
    """Return where the forward pass computed a value without a gradient, from torch's warning; else the operation's name."""
    with warnings.catch_warnings(record=True) as caught, suppress(Exception):
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(check_nan=False):
            compute()
    texts = [str(warning.message) for warning in caught]
    traceback = next((text for text in texts if "Traceback of forward call" in text), "")
    frames = [(file, int(line)) for file, line in re.findall(r'^  File "(.*)", line (\d+)', traceback, re.MULTILINE)]
    operation = re.match(r"Error detected in (\w+?)(Backward\d*)?\.", traceback)
    return _at(users_place(frames)) or (f" (at its operation {operation[1]})" if operation else "")


def _at(place: str) -> str:
    return f" (at {place})" if place else ""


def _reason(error: Exception) -> str:
    """Return the error's first line, without torch's hints."""
    text = re.split(r"\.? Hint: |\.? To resolve this error", (str(error) or "-").splitlines()[0])[0]
    return f"{type(error).__name__}: {text}"


def _try_sizes(model: FlatModel, x: Tensor, name: str) -> None:
    """Try batches of other sizes in training and evaluation, so that the module's code caches values of public examples only."""
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
        output: Any = model.module(x.clone())
    except Exception as error:
        place = _at(users_place(frames_of(error)))
        tokens = x.is_floating_point() and any(isinstance(part, torch.nn.Embedding) for part in model.module.modules())
        hint = " (tokens are int64 where the data say vocabulary=)" if tokens else ""
        raise ConfigError(f"model: {name} cannot take examples {_shape(x)}: {_reason(error)}{hint}{place}") from error
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
