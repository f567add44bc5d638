"""A GPU for machines without one: tensors in ordinary memory that say they are on `cuda:0` and refuse to be mixed with others.

Finds code that would fail on a GPU because it brings tensors of two devices together. Numbers are the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_iter

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
_MAY_MIX = {"copy_", "__getitem__"}
_OF_TYPES = {"_has_compatible_shallow_copy_type", "__set__"}
"""Copies go between devices, and an index may lie on the CPU."""


class PretendGpu(TorchFunctionMode):
    """While active, the device `cuda:0` exists."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}

    def holds(self, tensor: torch.Tensor) -> bool | None:
        """Whether it is on the pretended GPU; None for what has no memory of its own, as inside `vmap`."""
        with torch._C.DisableTorchFunction():
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):
                return None
            return storage._cdata in self._storages

    def place(self, value: Any) -> Any:
        """Put the tensors in `value` on the pretended GPU."""
        with torch._C.DisableTorchFunction():
            for tensor in _tensors(value):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage)
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__" and (resolve_name(func) or "").endswith(".device.__get__"):
            return CUDA if self.holds(args[0]) else func(*args)
        if name in ("numpy", "__array__") and self.holds(args[0]):
            raise TypeError("can't convert a cuda tensor to numpy: copy it to the CPU first")
        args, wanted = _without_device(name, args, kwargs)
        tensors = [t for t in _tensors((args, kwargs)) if self.holds(t) is not None]
        if name in ("to", "cpu") and wanted is not None:
            return self._moved(func(*args, **kwargs) if name == "to" else args[0], args[0], wanted)
        if name not in _OF_TYPES:
            self._check(name, tensors)
        if wanted == CUDA and kwargs.get("generator") is not None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if name == "randperm" or not tensors:
            on_gpu = wanted == CUDA
        else:
            on_gpu = wanted == CUDA if wanted is not None else any(map(self.holds, tensors))
        out = func(*args, **kwargs)
        return self.place(out) if on_gpu and name != "copy_" else out

    def _check(self, name: str, tensors: list[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunction():
            matter = [t for t in tensors if t.dim() or self.holds(t)]
        sides = {bool(self.holds(t)) for t in matter}
        if len(sides) > 1 and not (name == "copy_" or (name in _MAY_MIX and self.holds(matter[0]))):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu")

    def _moved(self, out: torch.Tensor, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        if bool(self.holds(source)) == (device == CUDA):
            return self.place(out) if device == CUDA else out
        with torch._C.DisableTorchFunction():
            copy = out.clone() if out.untyped_storage()._cdata == source.untyped_storage()._cdata else out
        return self.place(copy) if device == CUDA else copy


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (part for part in tree_iter(value) if isinstance(part, torch.Tensor))


def _without_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], torch.device | None]:
    """The arguments with the device replaced by the CPU, and the device that was asked for."""
    if name == "cpu":
        return args, CPU
    wanted: torch.device | None = None
    if kwargs.get("device") is not None:
        wanted = torch.device(kwargs["device"])
        kwargs["device"] = CPU
    if name == "to":
        found = [a for a in args[1:] if isinstance(a, torch.device | str)]
        wanted = torch.device(found[0]) if found else wanted
        args = (args[0], *(CPU if isinstance(a, torch.device | str) else a for a in args[1:]))
    return args, wanted
