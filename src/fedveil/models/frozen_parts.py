"""Which parameters a module trains, the values that its frozen part has, and their digest."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError
from fedveil.models.lora import insert_adapters
from fedveil.models.module_checks import check_module
from fedveil.models.parts import Parts, RecordedModel, matching
from fedveil.training.params import batch_statistics, trained_parameters, training_mode

if TYPE_CHECKING:
    from torch import Tensor, nn

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
    import torch
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
    import torch

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
    import torch

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
    import torch

    return loaded == own or (own == torch.float32 and loaded in (torch.float16, torch.bfloat16))
