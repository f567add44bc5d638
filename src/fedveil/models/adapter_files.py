"""Adapters as files that peft reads (`adapter_model.safetensors`, `adapter_config.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError
from fedveil.models.lora import LoraEmbedding, LoraLinear
from fedveil.training.params import trained_parameters

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedveil.models.parts import LoraOptions
    from fedveil.training.params import FlatModel

_PREFIX = "base_model.model"


def save_adapter(model: FlatModel, options: LoraOptions, folder: str | Path) -> Path:
    """Write the adapters of a model into a folder, with the modules that are trained beside them; returns the folder.

    Args:
        options: `config.model.parts.lora` of the run's configuration.

    Raises:
        ConfigError: the model has no adapters, or trains a part that peft cannot hold.
    """
    from safetensors.torch import save_file

    layers = {name: m for name, m in model.module.named_modules() if isinstance(m, LoraLinear | LoraEmbedding)}
    if not layers:
        raise ConfigError("model.lora: this model has no adapters, so there are none to save")
    whole = _trained_modules(model.module, tuple(layers))
    tensors = {key: value for name, layer in layers.items() for key, value in _adapter(name, layer).items()}
    for name in whole:
        tensors |= {f"{_PREFIX}.{name}.{key}": t for key, t in model.module.get_submodule(name).state_dict().items()}
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}, out / "adapter_model.safetensors"
    )
    described = {
        "peft_type": "LORA",
        "r": options.rank,
        "lora_alpha": options.rank if options.alpha is None else options.alpha,
        "target_modules": list(layers),
        "modules_to_save": whole or None,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "base_model_name_or_path": None,
        "task_type": None,
    }
    (out / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return out


def _adapter(name: str, layer: LoraLinear | LoraEmbedding) -> dict[str, Tensor]:
    own = {key: value for key, value in layer.state_dict().items() if key.startswith("lora_")}
    return {f"{_PREFIX}.{name}.{key}": value for key, value in own.items()}


def _trained_modules(module: nn.Module, adapted: tuple[str, ...]) -> list[str]:
    """The modules outside of the adapters that hold trained parameters."""
    found = dict.fromkeys(name.rpartition(".")[0] for name in trained_parameters(module) if ".lora_" not in f".{name}")
    for name in found:
        if not name or any(name.startswith(f"{layer}.") for layer in adapted):
            raise ConfigError(
                f"model.trainable: peft has no place for {name or 'parameters of the model itself'} beside adapters"
            )
    return list(found)
