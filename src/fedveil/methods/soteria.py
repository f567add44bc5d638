"""Soteria (Sun et al. 2021): the columns of the last layer's gradient that tell most of the input are not sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Released
from fedveil.methods.base import Release, Setting, Unproven
from fedveil.methods.gradient_compression import Defence, last_matrix, quantile
from fedveil.training.local import Client, Local, Plain

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.training.params import FlatModel

Form = Literal["repo", "paper"]
_OFFSET = 0.1
"""Added to the representation in the public code, so that nothing is divided by zero."""
_REASON = "Soteria adds no noise: all but some columns of one layer's gradient leave as they are, and raw data choose the columns"


class Soteria(Defence):
    """Columns of the last fully connected layer's gradient are set to zero, those of the most telling representations.

    r is that layer's input, of one example; the sensitivity of r_j is the norm of its derivative by the example.

    Args:
        form: `repo`, columns with sensitivity / (r_j + 0.1) below its quantile, compared as absolute values: meant for r >= 0.
            `paper`, the columns with the largest |r_j| / sensitivity. Both sums run over the batch.
        pruning_rate: share of the columns; 0.01 and 0.6 in the public code, by network.
        weighting: clients count by their number of examples, or all the same.
    """

    name: Literal["soteria"] = "soteria"
    reason: ClassVar[str] = _REASON
    reconstructed: ClassVar[str] = "sources defend one gradient; here each batch of local training is defended"
    form: Form = "repo"
    pruning_rate: float = Field(0.6, ge=0, lt=1)

    def calibrate(self, s: Setting) -> Setting:
        if last_matrix(s.layout) is None:
            raise ConfigError("soteria defends a fully connected layer, and this model trains none: choose another model.name")
        return super().calibrate(s)

    def release(self, s: Setting) -> Release:
        """Columns that stayed at zero are not sent."""
        return Unproven(("representations",), self.reason, sent_columns)

    def client(self, s: Setting) -> Client:
        """Plain training on pruned gradients."""
        return PrunedColumns(form=self.form, rate=self.pruning_rate)


def sent_columns(s: Setting, seen: Released, update: Tensor) -> Plan:
    """Everything is sent but the columns of the last matrix that are zero."""
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
    """The columns that are not sent, as bool [features].

    Args:
        r, sensitivity: representation and norm of its derivative by the example, [n, features]. rate: in [0, 1).

    Source: Sun et al. 2021, Section 4; `repo` as its public code.
    """
    import torch

    if form == "repo":
        score = (sensitivity / (r + _OFFSET)).sum(0)
        return score.abs() < quantile(score, rate)
    worth = (r.abs() / sensitivity).nan_to_num(0.0).sum(0)  # 0 / 0: a dead unit tells nothing
    chosen = torch.zeros_like(worth, dtype=torch.bool)
    chosen[worth.topk(int(rate * len(worth))).indices] = True
    return chosen


def sensitivities(model: FlatModel, weight: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Input of the layer with that weight, and the norm of its derivative by each example, both [n, features]."""
    import torch

    seen: list[Tensor] = []
    layer = model.module.get_submodule(weight.rpartition(".")[0])
    hook = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    x = x.detach().clone().requires_grad_(True)
    model.eval()  # no statistics of these examples, no dropout
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
