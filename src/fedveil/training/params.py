"""A model as one flat vector with named layers.

Parameters and gradients are views of one buffer each; a layer (one parameter tensor) is a slice. Clipping, noise, masks and
per-layer norms are then a handful of vector operations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the layers of a flat vector, in order. Holds no tensor and needs no torch to build.

    Args:
        names: one name per layer, unique.
        shapes: one shape per layer; `()` is a single number.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes) or not self.names:
            raise ConfigError(
                f"a layout needs as many shapes as names, and at least one: {len(self.names)} names, {len(self.shapes)} shapes"
            )
        if len(set(self.names)) != len(self.names):
            raise ConfigError(f"layer names must be unique, got {list(self.names)}")

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]]) -> Layout:
        """The layout of a mapping from layer name to shape."""
        return cls(tuple(shapes), tuple(tuple(shape) for shape in shapes.values()))

    @cached_property
    def sizes(self) -> list[int]:
        """Coordinates in each layer."""
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def dimension(self) -> int:
        """d, the length of the flat vector."""
        return sum(self.sizes)

    def __len__(self) -> int:
        return len(self.names)

    def split(self, vector: Tensor) -> tuple[Tensor, ...]:
        """The layers of `vector` [d] as flat views."""
        import torch

        return torch.split(vector, self.sizes)

    def norms(self, vector: Tensor) -> Tensor:
        """The L2 norm of each layer of `vector` [d], as a tensor [L]."""
        import torch

        return torch.stack(torch._foreach_norm(list(self.split(vector))))

    def expand(self, per_layer: Tensor) -> Tensor:
        """`per_layer` [L] repeated over the coordinates of each layer, as a tensor [d]."""
        import torch

        return per_layer.repeat_interleave(torch.tensor(self.sizes, device=per_layer.device), output_size=self.dimension)


class FlatModel:
    """A module whose parameters and gradients live in two flat buffers, `vector` and `grad`, both [d].

    The module is taken over: its parameters become views, so writing `vector` changes the module and the reverse.
    Floating-point buffers (the statistics of batch normalisation) are copied in and out by `buffers` and `load_buffers`;
    integer buffers stay where they are.

    Args:
        vector, grad: memory to use, [d] each, for instance rows of one tensor that holds many models; by default its own.
    """

    def __reduce__(self) -> tuple[type[FlatModel], tuple[nn.Module]]:
        return FlatModel, (self.module,)

    def __init__(self, module: nn.Module, vector: Tensor | None = None, grad: Tensor | None = None) -> None:
        import torch

        named = list(module.named_parameters())
        if not named:
            raise ConfigError("the model has no parameters: nothing to train")
        wrong = [name for name, p in named if p.dtype != torch.float32]
        if wrong:
            raise ConfigError(f"parameters must be float32, these are not: {wrong}")
        self.module = module
        self.layout = Layout.of({name: p.shape for name, p in named})
        device = named[0][1].device
        self.vector = torch.empty(self.layout.dimension, device=device) if vector is None else vector
        self.grad = torch.zeros(self.layout.dimension, device=device) if grad is None else grad
        for (_, p), flat, grad in zip(named, self.layout.split(self.vector), self.layout.split(self.grad), strict=True):
            flat.copy_(p.detach().reshape(-1))
            p.data = flat.view(p.shape)
            p.grad = grad.view(p.shape)
        self._buffers = [b for b in module.buffers() if b.is_floating_point()]

    def to(self, device: torch.device | str) -> FlatModel:
        """This model if it is on `device`, else a copy of it there."""
        import torch

        if self.vector.device == torch.device(device):
            return self
        return FlatModel(copy.deepcopy(self.module).to(device))

    def load(self, vector: Tensor) -> None:
        """Set the parameters to `vector` [d]."""
        self.vector.copy_(vector)

    def buffers(self) -> Tensor:
        """A copy of the floating-point buffers as one flat vector (empty when there are none)."""
        import torch

        return torch.cat([b.reshape(-1) for b in self._buffers]) if self._buffers else self.vector.new_empty(0)

    def load_buffers(self, values: Tensor) -> None:
        """Set the floating-point buffers from the flat vector that `buffers` gave."""
        import torch

        for buffer, part in zip(self._buffers, torch.split(values, [b.numel() for b in self._buffers]), strict=True):
            buffer.copy_(part.view(buffer.shape))
