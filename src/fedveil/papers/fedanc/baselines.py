"""Baselines of FedANC, defences without a guarantee: Soteria (Sun et al. 2021) and CENSOR (Zhang et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Released
from fedveil.methods.base import Release, Setting, Unproven, as_trained
from fedveil.methods.gradient_compression import Defence, last_matrix, quantile
from fedveil.tasks.task import Task
from fedveil.training.local import Client, Local, Plain

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedveil.training.params import FlatModel


Form = Literal["repo", "paper"]
_OFFSET = 0.1
"""Added to the representation in the public code, to avoid division by zero."""
_SOTERIA_REASON = (
    "Soteria adds no noise: all but some columns of one layer's gradient leave as they are, and raw data choose the columns"
)


class Soteria(Defence):
    """Prune columns of the last linear layer's gradient, those of the most revealing representations.

    r is that layer's input for one example; the sensitivity of r_j is the norm of its derivative with respect to the example.

    Args:
        form: `repo`, columns with sensitivity / (r_j + 0.1) below its quantile, compared as absolute values: meant for r >= 0.
            `paper`, the columns with the largest |r_j| / sensitivity. Both sums run over the batch.
        pruning_rate: share of the columns; 0.01 and 0.6 in the public code, by network.
        weighting: weight clients by their number of examples, or equally.
    """

    name: Literal["soteria"] = "soteria"
    reason: ClassVar[str] = _SOTERIA_REASON
    reconstructed: ClassVar[str] = "sources defend one gradient; here each batch of local training is defended"
    form: Form = "repo"
    pruning_rate: float = Field(0.6, ge=0, lt=1)

    def calibrate(self, s: Setting) -> Setting:
        if last_matrix(s.layout) is None:
            raise ConfigError("soteria defends a fully connected layer, and this model trains none: choose another model.name")
        return super().calibrate(s)

    def release(self, s: Setting) -> Release:
        """Send the update without the columns that stayed zero."""
        return Unproven(("representations",), self.reason, sent_columns)

    def client(self, s: Setting) -> Client:
        """Plain training on pruned gradients."""
        return PrunedColumns(form=self.form, rate=self.pruning_rate)


def sent_columns(s: Setting, released: Released, update: Tensor) -> Plan:
    """Return the sent coordinates: all except columns of the last matrix that are zero."""
    import torch

    layer, sent = last_matrix(s.layout), torch.ones_like(update, dtype=torch.bool)
    assert layer is not None
    weight = s.layout.split(update)[layer].view(s.layout.shapes[layer])
    s.layout.split(sent)[layer].view(weight.shape)[:, ~weight.any(0)] = False
    return Plan(support=sent)


@dataclass(frozen=True)
class PrunedColumns(Plain):
    """Plain training in which each batch's gradient loses columns of the last fully connected layer."""

    form: Form = "repo"
    rate: float = 0.0

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        loss = local.gradient(local, x, y)
        layout = local.model.layout
        layer = last_matrix(layout)
        assert layer is not None
        dropped = columns(*sensitivities(local.model, layout.names[layer], x), form=self.form, rate=self.rate)
        layout.split(local.model.grad)[layer].view(layout.shapes[layer])[:, dropped] = 0.0
        local.descend()
        return loss


def columns(r: Tensor, sensitivity: Tensor, *, form: Form, rate: float) -> Tensor:
    """Return the columns that are not sent, as bool [features].

    Args:
        r, sensitivity: representation and norm of its derivative with respect to the example, [n, features]. rate: in [0, 1).

    Source: Sun et al. 2021, Section 4; `repo` as its public code.
    """
    import torch

    if form == "repo":
        score = (sensitivity / (r + _OFFSET)).sum(0)
        return score.abs() < quantile(score, rate)
    worth = (r.abs() / sensitivity).nan_to_num(0.0).sum(0)  # 0 / 0: a dead unit reveals nothing
    chosen = torch.zeros_like(worth, dtype=torch.bool)
    chosen[worth.topk(int(rate * len(worth))).indices] = True
    return chosen


def sensitivities(model: FlatModel, weight: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of that layer and the norm of its derivative with respect to each example, both [n, features]."""
    import torch

    seen: list[Tensor] = []
    layer = model.module.get_submodule(weight.rpartition(".")[0])
    hook = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    x = x.detach().clone().requires_grad_(True)
    model.eval()  # neither batch statistics nor dropout
    try:
        model.module(x)
    finally:
        hook.remove()
        model.train()
    (r,) = seen
    if r.ndim != 2:
        raise ConfigError(f"soteria needs a layer that sees each example once, and {weight} sees {tuple(r.shape[1:])}")
    norms = [torch.autograd.grad(r[:, j].sum(), x, retain_graph=True)[0].flatten(1).norm(dim=1) for j in range(r.shape[1])]
    return r.detach(), torch.stack(norms, 1)


_STEP = 1e-4
"""Learning rate of the trial steps."""
_CENSOR_REASON = (
    "CENSOR adds no noise of known size: the norm of each layer's gradient leaves, and the gradient itself where no candidate "
    "lowers the loss, and after the first rounds"
)


class Censor(Defence):
    """Replace each layer's gradient by the best of some random directions that are orthogonal to it and have its norm.

    Args:
        form: `repo`, the public code: the projection is divided by the gradient's norm once instead of twice, so candidates are
            orthogonal only to gradients of norm 1; and the raw gradient is sent where no candidate lowers the loss. `paper`,
            orthogonal, and the best candidate is always sent.
        trials: candidates, each of which costs a forward pass.
        rounds: number of defended rounds, the first ones. The public code defends ten epochs of one gradient each.
        weighting: weight clients by their number of examples, or equally.
    """

    name: Literal["censor"] = "censor"
    reason: ClassVar[str] = _CENSOR_REASON
    reconstructed: ClassVar[str] = (
        "sources defend one gradient an epoch; here each batch of local training is defended, and epochs are rounds"
    )
    form: Form = "repo"
    trials: int = Field(20, ge=1)
    rounds: int = Field(10, ge=0)

    def release(self, s: Setting) -> Release:
        """Send the upload as training made it."""
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
        """Replace the gradient by the candidate with the least loss; `repo` keeps it if no candidate lowers the loss."""
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
    """Return a random vector [d] that in each layer has the gradient's norm and is orthogonal to it.

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
    """Return a seed from the run's noise, so that directions are as secret as noise: they would allow to undo the projection."""
    return int.from_bytes(local.noise(2).cpu().numpy().tobytes(), "little") % 2**62
