"""How long until something happens, where many are only known to have come so far."""

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

    A target is (time, event), in float32: the event is 1 if it happened then, and 0 if it had not yet.
    likelihood: `cox`, the partial likelihood of proportional hazards, of one score, the logarithm of the risk. It compares each
    event with everybody in the batch who was still there, so it is no mean over examples: client level only. `hazards`: a logit
    for each interval between `edges`, that the event happens there if it has not before (Gensheimer and Narasimhan 2019); a
    mean over examples, for record level too.
    ties: of events at the same time in `cox`, after Efron or Breslow. edges: ends of the intervals, from 0 on; public.
    """

    metrics: ClassVar = (Column("concordance", "Concordance index", "C", "higher", share=True),)
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
        """Whether it is that of `hazards`."""
        return self.likelihood == "hazards"

    def check(self, info: Info) -> None:
        """Two numbers an example."""
        need_quantities(self.name, info, "(time, event)")
        if info.target.shape != (2,):
            raise ConfigError(
                f"task.name = 'survival' needs targets (time, event) of shape (2,); {info.name} has {info.target.shape}"
            )

    def wrong_targets(self, target: NDArray[Any]) -> str:
        """Times are not negative, events are 0 or 1."""
        if (target[:, 0] < 0).any():
            return "negative times"
        return "" if np.isin(target[:, 1], (0, 1)).all() else "events other than 0 and 1"

    def outputs(self, info: Info) -> int:
        """One score, or one for each interval."""
        return len(self.edges) or 1

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Of `hazards`: whoever leaves within an interval has survived those before it.

        Raises:
            ConfigError: with `cox`, which has no loss for each example.
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
        """Of `cox`: the mean over the events of the batch; 0 without any."""
        if self.by_example:
            return super().loss(output, target)
        return _cox(output.reshape(-1), target[:, 0], target[:, 1], self.ties == "efron")

    def predictions(self, output: Tensor) -> Tensor:
        """Return the risk [n]; of `hazards` it is higher the fewer intervals one is expected to survive."""
        return -output.neg().sigmoid().cumprod(1).sum(1) if self.by_example else output.reshape(-1)

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """Harrell's C."""
        from fedveil.tasks.scores import concordance

        output, target = evidence
        return {"concordance": concordance(self.predictions(output), target[:, 0], target[:, 1] == 1)}

    def trivial(self, target: Tensor) -> float:
        """Return the concordance of an order by chance."""
        return 0.5


def _cox(score: Tensor, time: Tensor, event: Tensor, efron: bool) -> Tensor:
    """The negative logarithm of the partial likelihood, by event.

    Of d events at one time, the l-th (from 0) has the risk of all who were there, less l / d of that of the d (Efron 1977);
    after Breslow (1974) nothing is taken off.
    """
    import torch

    time, order = time.sort(descending=True, stable=True)
    score, event = score[order], event[order]
    group = torch.cat([time.new_zeros(1), (time[1:] != time[:-1]).cumsum(0)]).long()
    last = torch.searchsorted(group, group, right=True) - 1
    risk = score.logcumsumexp(0)[last]  # of all who were still there
    each = risk
    if efron:
        zeros = score.new_zeros(len(score))
        tied = zeros.index_add(0, group, event * (score - risk).exp())[group]  # the share of the d in it
        deaths = zeros.index_add(0, group, event)
        earlier = event * (event.cumsum(0) - event - (deaths.cumsum(0) - deaths)[group])
        each = risk + torch.log1p(-earlier / deaths[group].clamp_min(1) * tied)
    return (event * (each - score)).sum() / event.sum().clamp_min(1)
