"""Low-rank adapters (Hu et al. 2021, LoRA): W + scaling * B A with W frozen, in the layout of peft's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.errors import ConfigError
from fedveil.models.parts import matching

if TYPE_CHECKING:
    from fedveil.models.parts import LoraOptions


class LoraLinear(nn.Module):
    """A linear layer with an adapter: A [rank, in] and B [out, rank]."""

    def __init__(self, base: nn.Linear, options: LoraOptions, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer, self.scaling = base, options.scaling
        self.lora_A = _empty(base.in_features, options.rank)
        self.lora_B = _empty(options.rank, base.out_features)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(self.lora_B.weight)

    @property
    def weight(self) -> Tensor:
        """As one matrix, for code that asks the layer for it instead of calling it."""
        merged: Tensor = self.base_layer.weight + self.scaling * self.lora_B.weight @ self.lora_A.weight
        return merged

    @property
    def bias(self) -> Tensor | None:
        """That of the frozen layer."""
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Of x [..., in], [..., out]."""
        out: Tensor = self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))
        return out


class LoraEmbedding(nn.Module):
    """An embedding with an adapter: A [rank, tokens] and B [features, rank]."""

    def __init__(self, base: nn.Embedding, options: LoraOptions, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer, self.scaling = base, options.scaling
        self.lora_embedding_A = nn.Parameter(torch.empty(options.rank, base.num_embeddings))
        self.lora_embedding_B = nn.Parameter(torch.zeros(base.embedding_dim, options.rank))
        nn.init.kaiming_uniform_(self.lora_embedding_A, a=math.sqrt(5), generator=generator)

    @property
    def weight(self) -> Tensor:
        """As one matrix, for code that asks the layer for it instead of calling it."""
        merged: Tensor = self.base_layer.weight + self.scaling * (self.lora_embedding_B @ self.lora_embedding_A).T
        return merged

    def forward(self, x: Tensor) -> Tensor:
        """Of tokens [...], [..., features]."""
        low = F.embedding(x, self.lora_embedding_A.T, self.base_layer.padding_idx)
        out: Tensor = self.base_layer(x) + self.scaling * F.linear(low, self.lora_embedding_B)
        return out


def _empty(inputs: int, outputs: int) -> nn.Linear:
    """Without values: making them would draw from the global random state."""
    return nn.Linear(inputs, outputs, bias=False, device="meta").to_empty(device="cpu")


Adapted = LoraLinear | LoraEmbedding


def insert_adapters(module: nn.Module, options: LoraOptions, seed: int) -> None:
    """Put adapters into the layers that `options.targets` match, and freeze all but them. A comes from `seed`, B is zero.

    Raises:
        ConfigError: a target that matches no layer, or one that is neither a Linear nor an Embedding.
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
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, adapted[layer])


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
