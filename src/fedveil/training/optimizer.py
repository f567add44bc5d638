"""First-order optimisers of one flat vector: torch's `sgd` and `adam`, called as functions.

`torch.optim.SGD` and `Adam` give the same result to the bit, but their first step imports torch's compiler, which takes as long
as importing torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OptimizerSpec:
    """First-order optimiser: torch's `sgd` (momentum) and `adam`, or `yogi` (Reddi et al. 2021, Algorithm 2: FedYogi).

    Args:
        betas, eps: of adam and yogi; eps is tau of Reddi et al.
        relative_to_clip: for the server: divide the aggregate by the clip, so that lr is the length of a step along the mean of
            aligned clipped updates, independent of the clip.
    """

    name: Literal["sgd", "adam", "yogi"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    relative_to_clip: bool = False

    def build(self, state: Mapping[str, Tensor] | None = None) -> Optimizer:
        """Return the optimiser of one flat vector, continuing from `state` if given."""
        return Optimizer(self, dict(state or {}))


@dataclass
class Optimizer:
    """Optimiser of one vector. state: the optimiser's state between steps, under torch's names; it may be stored."""

    spec: OptimizerSpec
    state: dict[str, Tensor]

    def step(self, vector: Tensor, gradient: Tensor, lr: float | None = None) -> None:
        """Update `vector` [d] in place by its gradient [d]. lr: of this step; by default that of the spec."""
        _STEPS[self.spec.name](self, vector, gradient, self.spec.lr if lr is None else lr)


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
        beta1=o.spec.betas[0],
        beta2=o.spec.betas[1],
        lr=lr,
        weight_decay=o.spec.weight_decay,
        eps=o.spec.eps,
        maximize=False,
    )


def _yogi(o: Optimizer, vector: Tensor, gradient: Tensor, lr: float) -> None:
    import torch

    gradient = gradient + o.spec.weight_decay * vector if o.spec.weight_decay else gradient
    if not o.state:
        o.state = {"exp_avg": torch.zeros_like(vector), "exp_avg_sq": torch.full_like(vector, o.spec.eps**2)}
    (beta1, beta2), mean, second, square = o.spec.betas, o.state["exp_avg"], o.state["exp_avg_sq"], gradient * gradient
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.sub_((1 - beta2) * square * torch.sign(second - square))
    vector.sub_(lr * mean / (second.sqrt() + o.spec.eps))


_STEPS = {"sgd": _sgd, "adam": _adam, "yogi": _yogi}
