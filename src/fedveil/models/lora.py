"""Low-rank adapters (Hu et al. 2021), and files for peft."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.errors import ConfigError
from fedveil.models.parts import matching
from fedveil.training.params import trained_parameters

if TYPE_CHECKING:
    from fedveil.models.parts import LoraOptions
    from fedveil.training.params import FlatModel


class LoraLinear(nn.Module):
    """Linear layer with an adapter: A [rank, in] and B [out, rank]."""

    def __init__(self, base: nn.Linear, options: LoraOptions, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer, self.scaling = base, options.scaling
        self.lora_A = _empty(base.in_features, options.rank)
        self.lora_B = _empty(options.rank, base.out_features)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(self.lora_B.weight)

    @property
    def weight(self) -> Tensor:
        """Return the merged matrix, for code that reads the weight instead of calling the layer."""
        merged: Tensor = self.base_layer.weight + self.scaling * self.lora_B.weight @ self.lora_A.weight
        return merged

    @property
    def bias(self) -> Tensor | None:
        """Return the bias of the frozen layer."""
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        out: Tensor = self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))
        return out


class LoraEmbedding(nn.Module):
    """Embedding with an adapter: A [rank, tokens] and B [features, rank]."""

    def __init__(self, base: nn.Embedding, options: LoraOptions, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer, self.scaling = base, options.scaling
        self.lora_embedding_A = nn.Parameter(torch.empty(options.rank, base.num_embeddings))
        self.lora_embedding_B = nn.Parameter(torch.zeros(base.embedding_dim, options.rank))
        nn.init.kaiming_uniform_(self.lora_embedding_A, a=math.sqrt(5), generator=generator)

    @property
    def weight(self) -> Tensor:
        """Return the merged matrix, for code that reads the weight instead of calling the layer."""
        merged: Tensor = self.base_layer.weight + self.scaling * (self.lora_embedding_B @ self.lora_embedding_A).T
        return merged

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [...] to [..., features]."""
        low = F.embedding(x, self.lora_embedding_A.T, self.base_layer.padding_idx)
        out: Tensor = self.base_layer(x) + self.scaling * F.linear(low, self.lora_embedding_B)
        return out


def _empty(inputs: int, outputs: int) -> nn.Linear:
    """Return an uninitialised layer: initialisation would draw from the global random state."""
    return nn.Linear(inputs, outputs, bias=False, device="meta").to_empty(device="cpu")


Adapted = LoraLinear | LoraEmbedding


def insert_adapters(module: nn.Module, options: LoraOptions, seed: int) -> None:
    """Insert adapters into the layers that `options.targets` match, and freeze everything else; A comes from `seed`, B is zero.

    Raises:
        ConfigError: a target matches no layer, or one that is neither a Linear nor an Embedding.
    """
    layers = dict(module.named_modules(remove_duplicate=False))
    layers.pop("")
    fitting = [name for name, layer in layers.items() if _takes_adapter(layer)]
    chosen = matching(options.targets, layers, "lora.targets", fitting)
    generator = torch.Generator().manual_seed(seed)
    module.requires_grad_(False)
    adapted: dict[nn.Module, Adapted] = {}
    for name in (name for name in layers if name in chosen):
        layer = layers[name]
        if layer not in adapted:
            adapted[layer] = _adapted(name, layer, options, generator)
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, adapted[layer])


def _takes_adapter(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or (type(layer) is nn.Embedding and layer.max_norm is None)


def _adapted(name: str, layer: nn.Module, options: LoraOptions, generator: torch.Generator) -> Adapted:
    if type(layer) is nn.Linear:
        return LoraLinear(layer, options, generator)
    if isinstance(layer, nn.Embedding) and _takes_adapter(layer):
        return LoraEmbedding(layer, options, generator)
    raise ConfigError(
        f"model.lora.targets: {name} is a {type(layer).__name__}{' with max_norm' * isinstance(layer, nn.Embedding)}: adapters "
        f"are for Linear and Embedding layers; choose patterns that match these alone"
    )


_PREFIX = "base_model.model"


def save_adapter(model: FlatModel, options: LoraOptions, folder: str | Path) -> Path:
    """Write the adapters of a model and its other trained modules into a folder, and return the folder.

    Args:
        options: `config.model.parts.lora` of the run's configuration.

    Raises:
        ConfigError: the model has no adapters, or a trained part that peft cannot represent.
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
    tensors = {key: value for key, value in layer.state_dict().items() if key.startswith("lora_")}
    return {f"{_PREFIX}.{name}.{key}": value for key, value in tensors.items()}


def _trained_modules(module: nn.Module, adapted: tuple[str, ...]) -> list[str]:
    """Return the modules outside of the adapters that have trained parameters."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name in trained_parameters(module) if ".lora_" not in f".{name}")
    for name in modules:
        if not name or any(name.startswith(f"{layer}.") for layer in adapted):
            raise ConfigError(
                f"model.trainable: peft has no place for {name or 'parameters of the model itself'} beside adapters"
            )
    return list(modules)
