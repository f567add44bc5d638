"""Trained parameters and frozen part of a module, and checks of modules."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fedveil.errors import ConfigError
from fedveil.models.lora import insert_adapters
from fedveil.models.parts import Parts, RecordedModel, matching
from fedveil.training.params import batch_statistics, copied, normalising, trained_parameters, training_mode

if TYPE_CHECKING:
    from torch import Tensor


_WRAPPERS = {
    "DataParallel": "its `.module`",
    "DistributedDataParallel": "its `.module`",
    "FullyShardedDataParallel": "its `.module`",
    "OptimizedModule": "its `._orig_mod`, the module before torch.compile",
    "ScriptModule": "the module before torch.jit",
}


def own_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a user's module, which itself is not changed.

    Raises:
        ConfigError: as in `check_module`, or the module cannot be copied.
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
    """Return a copy with `nn.GroupNorm` in place of batch normalisation, which mixes the examples of a batch.

    Scale and shift are copied, running statistics are dropped. There are at most 32 groups, of four channels or more.

    Raises:
        ConfigError: as in `own_copy`.
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
    norm = nn.GroupNorm(groups, channels, layer.eps, layer.affine)
    if layer.affine:
        norm.weight, norm.bias = layer.weight, layer.bias
    return norm


def check_module(module: nn.Module) -> None:
    """Refuse a module without plain float32 parameters of fixed shape on the CPU.

    Raises:
        ConfigError: the first problem, with advice.
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
            yield f"{name} is on {tensor.device}: move the module to the CPU; run.engine decides where it trains"
        elif tensor.layout != torch.strided:
            yield f"{name} is {tensor.layout}: parameters and buffers must be dense"
        elif tensor.is_inference():
            yield f"{name} was made under torch.inference_mode: make the module outside of it"
    if not parameters:
        yield "it has no parameters: nothing to train"
    for name, p in parameters.items():
        if p.dtype != torch.float32:
            yield f"{name} is {str(p.dtype).removeprefix('torch.')}: parameters must be float32 (`module.float()`)"
    first_names: dict[int, str] = {}
    for name, p in parameters.items():
        other = first_names.setdefault(p.data_ptr(), name)
        if other != name and p.numel():
            yield f"{other} and {name} share memory without being one Parameter: tie them by `a.weight = b.weight`"
    for layer in normalising(module):
        if getattr(layer, "momentum", None) is None:
            yield f"{type(layer).__name__} with momentum=None counts batches across clients: give it a momentum, such as 0.1"


_log = logging.getLogger(__name__)


def choose_parts(module: nn.Module, parts: Parts, seed: int) -> None:
    """Load public weights, insert adapters, and freeze the untrained parameters, as `parts` specify.

    Args:
        module: user-defined; it is changed. seed: of the adapters.

    Raises:
        ConfigError: nothing is trained, a pattern matches nothing, or a module or a file does not fit.
    """
    check_module(module)
    if parts.weights is not None:
        _load_weights(module, parts)
    if parts.lora is not None:
        insert_adapters(module, parts.lora, seed)
    if parts.trainable is not None:
        everything = dict(module.named_parameters(remove_duplicate=False))
        chosen = {id(everything[name]) for name in matching(parts.trainable, everything, "trainable")}
        for name, p in everything.items():
            adapter = parts.lora is not None and ".lora_" in f".{name}"
            p.requires_grad_(id(p) in chosen or (adapter and p.requires_grad))
    if not trained_parameters(module):
        raise ConfigError(
            f"model: no parameter of {type(module).__name__} requires a gradient, so nothing would be trained: name some in "
            f"model.trainable, or call requires_grad_() on them"
        )
    training_mode(module)


def _load_weights(module: nn.Module, parts: Parts) -> None:
    """Set parameters and buffers from the file `parts.weights`.

    Names must be those of the module; a parameter that `parts.trainable` matches may be absent and keeps its value.

    Raises:
        ConfigError: the file cannot be read, or names, shapes or types differ.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    where = f"model.weights = {parts.weights!r}"
    try:
        loaded = load_file(str(parts.weights))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{where}: cannot be read as safetensors: {error}") from None
    current = module.state_dict(keep_vars=True)
    loaded_memory = {t.data_ptr() for name, t in current.items() if name in loaded}
    trained = (
        matching(parts.trainable, dict(module.named_parameters(remove_duplicate=False)), "trainable") if parts.trainable else ()
    )
    missing = [name for name, t in current.items() if name not in loaded and t.data_ptr() not in loaded_memory]
    lacking, unexpected = [name for name in missing if name not in trained], [name for name in loaded if name not in current]
    other = [
        f"{name} is {_kind(loaded[name])}, not {_kind(current[name])}"
        for name in current.keys() & loaded.keys()
        if loaded[name].shape != current[name].shape or not _exact(loaded[name].dtype, current[name].dtype)
    ]
    problems = (("missing: ", lacking), ("unexpected: ", unexpected), ("", sorted(other)))
    if mismatch := "; ".join(f"{word}{', '.join(names)}" for word, names in problems if names):
        raise ConfigError(
            f"{where} does not fit {type(module).__name__}: {mismatch}; a parameter may be missing if model.trainable matches it"
        )
    with torch.no_grad():
        for name, value in loaded.items():
            current[name].copy_(value)
    if missing:
        _log.info("model.weights has no %s: trained from the run's seed", ", ".join(missing))


def recorded_model(module: nn.Module, parts: Parts) -> RecordedModel:
    """Return the record of a module after `choose_parts`."""
    shapes = {name: tuple(p.shape) for name, p in trained_parameters(module).items()}
    file = "" if parts.weights is None else hashlib.sha256(Path(parts.weights).read_bytes()).hexdigest()
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    trained = {n: p for n, p in trained_parameters(module).items() if ".lora_" not in f".{n}"}  # adapters come from the seed
    return RecordedModel(
        kind=name,
        shapes=shapes,
        statistics=bool(batch_statistics(module)),
        frozen=frozen_digest(module),
        weights=file,
        initial=_digest(trained),
    )


def frozen_digest(module: nn.Module) -> str:
    """Return the SHA-256 over names, shapes and values of a module's untrained state; an empty string if there is none.

    Batch statistics, which training changes, and their counters are excluded.
    """
    changing = {*trained_parameters(module), *batch_statistics(module)}
    return _digest(
        {
            name: value
            for name, value in module.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor)
            and not (name in changing or name.endswith("num_batches_tracked") or value.requires_grad)
        }
    )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, types, shapes and values; an empty string without tensors."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if tensors else ""


def check_recorded(recorded: RecordedModel, now: RecordedModel, *, by_seed: bool) -> None:
    """Refuse a module that differs from the recorded one.

    Args:
        by_seed: the initial values come from the run's seed, which may differ from that of the recorded run.

    Raises:
        ConfigError: the layout, the frozen part, the public weights or the initial values differ.
    """
    if list(recorded.shapes.items()) != list(now.shapes.items()):
        both = recorded.shapes.keys() | now.shapes.keys()
        differ = [name for name in sorted(both) if recorded.shapes.get(name) != now.shapes.get(name)] or ["their order"]
        raise ConfigError(
            f"model: the trained parameters of {now.kind} are not those recorded ({', '.join(differ[:6])}): give the model "
            f"of the run, with the same model.trainable and model.lora; for another model, leave model.recorded out"
        )
    if recorded.weights != now.weights:
        raise ConfigError(
            f"model.weights: the file has SHA-256 {now.weights or 'none'}, and {recorded.weights or 'none'} is recorded"
        )
    if recorded.frozen != now.frozen:
        raise ConfigError(
            f"model: the frozen part of {now.kind} has SHA-256 {now.frozen or 'none'}, and {recorded.frozen or 'none'} is "
            f"recorded: give it the values that it had"
        )
    if not by_seed and recorded.initial not in ("", now.initial):
        raise ConfigError(
            f"model: the initial parameters of {now.kind} have SHA-256 {now.initial or 'none'}, and {recorded.initial} is "
            f"recorded: give it the values that it had before the run; for another model, leave model.recorded out"
        )


def _kind(tensor: object) -> str:
    return f"{str(getattr(tensor, 'dtype', '')).removeprefix('torch.')} {list(getattr(tensor, 'shape', ()))}"


def _exact(loaded: object, own: object) -> bool:
    """Return whether the module's type represents each value of the loaded type exactly."""
    return loaded == own or (own == torch.float32 and loaded in (torch.float16, torch.bfloat16))
