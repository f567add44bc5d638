"""A model as one flat vector with named layers.

Parameters and gradients are views of one buffer each; a layer (one parameter tensor) is a slice. Clipping, noise, masks and
per-layer norms then take a few vector operations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the layers of a flat vector, in order; it holds no tensor and does not need torch.

    Args:
        names: one name per layer, unique.
        shapes: one shape per layer; `()` is a single number.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes) or not self.names:
            raise ConfigError(
                f"a layout needs as many shapes as names, and at least one: {len(self.names)} names, {len(self.shapes)} shapes"
            )
        if len(set(self.names)) != len(self.names):
            raise ConfigError(f"layer names must be unique, got {list(self.names)}")

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]]) -> Layout:
        """Return the layout of a mapping from layer name to shape."""
        return cls(tuple(shapes), tuple(tuple(shape) for shape in shapes.values()))

    @cached_property
    def sizes(self) -> list[int]:
        """Return the number of coordinates of each layer."""
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def dimension(self) -> int:
        """Return d, the length of the flat vector."""
        return sum(self.sizes)

    def __len__(self) -> int:
        return len(self.names)

    def split(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Return the layers of `vector` [d] as flat views."""
        import torch

        return torch.split(vector, self.sizes)

    def norms(self, vector: Tensor) -> Tensor:
        """Return the L2 norm of each layer of `vector` [d], as a tensor [L]."""
        import torch

        return torch.stack(torch._foreach_norm(list(self.split(vector))))

    def expand(self, per_layer: Tensor) -> Tensor:
        """Return `per_layer` [L] repeated over the coordinates of each layer, as a tensor [d]."""
        import torch

        return per_layer.repeat_interleave(torch.tensor(self.sizes, device=per_layer.device), output_size=self.dimension)


class FlatModel:
    """Module whose trained parameters and their gradients live in two flat buffers, `vector` and `grad`, both [d].

    Parameters that require a gradient are trained; the rest is frozen. A part without trained parameters always runs in
    evaluation mode. The module is modified: its trained parameters become views, so that writing `vector` changes the module, and
    vice versa. `buffers` and `load_buffers` copy the statistics of batch normalisation; everything else is constant.

    Args:
        vector, grad: memory to use, [d] each, for instance rows of one tensor that holds many models; by default new memory.
        built_in: whether the module is a network of fedveil.
    """

    def __reduce__(self) -> tuple[Callable[..., FlatModel], tuple[Any, ...]]:
        hooks = [_hooks_of(p) for p in self.module.parameters()]  # pickle omits these hooks
        return _unpickled, (self.module, hooks, self._built_in)

    def __init__(
        self,
        module: nn.Module,
        vector: Tensor | None = None,
        grad: Tensor | None = None,
        built_in: bool = False,
    ) -> None:
        import torch

        self._built_in = built_in
        named = trained_parameters(module)
        if not named:
            raise ConfigError("the model has no parameters that require a gradient: nothing to train")
        wrong = [name for name, p in named.items() if p.dtype != torch.float32]
        if wrong:
            raise ConfigError(f"parameters must be float32, these are not: {wrong}")
        self.module = module
        self.layout = Layout.of({name: p.shape for name, p in named.items()})
        device = next(iter(named.values())).device
        self.vector = torch.empty(self.layout.dimension, device=device) if vector is None else vector
        self.grad = torch.zeros(self.layout.dimension, device=device) if grad is None else grad
        parts = zip(named.values(), self.layout.split(self.vector), self.layout.split(self.grad), strict=True)
        for p, flat, gradient in parts:
            flat.copy_(p.detach().reshape(-1))
            p.data = flat.view(p.shape)
            p.grad = gradient.view(p.shape)
        self.train()
        self._buffers = list(batch_statistics(module).values())
        self._normalising = [layer for layer in normalising(module) if layer.training]
        counted = [b for layer in self._normalising for b in layer.buffers()]
        self._counters = [b for b in counted if not b.is_floating_point()]
        changing = {id(t) for t in (*named.values(), *counted)}
        self._constants = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in changing]
        self._trained, self._changing = tuple(named.values()), (*named.values(), *counted)

    @property
    def has_user_code(self) -> bool:
        """Return whether the module contains user-defined code, that is, anything but the layers of torch and fedveil."""
        return has_user_code(self.module)

    @property
    def is_custom(self) -> bool:
        """Return whether the module is user-defined."""
        return not self._built_in or self.has_user_code

    def copy_into(self, vector: Tensor, grad: Tensor) -> FlatModel:
        """Return a copy in the given memory, [d] each, that shares its frozen part with this model."""
        return FlatModel(copied(self.module, self._constants), vector, grad, self._built_in)

    def independent_copy(self) -> FlatModel:
        """Return a copy that shares nothing with this model."""
        return FlatModel(copied(self.module), built_in=self._built_in)

    def to(self, device: torch.device | str) -> FlatModel:
        """Return this model if it is on `device`, else a copy on that device."""
        import torch

        if self.vector.device == torch.device(device):
            return self
        return FlatModel(copied(self.module).to(device), built_in=self._built_in)

    def train(self) -> None:
        """Set the mode of local training."""
        training_mode(self.module)

    def eval(self, own_statistics: bool = False) -> None:
        """Set the mode of tests; with `own_statistics`, batch normalisation uses and records the statistics of each batch."""
        self.module.eval()
        for layer in self._normalising if own_statistics else ():
            layer.train()

    def output(self, x: Tensor, *, by_running_statistics: bool = False) -> Tensor:
        """Return the network's output for a training batch.

        Args:
            by_running_statistics: batch normalisation uses its running statistics, as in a test, and does not change them.
        """
        layers = self._normalising if by_running_statistics else []
        try:
            for layer in layers:
                layer.eval()
            output: Tensor = self.module(x)
        finally:
            for layer in layers:
                layer.train()
        return output

    @contextmanager
    def restoring(self) -> Iterator[set[str]]:
        """Restore parameters, buffers and mode at the end; other attributes that the module's code sets remain.

        Yields:
            A set that receives, at the end, the names of changed tensors; a buffer of a new shape is a cache and is omitted.
        """
        import torch

        tables = [(path, table) for path, part in self.module.named_modules() for table in (part._parameters, part._buffers)]
        saved = [
            (path, table, name, tensor, tensor.data, tensor.detach().clone())
            for path, table in tables
            for name, tensor in table.items()
            if tensor is not None
        ]
        changed: set[str] = set()
        try:
            yield changed
        finally:
            self.train()
            for path, table, name, tensor, memory, value in saved:
                now = table[name] if name in table else None  # noqa: SIM401 : a script's table has no get
                if now is None or now.shape != value.shape or torch.equal(now.detach(), value):
                    continue
                changed.add(f"{path}.{name}" if path else name)
                if now is not tensor:
                    table[name] = tensor
                tensor.data = memory
                tensor.data.copy_(value)

    def load(self, vector: Tensor) -> None:
        """Set the trained parameters to `vector` [d]."""
        self.vector.copy_(vector)

    def state_to_save(self) -> dict[str, Tensor]:
        """Return the module's state for `load_state_dict`; if a part is frozen, only the tensors that training changes."""
        import torch

        changed = {id(t) for t in self._changing}
        part = not all(p.requires_grad for p in self.module.parameters())
        state = {**trained_parameters(self.module), **self.module.state_dict(keep_vars=True)}
        selected = {name: t for name, t in state.items() if isinstance(t, torch.Tensor) and (id(t) in changed or not part)}
        return {name: t for name, t in selected.items() if t.layout is torch.strided and not (t.is_complex() or t.is_quantized)}

    def buffers(self) -> Tensor:
        """Return a copy of the batch statistics as one flat vector, empty if there are none."""
        import torch

        return torch.cat([b.reshape(-1) for b in self._buffers]) if self._buffers else self.vector.new_empty(0)

    def load_buffers(self, values: Tensor) -> None:
        """Set the batch statistics from a flat vector of `buffers`, and reset the counts of batches."""
        import torch

        for buffer, part in zip(self._buffers, torch.split(values, [b.numel() for b in self._buffers]), strict=True):
            buffer.copy_(part.view(buffer.shape))
        for counter in self._counters:
            counter.zero_()

    def estimated_buffers(self, forward: Callable[[Tensor], object], batches: Iterable[Tensor]) -> Tensor:
        """Return the mean batch statistics over these batches, as used in tests; the earlier statistics are overwritten."""
        momenta: list[Any] = [layer.momentum for layer in self._normalising]
        self.eval(own_statistics=True)
        try:
            for i, x in enumerate(batches):
                for layer in self._normalising:
                    layer.momentum = 1 / (i + 1)  # type: ignore[assignment]
                forward(x)
        finally:
            for layer, momentum in zip(self._normalising, momenta, strict=True):
                layer.momentum = momentum
            self.train()
        return self.buffers()

    def replaced_parameters(self) -> list[str]:
        """Return the names of parameters whose data the module's code replaced by other tensors, which are no longer trained."""
        memory = zip(self.layout.names, self._trained, self.layout.split(self.vector), strict=True)
        return [name for name, p, part in memory if p.data_ptr() != part.data_ptr()]


def _unpickled(module: nn.Module, hooks: Iterable[Hooks], built_in: bool) -> FlatModel:
    for p, own_hooks in zip(module.parameters(), hooks, strict=True):
        _hang(p, own_hooks)
    return FlatModel(module, built_in=built_in)


def copied(module: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """Return a copy of a module with the hooks of its parameters, which `copy.deepcopy` drops.

    The parameters of scripts are copied as results of the originals, to which they would pass their gradients; they are detached.

    Args:
        shared: tensors that the copy shares with the module.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    duplicate = copy.deepcopy(module, memo)
    for before, after in zip(module.parameters(), duplicate.parameters(), strict=True):
        if after is not before:
            if not after.is_leaf:
                after.detach_().requires_grad_(before.requires_grad)
            _hang(after, copy.deepcopy(_hooks_of(before), memo))  # a method of the module becomes one of the copy
    return duplicate


Hooks = tuple[list[Any], list[Any]]


def _hooks_of(p: Tensor) -> Hooks:
    """Return the hooks on a parameter's gradient: before and after accumulation."""
    return list((p._backward_hooks or {}).values()), list((p._post_accumulate_grad_hooks or {}).values())


def _hang(p: Tensor, hooks: Hooks) -> None:
    hang = p.register_hook, p.register_post_accumulate_grad_hook
    for register, each in zip(hang, hooks, strict=True):
        for hook in each if p.requires_grad else ():
            register(hook)  # type: ignore[no-untyped-call]


def called_with(module: nn.Module, tensors: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
    """Return the output of a module with these tensors, by name, in place of its parameters and buffers."""
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    with exchanged([(named[name], tensor) for name, tensor in tensors.items()], module):
        output: Tensor = module(*inputs)
    return output


@contextmanager
def exchanged(pairs: Iterable[tuple[Tensor, Tensor]], *modules: nn.Module) -> Iterator[None]:
    """Replace the first tensor of each pair by the second wherever the modules hold it; restore the first at the end.

    Each tensor is replaced once in each object that holds it: a layer may have two names, a parameter may be in two layers, and a
    list may hold both. `torch.func.functional_call` replaces by name, and leaves the new tensor in a layer with two names.
    """
    new = {id(old): tensor for old, tensor in pairs}
    places: list[tuple[Any, str, Any, Any]] = []
    for part in (part for module in modules for part in module.modules()):
        for table in (part._parameters, part._buffers):
            places += [(table, name, old, new[id(old)]) for name, old in table.items() if id(old) in new]
        for name, value in vars(part).items():
            holds = type(value) in (list, tuple, dict) and value and name not in ("_parameters", "_buffers", "_modules")
            if (holds or id(value) in new) and (replaced := _exchanged(value, new)) is not value:
                places.append((vars(part), name, value, replaced))
    try:
        for table, name, _, tensor in places:
            table[name] = tensor
        yield
    finally:
        for table, name, old, _ in places:
            table[name] = old


def _exchanged(value: Any, new: Mapping[int, Tensor]) -> Any:
    """Return the value with its tensors replaced, also in lists, tuples and dictionaries; itself if nothing is replaced."""
    if id(value) in new:
        return new[id(value)]
    if type(value) in (list, tuple):
        items = [_exchanged(part, new) for part in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if type(value) is dict:
        parts = {key: _exchanged(part, new) for key, part in value.items()}
        return parts if any(parts[key] is not part for key, part in value.items()) else value
    return value


_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_TRUSTED = ("torch.nn.modules.", "torch.nn.functional", "fedveil.")
"""Modules whose layers store nothing about their examples except the statistics of batch normalisation. Scripts and graphs that
torch makes from user-defined code do not belong to them."""


def has_user_code(module: nn.Module) -> bool:
    """Return whether a part has a class, a hook, a function or a `forward` from outside of torch and fedveil."""
    from torch.nn.modules.module import _has_any_global_hook

    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return True
    return any(not _trusted(type(part)) or _has_own_entries(part) for part in module.modules())


def _has_own_entries(part: nn.Module) -> bool:
    """Return whether a layer holds a hook, a replaced method, or a function from elsewhere."""
    hung = any(value and name.endswith("_hooks") for name, value in vars(part).items())
    functions = {name: value for name, value in vars(part).items() if callable(value)}
    foreign = any(hasattr(type(part), name) or not _trusted(value) for name, value in functions.items())
    return hung or foreign or any(getattr(p, name) for p in part.parameters(recurse=False) for name in _TENSOR_HOOKS)


def _trusted(code: Any) -> bool:
    """Return whether a class or a function comes from torch, from fedveil, or from Python's C code."""
    return isinstance(code, BuiltinFunctionType) or str(getattr(code, "__module__", None)).startswith(_TRUSTED)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name, each once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def training_mode(module: nn.Module) -> nn.Module:
    """Set training mode, except for parts without trained parameters such as a frozen backbone, and return the module."""
    module.train()
    for part in module.modules():
        if _frozen(part):
            part.eval()
    return module


def normalising(module: nn.Module) -> list[nn.Module]:
    """Return the layers that record statistics of their batches."""
    from torch.nn.modules.batchnorm import _NormBase

    return [part for part in module.modules() if isinstance(part, _NormBase) and part.track_running_stats]


def batch_statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances that training changes, by name, excluding layers in evaluation mode."""
    changing = {id(b) for part in normalising(module) if part.training for b in part.buffers() if b.is_floating_point()}
    return {name: b for name, b in module.named_buffers() if id(b) in changing}


def statistics_names(module: nn.Module) -> set[str]:
    """Return the names of all buffers of batch normalisation."""
    counted = {id(b) for part in normalising(module) for b in part.buffers()}
    return {name for name, b in module.named_buffers(remove_duplicate=False) if id(b) in counted}


def _frozen(part: nn.Module) -> bool:
    first = next(part.parameters(), None)
    return first is not None and not any(p.requires_grad for p in part.parameters())
