"""Plain state, of tensors, numbers, texts, lists and dictionaries, as files and messages: without pickle, whole or not at all."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save

from fedveil.errors import FedveilError
from fedveil.ledger.owner_only import owner_only

if TYPE_CHECKING:
    from torch import Tensor

_sync = os.fsync


def tree_bytes(tree: dict[str, Any]) -> bytes:
    """A tree of plain values as a safetensors file, the tree in its metadata.

    Raises:
        FedveilError: it holds a value that is not plain.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(tree, tensors, ""))
    own = {key: value.detach().clone().contiguous() for key, value in tensors.items()}
    return save(own, {"tree": text})


def read_tree(path: Path) -> dict[str, Any]:
    """The tree that `tree_bytes` made the file of."""
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        tree: dict[str, Any] = decode(json.loads(file.metadata()["tree"]), tensors)
    return tree


def encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """`value` as JSON, with its tensors moved to `tensors` under their path; raises FedveilError for what is not plain."""
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
    """What `encode` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {k: decode(v, tensors) for k, v in content}
    items = [decode(v, tensors) for v in content]
    return items if kind == "list" else tuple(items)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file for its owner alone, synced, by renaming: either all of it is there, or what was there before."""
    draft = path.with_name(path.name + ".part")
    try:
        with open(draft, "wb", opener=owner_only) as file:
            file.write(content)
            file.flush()
            sync(file.fileno())
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def sync(descriptor: int) -> None:
    """Wait until what was written to an open file is on the disk."""
    _sync(descriptor)


def sync_folder(folder: Path) -> None:
    """Sync what a folder lists."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
