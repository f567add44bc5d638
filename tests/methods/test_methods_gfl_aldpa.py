"""GFL-ALDPA: the growing budget by hand in both variants, which coordinates leave, and what all rounds cost together."""

from __future__ import annotations

import math

import pytest
import torch

import method_kit as h
from fedveil.accounting.types import Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.cost import plan_mu
from fedveil.mechanism.plan import Plan, Raw
from fedveil.papers.aldp_fl.baselines import GFLALDPA, drawn, largest
from method_kit import planner


def test_the_epsilon_of_a_round_by_hand() -> None:
    """Three rounds, p = 1: 1/6, 2/6 and 3/6 of 6; the same times 3 where epsilon is that of a round; p = 0: equal."""
    s = h.setting(epsilon=6.0, noise_multiplier=None, rounds=3)
    grows = GFLALDPA(variant="published")
    assert [grows.epsilon(s, t) for t in range(3)] == pytest.approx([1.0, 2.0, 3.0])
    assert [GFLALDPA(variant="published", budget="round").epsilon(s, t) for t in range(3)] == pytest.approx([3.0, 6.0, 9.0])
    assert [GFLALDPA(variant="published", growth=0.0).epsilon(s, t) for t in range(3)] == pytest.approx([2.0] * 3)
    assert [GFLALDPA(variant="published", growth=2.0).epsilon(s, t) for t in range(3)] == pytest.approx(
        [6 / 14, 24 / 14, 54 / 14]
    )


def test_the_published_noise_by_hand() -> None:
    """2 C sqrt(2 ln(1.25 T / delta)) / epsilon_t; of a mean over 100 records, with epsilon of a round, other constants."""
    s = h.setting(epsilon=6.0, noise_multiplier=None, rounds=3)
    whole = GFLALDPA(variant="published", clip=0.5)
    assert whole.published_std(s, 1) == pytest.approx(2 * 0.5 * math.sqrt(2 * math.log(1.25 * 3 / 1e-3)) / 2.0)
    each = GFLALDPA(variant="published", clip=0.5, budget="round", sensitivity="mean")
    assert each.published_std(s, 1) == pytest.approx(2 * 0.5 / 100 * math.sqrt(2 * math.log(1.25 / 1e-3)) / 6.0)


def test_the_published_plan_reads_the_update() -> None:
    s = h.setting(epsilon=6.0, noise_multiplier=None, rounds=3)
    m = GFLALDPA(variant="published", keep=0.3)
    answer = planner(m, s).plan(h.released([0.0] * 7), {})
    assert isinstance(answer, Raw)
    plan = answer.make(torch.tensor([0.1, -5.0, 0.2, 3.0, 0.0, 0.0, -0.3]))
    assert plan.support is not None
    assert plan.support.int().tolist() == [0, 1, 0, 1, 0, 0, 0]
    assert plan.noise_std == pytest.approx(m.published_std(s, 0))
    assert all(isinstance(event, Unbounded) for view in View for event in m.releases(s, view))
    claim = m.claim(s)
    assert claim is not None
    assert (claim.epsilon, claim.scope.unit) == (6.0, Unit.RECORD)
    with pytest.raises(ConfigError, match=r"privacy\.epsilon"):
        m.calibrate(h.setting())


def test_masks() -> None:
    assert largest(torch.tensor([1.0, -2.0, 0.0]), 2).int().tolist() == [1, 1, 0]
    masks = [drawn(1000, 100, 3, t) for t in range(40)]
    assert {int(mask.sum()) for mask in masks} == {100}
    assert drawn(1000, 100, 3, 0).equal(masks[0])
    assert not masks[0].equal(masks[1])
    often = torch.stack(masks).float().sum(0)
    assert 3.5 < float(often.mean()) < 4.5
    assert float(often.max()) < 15


def test_the_proven_noise_grows_less_and_costs_the_same_in_all() -> None:
    """T = 3, p = 1, z = 2: mu_t = (1/2) sqrt(3/14) (1, 2, 3), so the squares add up to 3/4; p = 0: 1/2 each."""
    for view in (View.SERVER, View.AGGREGATE):
        s = h.setting(view, rounds=3)
        policy = planner(GFLALDPA(clip=0.5, keep=0.5), s)
        plans = [policy.plan(h.released([0.0] * 7, round=t), {}) for t in range(3)]
        mus = [plan_mu(plan, s.layout, 1) for plan in plans if isinstance(plan, Plan)]
        assert mus == pytest.approx([0.5 * math.sqrt(3 / 14) * k for k in (1, 2, 3)])
        assert h.method_releases_mu(GFLALDPA(), s) == pytest.approx(math.sqrt(3) / 2)
        assert {plan.place for plan in plans if isinstance(plan, Plan)} == {"upload" if view is View.SERVER else "sum"}


def test_a_client_with_fewer_rounds_is_charged_for_the_dearest() -> None:
    """Two of three rounds: sqrt(4 + 9) of the three parts."""
    s = h.setting(rounds=3, max_participations=2)
    assert h.method_releases_mu(GFLALDPA(), s) == pytest.approx(0.5 * math.sqrt(3 / 14) * math.sqrt(13))
