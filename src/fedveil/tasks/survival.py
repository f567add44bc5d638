"""Survival analysis: the time until an event, with censored observations."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fedveil.data.catalogue import Info
from fedveil.errors import ConfigError
from fedveil.tasks.task import Column, Task, need_quantities

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class Survival(Task):
    """The time until an event, which many are only known to have reached without it: Cox regression or discrete hazards.

    A target is (time, event), in float32: the event is 1 if it happened at that time, and 0 if it had not happened yet.
    likelihood: `cox`, the partial likelihood of proportional hazards, with one score, the logarithm of the risk. It compares each
    event with all examples of the batch still at risk, so it is not a mean over examples: client level only. `hazards`: a logit
    for each interval between `edges`, of an event there if none happened before (Gensheimer and Narasimhan 2019); it is a mean
    over examples, for record level too.
    ties: treatment of simultaneous events in `cox`, by Efron or Breslow. edges: ends of the intervals, from 0 on; public.
    """

    metrics: ClassVar = (Column("concordance", "Concordance index", "C", "higher", share=True, chance=0.5),)
    loss_unit: ClassVar = "negative log-likelihood"
    trivial_answer: ClassVar = "an order by chance"
    output_form: ClassVar = "[n, 1], the logarithm of the risk (cox), or [n, K], a logit for each interval (hazards)"

    name: Literal["survival"] = "survival"
    likelihood: Literal["cox", "hazards"] = "cox"
    ties: Literal["efron", "breslow"] = "efron"
    edges: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = ()

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if (self.likelihood == "hazards") != bool(self.edges) or any(a >= b for a, b in pairwise(self.edges)):
            raise ConfigError(
                f"task.edges = {list(self.edges)} with task.likelihood = {self.likelihood!r}: give 'hazards' the rising ends of "
                f"its intervals, such as [1, 2, 5], and 'cox' none"
            )
        return self

    @property
    def by_example(self) -> bool:
        """Return whether the likelihood is `hazards`."""
        return self.likelihood == "hazards"

    def check(self, info: Info) -> None:
        """Require two numbers per example."""
        need_quantities(self.name, info, "(time, event)")
        if info.target.shape != (2,):
            raise ConfigError(
                f"task.name = 'survival' needs targets (time, event) of shape (2,); {info.name} has {info.target.shape}"
            )

    def wrong_targets(self, target: NDArray[Any]) -> str:
        """Refuse negative times, and events other than 0 and 1."""
        if (target[:, 0] < 0).any():
            return "negative times"
        return "" if np.isin(target[:, 1], (0, 1)).all() else "events other than 0 and 1"

    def outputs(self, info: Info) -> int:
        """Return 1, or the number of intervals."""
        return len(self.edges) or 1

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the losses of `hazards`; an example censored within an interval has survived the earlier intervals only.

        Raises:
            ConfigError: the likelihood is `cox`, which has no loss per example.
        """
        import torch
        from torch.nn import functional as F

        if not self.by_example:
            raise ConfigError("task.likelihood = 'cox' has no loss for each example: take 'hazards'")
        time, happened = target[:, :1], target[:, 1:] == 1
        edges, interval = output.new_tensor(self.edges), torch.arange(len(self.edges), device=output.device)
        within = (time > edges).sum(1, keepdim=True)
        survived = torch.where(happened, within, (time >= edges).sum(1, keepdim=True))
        return ((interval < survived) * F.softplus(output) + (happened & (interval == within)) * F.softplus(-output)).sum(1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a batch; for `cox` the mean over its events, 0 without any."""
        if self.by_example:
            return super().loss(output, target)
        return _cox(output.reshape(-1), target[:, 0], target[:, 1], self.ties == "efron")

    def predictions(self, output: Tensor) -> Tensor:
        """Return the risk [n]; for `hazards`, minus the expected number of survived intervals."""
        from torch.nn import functional as F

        if not self.by_example:
            return output.reshape(-1)
        return -F.logsigmoid(-output).cumsum(1).exp().sum(1)  # a sum of logarithms, since ONNX has no running product

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """Return Harrell's C."""
        from fedveil.tasks.scores import concordance

        output, target = evidence
        return {"concordance": concordance(self.predictions(output), target[:, 0], target[:, 1] == 1)}

    def trivial(self, target: Tensor) -> float:
        """Return the concordance of a random order."""
        return 0.5


def _cox(score: Tensor, time: Tensor, event: Tensor, efron: bool) -> Tensor:
    """Return the negative log partial likelihood, averaged over events.

    Of d simultaneous events, the l-th (from 0) has the risk of all examples at risk, minus l / d of the risk of the d events
    (Efron 1977); Breslow (1974) subtracts nothing.
    """
    import torch

    time, order = time.sort(descending=True, stable=True)
    score, event = score[order], event[order]
    group = torch.cat([time.new_zeros(1), (time[1:] != time[:-1]).cumsum(0)]).long()
    last = torch.searchsorted(group, group, right=True) - 1
    risk = score.logcumsumexp(0)[last]  # of all examples still at risk
    each = risk
    if efron:
        zeros = score.new_zeros(len(score))
        tied = zeros.index_add(0, group, event * (score - risk).exp())[group]  # the share of the simultaneous events in it
        deaths = zeros.index_add(0, group, event)
        earlier = event * (event.cumsum(0) - event - (deaths.cumsum(0) - deaths)[group])
        each = risk + torch.log1p(-earlier / deaths[group].clamp_min(1) * tied)
    return (event * (each - score)).sum() / event.sum().clamp_min(1)
