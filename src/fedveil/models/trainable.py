"""The parameters that a module trains, its frozen part, and modules that cannot be trained."""

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


_log = logging.getLogger(__name__)


def choose_parts(module: nn.Module, parts: Parts, seed: int) -> None:
    """Load public weights, put adapters in, and freeze what is not trained, as `parts` say.

    Args:
        module: one's own; it is changed. seed: of the adapters.

    Raises:
        ConfigError: nothing is trained, a pattern matches nothing, a module or a file that does not fit.
    """
    check_module(module)
    if parts.weights is not None:
        load_weights(module, parts)
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


def load_weights(module: nn.Module, parts: Parts) -> None:
    """Set parameters and buffers from the file `parts.weights`.

    Names must be those of the module; a parameter that `parts.trainable` matches may be absent, and keeps the value it has.

    Raises:
        ConfigError: the file cannot be read, or names, shapes or types are others.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    where = f"model.weights = {parts.weights!r}"
    try:
        loaded = load_file(str(parts.weights))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{where}: cannot be read as safetensors: {error}") from None
    own = module.state_dict(keep_vars=True)
    known = {t.data_ptr() for name, t in own.items() if name in loaded}
    trained = (
        matching(parts.trainable, dict(module.named_parameters(remove_duplicate=False)), "trainable") if parts.trainable else ()
    )
    missing = [name for name, t in own.items() if name not in loaded and t.data_ptr() not in known]
    lacking, unexpected = [name for name in missing if name not in trained], [name for name in loaded if name not in own]
    other = [
        f"{name} is {_kind(loaded[name])}, not {_kind(own[name])}"
        for name in own.keys() & loaded.keys()
        if loaded[name].shape != own[name].shape or not _exact(loaded[name].dtype, own[name].dtype)
    ]
    problems = (("missing: ", lacking), ("unexpected: ", unexpected), ("", sorted(other)))
    if shown := "; ".join(f"{word}{', '.join(names)}" for word, names in problems if names):
        raise ConfigError(
            f"{where} does not fit {type(module).__name__}: {shown}; a parameter may be missing if model.trainable matches it"
        )
    with torch.no_grad():
        for name, value in loaded.items():
            own[name].copy_(value)
    if missing:
        _log.info("model.weights has no %s: trained from the run's seed", ", ".join(missing))


def recorded_model(module: nn.Module, parts: Parts) -> RecordedModel:
    """What a run records of a module whose parts are chosen."""
    shapes = {name: tuple(p.shape) for name, p in trained_parameters(module).items()}
    file = "" if parts.weights is None else hashlib.sha256(Path(parts.weights).read_bytes()).hexdigest()
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    own = {name: p for name, p in trained_parameters(module).items() if ".lora_" not in f".{name}"}  # adapters are drawn
    return RecordedModel(
        kind=name,
        shapes=shapes,
        statistics=bool(batch_statistics(module)),
        frozen=frozen_digest(module),
        weights=file,
        initial=_digest(own),
    )


def frozen_digest(module: nn.Module) -> str:
    """SHA-256 over names, shapes and values of what is saved with a module and not trained; empty where there is nothing.

    Batch statistics, which training changes, and the counters beside them are left out.
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
    """SHA-256 over names, types, shapes and values; empty where there are none."""
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest() if tensors else ""


def check_recorded(recorded: RecordedModel, now: RecordedModel, *, by_seed: bool) -> None:
    """Refuse a module that is not the recorded one.

    Args:
        by_seed: its initial values come from the run's seed, which need not be that of the recorded run.

    Raises:
        ConfigError: another layout, another frozen part, other public weights, or other initial values.
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
    """Whether each value of one type is one of the other."""
    return loaded == own or (own == torch.float32 and loaded in (torch.float16, torch.bfloat16))
