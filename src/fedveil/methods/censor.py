"""CENSOR (Zhang et al. 2025): what is sent is orthogonal to the gradient, and still lowers the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.methods.base import Release, Setting, Unproven, as_trained
from fedveil.methods.gradient_compression import Defence
from fedveil.tasks.task import Task
from fedveil.training.local import Client, Local, Plain

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Form = Literal["repo", "paper"]
_STEP = 1e-4
"""Learning rate at which candidates are tried."""
_REASON = (
    "CENSOR adds no noise of known size: the norm of each layer's gradient leaves, and the gradient itself where no candidate "
    "lowers the loss, and after the first rounds"
)


class Censor(Defence):
    """Each layer's gradient is replaced by a random direction orthogonal to it, of the same norm: the best of some trials.

    Args:
        form: `repo`, the public code: the projection is divided by the gradient's norm once instead of twice, so candidates are
            orthogonal only to gradients of norm 1; and the raw gradient is sent where no candidate lowers the loss. `paper`,
            orthogonal, and the best candidate is always sent.
        trials: candidates, each of which costs a forward pass.
        rounds: how many of the first rounds are defended. The public code defends ten epochs of one gradient each.
        weighting: clients count by their number of examples, or all the same.
    """

    name: Literal["censor"] = "censor"
    reason: ClassVar[str] = _REASON
    reconstructed: ClassVar[str] = (
        "sources defend one gradient an epoch; here each batch of local training is defended, and epochs are rounds"
    )
    form: Form = "repo"
    trials: int = Field(20, ge=1)
    rounds: int = Field(10, ge=0)

    def release(self, s: Setting) -> Release:
        """The upload leaves as training made it."""
        return Unproven(("gradients", "losses"), self.reason, as_trained)

    def client(self, s: Setting) -> Client:
        """Plain training on replaced gradients."""
        return Orthogonal(form=self.form, trials=self.trials, rounds=self.rounds, task=s.task)


@dataclass(frozen=True, kw_only=True)
class Orthogonal(Plain):
    """Plain training in which each batch's gradient is replaced by the best of some random candidates."""

    form: Form
    trials: int
    rounds: int
    task: Task

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        loss = local.gradient(local, x, y)
        if local.round < self.rounds:
            self.replace(local, x, y)
        local.descend()
        return loss

    def replace(self, local: Local, x: Tensor, y: Tensor) -> None:
        """Put the candidate with the least loss into the gradient; `repo` keeps the gradient where none is below the loss now."""
        import torch

        model = local.model
        start, gradient, best = model.vector.clone(), model.grad.clone(), None
        directions = torch.Generator().manual_seed(_secret_seed(local))
        model.eval()
        least = self._loss(local, x, y) if self.form == "repo" else torch.inf
        for _ in range(self.trials):
            found = candidate(model.layout.split(gradient), directions, self.form)
            model.vector.copy_(start - _STEP * found)
            value = self._loss(local, x, y)
            if value < least or (best is None and self.form == "paper"):
                least, best = value, found
        model.train()
        model.load(start)
        model.grad.copy_(gradient if best is None else best)

    def _loss(self, local: Local, x: Tensor, y: Tensor) -> float:
        import torch

        with torch.no_grad():
            return float(self.task.loss(local.model.module(x).float(), y))


def candidate(gradient: Sequence[Tensor], directions: torch.Generator, form: Form) -> Tensor:
    """A random vector [d] with the gradient's norm in each layer, orthogonal to it there.

    In the form `repo` the part along a gradient g of random unit r is r.g (1 / |g| - 1) instead of 0, and NaN where g is 0.

    Source: Zhang et al. 2025; `repo` as its public code.
    """
    import torch

    found = []
    for g in gradient:
        r = torch.randn(len(g), generator=directions).to(g.device)
        r, norm = r / r.norm(), g.norm()
        if form == "repo":
            o = r - (r @ g / norm) * g
        else:
            unit = g / norm if norm > 0 else g
            o = r - (r @ unit) * unit
        size = o.norm()
        found.append(o / size * norm if size > 0 else o)
    return torch.cat(found)


def _secret_seed(local: Local) -> int:
    """A seed from the run's own noise, so that directions are as secret as noise is: who knows them undoes the projection."""
    return int.from_bytes(local.noise(2).cpu().numpy().tobytes(), "little") % 2**62
