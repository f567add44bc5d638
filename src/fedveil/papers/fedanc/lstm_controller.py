"""FedANC's controller: an LSTM of 64 units and a linear layer, 18,050 parameters in one flat vector, as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from fedveil.training.local import State
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN = 64
LAYOUT = Layout.of(
    {
        "weight_ih": (4 * HIDDEN, 4),
        "weight_hh": (4 * HIDDEN, HIDDEN),
        "bias_ih": (4 * HIDDEN,),
        "bias_hh": (4 * HIDDEN,),
        "weight_out": (2, HIDDEN),
        "bias_out": (2,),
    }
)
"""Shapes of the parameters in the order of torch.nn.LSTM(4, 64) and torch.nn.Linear(64, 2)."""

BETA = (0.3, 0.7)
"""Range of the noise scale in pre-training (FedANC, Eq. 7)."""
_NORM, _LOSS = (1e-5, 0.1), (0.1, 10.0)
_SEQUENCE, _BATCH = 5, 64


@dataclass(frozen=True)
class Controller:
    """The fixed settings of a controller.

    Args:
        gamma_min, gamma_max: range of the share of coordinates. lr: Adam's rate, in pre-training and in the run.
        steps: of pre-training. dropout: of the hidden state in pre-training; off in the run. seed: of the initial weights.
    """

    gamma_min: float = 0.1
    gamma_max: float = 0.9
    lr: float = 1e-3
    steps: int = 300
    dropout: float = 0.1
    seed: int = 0

    def start(self) -> State:
        """Return a pre-trained controller with empty memory: weights, Adam's moments, hidden and cell state, last outputs."""
        import torch

        weights = _pretrained(self).clone()
        state: State = {"weights": weights, "first": torch.zeros_like(weights), "second": torch.zeros_like(weights)}
        middle = (self.gamma_min + self.gamma_max) / 2
        return state | {
            "hidden": torch.zeros(1, HIDDEN),
            "cell": torch.zeros(1, HIDDEN),
            "updates": 0,
            "b": sum(BETA) / 2,
            "gamma": middle,
        }

    def act(self, state: State, norm: float, loss: float) -> tuple[float, float]:
        """Return (beta, gamma) for the input [norm, loss, last beta, last gamma], without changing the state."""
        import torch

        with torch.no_grad():
            beta, gamma, _, _ = self.outputs(state["weights"], self._input(state, norm, loss), state["hidden"], state["cell"])
        return float(beta), float(gamma)

    def learn(self, state: State, norm: float, loss: float, objective: Callable[[Tensor, Tensor], Tensor]) -> State:
        """Return the state after one Adam step on `objective(beta, gamma)`, with the memory advanced by this input.

        The gradient goes through this step of the LSTM only (truncated to length one).
        """
        import torch

        x, weights = self._input(state, norm, loss), state["weights"].clone().requires_grad_()
        beta, gamma, hidden, cell = self.outputs(weights, x, state["hidden"], state["cell"])
        (gradient,) = torch.autograd.grad(objective(beta[0], gamma[0]), weights)
        adam = _adam(state["weights"], gradient, state["first"], state["second"], state["updates"] + 1, self.lr)
        new = dict(zip(("weights", "first", "second"), adam, strict=True))
        memory = {"hidden": hidden.detach(), "cell": cell.detach(), "b": float(beta.detach()), "gamma": float(gamma.detach())}
        return {**state, **new, **memory, "updates": state["updates"] + 1}

    def outputs(
        self, weights: Tensor, x: Tensor, hidden: Tensor, cell: Tensor, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return beta [n], gamma [n], hidden and cell [n, 64] from inputs x [n, 4] (FedANC, Eq. 5); `keep` is dropout's mask."""
        import torch
        from torch.nn import functional as F

        parts = [p.view(shape) for p, shape in zip(LAYOUT.split(weights), LAYOUT.shapes, strict=True)]
        hidden, cell = torch.lstm_cell(x, [hidden, cell], *parts[:4])
        u = F.linear(hidden if keep is None else hidden * keep, parts[4], parts[5])
        gamma = self.gamma_min + (self.gamma_max - self.gamma_min) * u[:, 1].sigmoid()
        return F.softplus(u[:, 0]), gamma, hidden, cell

    def _input(self, state: State, norm: float, loss: float) -> Tensor:
        weights: Tensor = state["weights"]
        return weights.new_tensor([[norm, loss, state["b"], state["gamma"]]])


def _adam(w: Tensor, gradient: Tensor, first: Tensor, second: Tensor, t: int, lr: float) -> tuple[Tensor, Tensor, Tensor]:
    first = first.lerp(gradient, 0.1)
    second = second.lerp(gradient.square(), 0.001)
    step = first / (1 - 0.9**t) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
    return w - lr * step, first, second


@lru_cache(maxsize=16)
def _pretrained(c: Controller) -> Tensor:
    """Return weights after pre-training on synthetic feedback (FedANC, Eqs. 6 to 8), from sequences of 5 inputs.

    The targets are independent of the inputs, so the controller can learn only their mean.
    """
    import torch

    g = torch.Generator().manual_seed(c.seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=g) * (high - low) + low

    w = uniform(-(HIDDEN**-0.5), HIDDEN**-0.5, LAYOUT.dimension)
    first, second = torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, c.steps + 1):
        w.requires_grad_()
        hidden, cell, loss = torch.zeros(_BATCH, HIDDEN), torch.zeros(_BATCH, HIDDEN), torch.zeros(())
        for _ in range(_SEQUENCE):
            columns = [_NORM, _LOSS, BETA, (c.gamma_min, c.gamma_max)]
            x = torch.stack([uniform(*bounds, _BATCH) for bounds in columns], 1)
            keep = (torch.rand(_BATCH, HIDDEN, generator=g) >= c.dropout) / (1 - c.dropout)
            beta, gamma, hidden, cell = c.outputs(w, x, hidden, cell, keep)
            target_beta, target_gamma = uniform(*BETA, _BATCH), uniform(c.gamma_min, c.gamma_max, _BATCH)
            loss = loss + ((beta - target_beta).square() + (gamma - target_gamma).square()).mean() / _SEQUENCE
        (gradient,) = torch.autograd.grad(loss, w)
        w, first, second = _adam(w.detach(), gradient, first, second, t, c.lr)
    return w


def ranks(values: Tensor) -> Tensor:
    """Return the rank [d] of each non-negative value (as float32), 0 for the largest; ties are in order of position.

    Non-negative floats sort like their bits. Sorting integers with the index in the lower half is several times faster.
    """
    import torch

    index = torch.arange(len(values), device=values.device)
    order = ((~values.float().view(torch.int32)).long() * 2**32 + index).sort().values & (2**32 - 1)
    position = torch.empty_like(order)
    position[order] = index
    return position


def soft_mask_slope(rank: Tensor, gamma: float, width: float) -> Tensor:
    """d M / d gamma [d], straight through: the hard top-k forward, sigmoid((gamma - (rank + 1/2) / d) / width) backward."""
    soft = ((gamma - (rank + 0.5) / len(rank)) / width).sigmoid()
    return soft * (1 - soft) / width
