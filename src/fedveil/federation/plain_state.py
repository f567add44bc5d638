"""Plain state (tensors, numbers, strings, lists, dictionaries) as files and messages, without pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save

from fedveil.errors import FedveilError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def tree_parts(tree: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """Yield the parts of a safetensors file for a tree of plain values: the tree in its metadata, then the tensors' memory.

    Raises:
        FedveilError: the tree holds a value that is not plain.
    """
    tensors: dict[str, Tensor] = {}
    head: dict[str, Any] = {"__metadata__": {"tree": json.dumps(encode(tree, tensors, ""))}}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)  # aligned: each starts at a multiple of its item size
    end = 0
    for key, value in ordered:
        start, end = end, end + value.nbytes
        head[key] = {"dtype": _kind(value.dtype), "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, value in ordered:
        yield _memory(value)


def is_storable(tree: dict[str, Any]) -> bool:
    """Return whether `tree_parts` can store a tree; the tensors' memory is not read."""
    try:
        next(tree_parts(tree))
    except Exception:  # too many digits, a list that contains itself, a tensor type that the format lacks
        return False
    return True


def _memory(tensor: Tensor) -> memoryview:
    import torch

    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


@cache
def _kind(dtype: torch.dtype) -> str:
    """Return the dtype's name in the safetensors format, as the library writes it."""
    import torch

    file = save({"x": torch.empty(0, dtype=dtype)})
    name: str = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])["x"]["dtype"]
    return name


def read_tree(path: Path) -> dict[str, Any]:
    """Return the tree that was written with `tree_parts`."""
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        tree: dict[str, Any] = decode(json.loads(file.metadata()["tree"]), tensors)
    return tree


def encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return `value` as JSON and move its tensors to `tensors`, by path; raise FedveilError for values that are not plain."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {"tensor": path}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": [[k, encode(v, tensors, f"{path}/{k}")] for k, v in value.items()]}
    raise FedveilError(
        f"the state at {path or 'the top'} is a {type(value).__name__}, which cannot be saved: use tensors and numbers"
    )


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value that was passed to `encode`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {k: decode(v, tensors) for k, v in content}
    items = [decode(v, tensors) for v in content]
    return items if kind == "list" else tuple(items)


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return plain state with `change` applied to each tensor."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(change, part) for key, part in value.items()}
    return type(value)(mapped(change, part) for part in value) if type(value) in (list, tuple) else value


def own_copy(value: Any) -> Any:
    """Return a copy of plain state with its tensors cloned."""
    return mapped(lambda tensor: tensor.detach().clone(), value)
