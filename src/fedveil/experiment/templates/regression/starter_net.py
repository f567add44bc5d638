"""The network: any torch.nn.Module does. Arguments called input_shape and outputs are filled in, the others come from [model]."""

from __future__ import annotations

from torch import Tensor, nn


class Net(nn.Module):
    """Two layers."""

    def __init__(self, input_shape: tuple[int, ...], outputs: int, hidden: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(input_shape[0], hidden), nn.Tanh())
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out
