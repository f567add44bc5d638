"""Modules that cannot be trained here, each refused with what to do; and what makes one trainable at record level."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fedveil.errors import ConfigError
from fedveil.training.params import copied, normalising

_WRAPPERS = {
    "DataParallel": "its `.module`",
    "DistributedDataParallel": "its `.module`",
    "FullyShardedDataParallel": "its `.module`",
    "OptimizedModule": "its `._orig_mod`, the module before torch.compile",
    "ScriptModule": "the module before torch.jit",
}


def own_copy(module: nn.Module) -> nn.Module:
    """A copy of a module that was handed over; the caller's stays as it is.

    Raises:
        ConfigError: as `check_module`; or it cannot be copied.
    """
    check_module(module)
    try:
        return copied(module)
    except Exception as error:
        raise ConfigError(
            f"model: {type(module).__name__} cannot be copied ({str(error).splitlines()[0]}): hand over its class or a function "
            f"that makes it; torch.nn.utils.parametrizations replaces the older weight_norm and spectral_norm"
        ) from error


def fix(module: nn.Module) -> nn.Module:
    """Return a copy with `nn.GroupNorm` in the place of batch normalisation, which mixes the examples of a batch.

    Scale and shift are kept, running statistics are not. Each group has four channels or more, and there are at most 32 groups.

    Raises:
        ConfigError: as `own_copy`.
    """
    whole, new = nn.Sequential(own_copy(module)), dict[nn.Module, nn.Module]()
    for part in list(whole.modules()):
        for name, layer in part._modules.items():
            if isinstance(layer, _BatchNorm):
                part._modules[name] = new.setdefault(layer, _by_groups(layer))  # one layer may have two names
    return whole[0]


def _by_groups(layer: _BatchNorm) -> nn.GroupNorm:
    channels = layer.num_features
    groups = max(n for n in range(1, 33) if n == 1 or (channels % n == 0 and channels >= 4 * n))
    made = nn.GroupNorm(groups, channels, layer.eps, layer.affine)
    if layer.affine:
        made.weight, made.bias = layer.weight, layer.bias
    return made


def check_module(module: nn.Module) -> None:
    """Refuse what has no fixed float32 parameters of its own on the CPU.

    Raises:
        ConfigError: the first problem, and what to do.
    """
    name = type(module).__name__
    problem = next(_problems(module), "")
    if problem:
        raise ConfigError(f"model: {name}: {problem}")


def _problems(module: nn.Module) -> Iterator[str]:
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS:
            yield f"a {kind.__name__} wraps another module: hand over {_WRAPPERS[kind.__name__]}"
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    tensors = parameters | buffers
    for name, tensor in tensors.items():
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            yield f"{name} has no shape yet (a lazy module): pass one batch of examples through the module first"
        elif type(tensor.data) is not torch.Tensor or type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            yield f"{name} is a {type(tensor).__name__}: parameters and buffers must be plain tensors"
        elif tensor.device.type != "cpu":
            yield f"{name} is on {tensor.device}: hand the module over on the CPU; run.engine says where it trains"
        elif tensor.layout != torch.strided:
            yield f"{name} is {tensor.layout}: parameters and buffers must be dense"
        elif tensor.is_inference():
            yield f"{name} was made under torch.inference_mode: make the module outside of it"
    if not parameters:
        yield "it has no parameters: nothing to train"
    for name, p in parameters.items():
        if p.dtype != torch.float32:
            yield f"{name} is {str(p.dtype).removeprefix('torch.')}: parameters must be float32 (`module.float()`)"
    seen: dict[int, str] = {}
    for name, p in parameters.items():
        other = seen.setdefault(p.data_ptr(), name)
        if other != name and p.numel():
            yield f"{other} and {name} share memory without being one Parameter: tie them by `a.weight = b.weight`"
    for layer in normalising(module):
        if getattr(layer, "momentum", None) is None:
            yield f"{type(layer).__name__} with momentum=None counts batches across clients: give it a momentum, such as 0.1"
