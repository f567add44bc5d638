"""First-order optimisers of one flat vector: torch's own `sgd` and `adam`, called as functions.

`torch.optim.SGD` and `Adam` compute the same, to the bit, but their first step imports torch's compiler, which takes as long as
importing torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OptimizerSpec:
    """A first-order optimiser of torch.optim: `sgd` (momentum, weight_decay) or `adam` (betas fixed at torch's defaults)."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def build(self, state: Mapping[str, Tensor] | None = None) -> Optimizer:
        """The optimiser of one flat vector, which goes on from `state` where there is one."""
        return Optimizer(self, dict(state or {}))


@dataclass
class Optimizer:
    """One vector's optimiser. state: what a step leaves to the next, under torch's names; it may be stored."""

    spec: OptimizerSpec
    state: dict[str, Tensor]

    def step(self, vector: Tensor, gradient: Tensor, lr: float | None = None) -> None:
        """Move `vector` [d] in place along its gradient [d]. lr: of this step; by default the spec's."""
        (_adam if self.spec.name == "adam" else _sgd)(self, vector, gradient, self.spec.lr if lr is None else lr)


def _sgd(o: Optimizer, vector: Tensor, gradient: Tensor, lr: float) -> None:
    from torch.optim.sgd import sgd

    buffers = [o.state.get("momentum_buffer")]
    sgd(
        [vector],
        [gradient],
        buffers,
        foreach=False,
        fused=False,
        weight_decay=o.spec.weight_decay,
        momentum=o.spec.momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    if buffers[0] is not None:
        o.state["momentum_buffer"] = buffers[0]


def _adam(o: Optimizer, vector: Tensor, gradient: Tensor, lr: float) -> None:
    import torch
    from torch.optim.adam import adam

    if not o.state:
        o.state = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(vector), "exp_avg_sq": torch.zeros_like(vector)}
    adam(
        [vector],
        [gradient],
        [o.state["exp_avg"]],
        [o.state["exp_avg_sq"]],
        [],
        [o.state["step"]],
        foreach=False,
        fused=False,
        amsgrad=False,
        beta1=0.9,
        beta2=0.999,
        lr=lr,
        weight_decay=o.spec.weight_decay,
        eps=1e-8,
        maximize=False,
    )
