"""GPU and memory: whether a GPU works, and the settings under which a run uses it."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from fedveil.training.local import Precision


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Tell glibc to retain freed memory instead of returning it to the system page by page.

    Each training step frees its tensors and requests the same memory at once; with the default settings page faults take a third
    of a small network's step. Return whether the settings were made (glibc only); results do not change.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_MMAP_THRESHOLD, 2**30), (_M_TOP_PAD, 64 * 2**20))
    return all(mallopt(name, value) for name, value in settings)


def shared_zeros(*shape: int, inherited: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of zeros in memory shared between processes.

    Args:
        inherited: whether forked processes inherit it; otherwise it can be sent to spawned ones. Inherited memory does not count
            against the size of /dev/shm, which containers limit.
    """
    count = math.prod(shape)
    if not inherited or not count:
        return shared(torch.zeros(*shape, dtype=dtype))
    return torch.frombuffer(mmap.mmap(-1, dtype.itemsize * count), dtype=dtype, count=count).view(shape)


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """Move a tensor in place to memory shared with spawned processes, and return it."""
    same: torch.Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return same


GPU = "cuda:0"
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def gpu_problem() -> str:
    """Return the reason why no GPU can be used, or an empty string."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            return f"PyTorch {torch.__version__} was built without CUDA"
        return f"PyTorch {torch.__version__} finds no GPU that it can use"
    try:
        float(torch.zeros(1, device=GPU) + 1)
    except RuntimeError as error:
        return f"PyTorch {torch.__version__} cannot compute on it: {str(error).splitlines()[0]}"
    return ""


def gpu_in_machine() -> bool:
    """Return whether the machine has an NVIDIA GPU with its driver, regardless of PyTorch."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


@contextmanager
def settings(device: torch.device, precision: Precision, deterministic: bool) -> Iterator[None]:
    """Apply PyTorch's global settings for training on `device`, and restore them afterwards.

    Args:
        precision: only `tf32` allows rounding float32 products to TensorFloat-32. deterministic: results repeat bit for bit on
            the same device; operations that cannot guarantee it fail.

    Raises:
        ConfigError: determinism on a GPU without cuBLAS's environment variable, which must be set before the process starts.
    """
    if deterministic and device.type == "cuda" and os.environ.get(_CUBLAS) not in (":4096:8", ":16:8"):
        raise ConfigError(f"run.deterministic on a GPU needs the environment variable {_CUBLAS}=:4096:8, set before the start")
    before, tf32 = torch.get_float32_matmul_precision(), precision == "tf32"
    changed = deterministic and not torch.are_deterministic_algorithms_enabled()
    if changed:  # a redundant call would still import torch's compiler, which takes seconds
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=not deterministic, deterministic=deterministic, allow_tf32=tf32):
            yield
    finally:
        if changed:
            torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)
