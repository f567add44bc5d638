"""Counts beside an update: the release costs what it cost without them, and a client moves them by no more than was planned."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedveil.errors import ConfigError
from fedveil.mechanism.cost import plan_mu
from fedveil.mechanism.mechanisms import Banded, Participation
from fedveil.mechanism.plan import COUNTS, DpSgd, Extra, LocalDpSgd, Plan, Raw, UnprovenPlan
from fedveil.release.release_layout import EvaluationCounts
from fedveil.training.params import Layout

LAYOUT = Layout(("a", "b"), ((3,), (2,)))
HALF = EvaluationCounts(0.5, 40)
PLANS = {
    "one noise": Plan(clip=2.0, noise_std=3.0),
    "shares": Plan(clip=2.0, noise_std=3.0, place="upload"),
    "by layer": Plan(clip=2.0, layer_clip=torch.tensor([1.0, 1.5]), noise_std=torch.tensor([3.0, 1.0])),
    "layers alone": Plan(layer_clip=torch.tensor([1.0, 1.5]), noise_std=torch.tensor([3.0, 1.0])),
    "with an extra": Plan(clip=2.0, noise_std=3.0, extras={"within": Extra(0.5, 4.0)}),
    "a part": Plan(clip=2.0, noise_std=torch.tensor([3.0, 0.1]), support=torch.tensor([True, True, False, False, False])),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("share", [0.001, 0.3, 0.9])
@pytest.mark.parametrize(("factor", "uploads"), [(1, 1), (2, 1), (1, 7)])
def test_the_price_is_that_of_the_update_alone(name: str, share: float, factor: int, uploads: int) -> None:
    plan, counts = PLANS[name], EvaluationCounts(share, 25)
    beside = counts.added_to(plan, LAYOUT)
    alone = plan_mu(plan, LAYOUT, factor, uploads)
    assert plan_mu(beside, LAYOUT, factor, uploads) == pytest.approx(alone, rel=2e-7)  # noise by layer is float32
    assert isinstance(alone, float)
    extra = beside.extras[COUNTS]
    assert extra.clip == 25
    assert factor * extra.clip / (extra.noise_std * math.sqrt(uploads)) == pytest.approx(math.sqrt(share) * alone)
    assert set(beside.extras) == {*plan.extras, COUNTS}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(clip=1.0),
        Plan(clip=1.0, noise_std=torch.tensor([1.0, 0.0])),
        Plan(clip=1.0, noise_std=1.0, extras={"within": Extra(0.5, 0.0)}),
        UnprovenPlan(clip=1.0, noise_std=1.0, reason="it reads raw gradients"),
        Plan(clip=1.0, noise_std=1.0, support=torch.zeros(5, dtype=torch.bool)),
        LocalDpSgd(step=DpSgd(1.0, 0.0, 0.1, 3, 10.0, 100)),
        Plan(clip=1.0, noise_std=1.0, place="sum", mechanism=Banded((1.0, 0.5), 4, Participation(2, 2))),
        Raw(("update",), lambda update: Plan(), "it reads the update"),
    ],
)
def test_counts_never_leave_without_noise(plan: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"privacy\.evaluation: counts can be released only together with an update that has noise"
    ):
        HALF.added_to(plan, LAYOUT)
