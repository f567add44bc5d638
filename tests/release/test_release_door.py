"""The door: restrict, clip, noise, charge, hand over."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.accounting.types import Adjacency, Gaussian, SampledGaussian, Scope, Unbounded, Unit, View
from fedveil.errors import BudgetExhausted, ConfigError, UpdateRefused
from fedveil.ledger.ledger import Entry
from fedveil.release.cost import event_of, plan_mu
from fedveil.release.door import AGGREGATE, Door, clipped
from fedveil.release.noise import Randomness
from fedveil.release.plan import DpSgd, Plan, Raw
from fedveil.training.params import Layout

LAYOUT = Layout(("a", "b"), ((3,), (2, 2)))


@dataclass
class Book:
    """A ledger that keeps its entries in a list."""

    entries: list[Entry] = field(default_factory=list)

    def charge(self, entry: Entry) -> int:
        self.entries.append(entry)
        return len(self.entries)


def door(
    view: View = View.SERVER,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
    layout: Layout = LAYOUT,
    seeded: bool = True,
    **more: object,
) -> Door:
    return Door(layout, Scope(Unit.CLIENT, adjacency, view), "run", Book(), Randomness(1, seeded), **more)  # type: ignore[arg-type]


def entries(d: Door) -> list[Entry]:
    assert isinstance(d.ledger, Book)
    return d.ledger.entries


# --- clipping ---


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=7, max_size=7),
    st.floats(1e-6, 1e6),
)
def test_clipped_norm_never_exceeds_the_clip(values: list[float], bound: float) -> None:
    vector = clipped(torch.tensor(values), Plan(clip=bound), LAYOUT)
    exact = math.sqrt(math.fsum(float(v) ** 2 for v in vector))
    assert exact <= bound * (1 + 1e-12)


def test_clip_leaves_short_vectors_and_zero_alone() -> None:
    x = torch.tensor([0.3, 0, 0, 0, 0.4, 0, 0])
    assert torch.equal(clipped(x, Plan(clip=0.51), LAYOUT), x)
    assert torch.equal(clipped(x * 0, Plan(clip=1.0), LAYOUT), x * 0)
    assert clipped(x, Plan(clip=0.25), LAYOUT).norm() == pytest.approx(0.25, rel=2e-6)


def test_layer_clip_bounds_each_layer_and_support_restricts_first() -> None:
    x = torch.tensor([3.0, 4.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    out = clipped(x, Plan(layer_clip=torch.tensor([1.0, 2.0])), LAYOUT)
    assert out.tolist() == pytest.approx([0.6, 0.8, 0, 1, 0, 0, 0], rel=2e-6)
    support = torch.tensor([True, False, False, True, True, True, True])
    out = clipped(x, Plan(clip=1.0, support=support), LAYOUT)
    assert out.tolist() == pytest.approx([3 / math.sqrt(10), 0, 0, 1 / math.sqrt(10), 0, 0, 0], rel=2e-6)


# --- noise ---


def noise_of(plan: Plan, layout: Layout, seeded: bool) -> np.ndarray:
    upload = door(layout=layout, seeded=seeded).upload(torch.zeros(layout.dimension), plan, 0, 0)
    return upload.vector.numpy().astype(np.float64)


@pytest.mark.parametrize("seeded", [True, False])
def test_noise_has_the_planned_std_and_two_thirds_or_three_halves_of_it_fail(seeded: bool) -> None:
    n = 20_000
    layout = Layout(("w", "v"), ((n,), (n,)))
    values = noise_of(Plan(clip=1.0, noise_std=torch.tensor([0.7, 2.1])), layout, seeded)

    def fits(sample: np.ndarray, std: float) -> bool:
        square = float((sample**2).sum()) / std**2
        lo, hi = stats.chi2.ppf([1e-7, 1 - 1e-7], n)
        return bool(lo < square < hi)

    for part, std in ((values[:n], 0.7), (values[n:], 2.1)):
        assert fits(part, std)
        assert not fits(part, std * 2 / 3)
        assert not fits(part, std * 3 / 2)
        assert stats.kstest(part / std, "norm").pvalue > 1e-6
        assert abs(np.corrcoef(part[:-1], part[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(values[:n], values[n:])[0, 1]) < 0.05


def test_noise_differs_by_client_round_and_run_unless_seeded() -> None:
    plan, zero = Plan(clip=1.0, noise_std=1.0), torch.zeros(7)
    seeded = [door().upload(zero, plan, c, r).vector for c, r in ((0, 0), (1, 0), (0, 1))]
    assert not torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded[0], seeded[2])
    assert torch.equal(seeded[0], door().upload(zero, plan, 0, 0).vector)
    free = [door(seeded=False).upload(zero, plan, 0, 0).vector for _ in range(2)]
    assert not torch.equal(free[0], free[1])


def test_noise_goes_only_where_something_is_sent_and_clamp_bounds_it() -> None:
    support = torch.tensor([True, True, False, False, True, True, True])
    upload = door().upload(torch.ones(7), Plan(clip=1.0, noise_std=5.0, support=support, clamp=0.5), 0, 0)
    assert (upload.vector[~support] == 0).all()
    assert (upload.vector[support] != 0).all()
    assert upload.vector.abs().max() <= 0.5


# --- refusals ---


@pytest.mark.parametrize(
    ("update", "word"),
    [
        (torch.full((7,), math.nan), "NaN"),
        (torch.tensor([math.inf, 0, 0, 0, 0, 0, 0]), "infinite"),
        (torch.zeros(6), "shape"),
        (torch.zeros(7, dtype=torch.float64), "float32"),
        (torch.zeros(7, dtype=torch.float16), "float32"),
        (torch.zeros(7, dtype=torch.int64), "float32"),
        (torch.full((7,), 1e7), "max_update_norm"),
    ],
)
def test_bad_updates_are_refused_with_client_and_round_and_nothing_is_charged(update: torch.Tensor, word: str) -> None:
    for act in ("upload", "seal"):
        d = door(View.SERVER if act == "upload" else View.AGGREGATE)
        with pytest.raises(UpdateRefused, match=f"client 4 in round 2.*{word}"):
            getattr(d, act)(update, Plan(clip=1.0, noise_std=1.0), 4, 2)
        assert entries(d) == []


def test_an_update_too_large_for_float32_norms_is_still_clipped_exactly() -> None:
    d = door(max_norm=math.inf)
    out = d.upload(torch.full((7,), 1e30), Plan(clip=1.0, noise_std=1e-12), 0, 0).vector
    assert out.norm() == pytest.approx(1.0, rel=1e-5)


# --- charging ---


def test_charge_comes_before_the_hand_over_and_a_refusal_lets_nothing_out() -> None:
    class Purse(Book):
        def charge(self, entry: Entry) -> int:
            if self.entries:
                raise BudgetExhausted("empty")
            return super().charge(entry)

    d = Door(LAYOUT, Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.SERVER), "run", Purse(), Randomness(1, True))
    d.upload(torch.ones(7), Plan(clip=1.0, noise_std=2.0), 3, 5)
    (entry,) = entries(d)
    assert (entry.client, entry.round, entry.event) == (3, 5, Gaussian(0.5))
    assert entry.clip == (1.0, 1.0)
    assert entry.noise_std == (2.0, 2.0)
    with pytest.raises(BudgetExhausted):
        d.upload(torch.ones(7), Plan(clip=1.0, noise_std=2.0), 3, 6)
    assert len(entries(d)) == 1


def test_a_ledger_that_cannot_be_written_lets_nothing_out() -> None:
    class Broken:
        def charge(self, entry: Entry) -> int:
            raise OSError("disk full")

    d = Door(LAYOUT, Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.SERVER), "run", Broken(), Randomness(1, True))
    with pytest.raises(OSError, match="disk full"):
        d.upload(torch.ones(7), Plan(clip=1.0, noise_std=2.0), 0, 0)


def test_raw_plans_are_marked_and_prove_nothing() -> None:
    d = door()
    raw = Raw(("weights",), lambda update: Plan(clip=float(update.norm()), noise_std=1.0), "clip reads the raw update")
    upload = d.upload(torch.ones(7), raw, 0, 0)
    (entry,) = entries(d)
    assert entry.reads == ("weights",)
    assert entry.event == Unbounded("clip reads the raw update")
    assert upload.plan.clip == pytest.approx(math.sqrt(7))


# --- sums ---


def test_sum_is_divided_by_the_planned_denominator_and_charged_once() -> None:
    d = door(View.AGGREGATE, rate=0.25)
    plan = Plan(clip=1.0, noise_std=1e-9, place="sum")
    parts = [d.seal(torch.ones(7) * k, plan, k, 0) for k in (1, 2)]
    upload = d.release_sum(parts, plan, 0, 4.0)
    assert upload.client == AGGREGATE
    assert upload.vector.norm() == pytest.approx(2 / 4, rel=1e-4)
    (entry,) = entries(d)
    assert isinstance(entry.event, SampledGaussian)
    assert entry.event.rate == 0.25
    assert entry.event.noise_multiplier == pytest.approx(1e-9)
    assert entry.participants == 2


def test_an_empty_round_still_releases_noise() -> None:
    d = door(View.AGGREGATE, rate=0.1)
    upload = d.release_sum([], Plan(clip=1.0, noise_std=1.0, place="sum"), 0, 2.0)
    assert upload.vector.norm() > 0
    assert len(entries(d)) == 1


def test_contributions_under_another_plan_are_refused() -> None:
    d = door(View.AGGREGATE)
    plan = Plan(clip=1.0, noise_std=1.0, place="sum")
    part = d.seal(torch.ones(7), Plan(clip=9.0, noise_std=1.0, place="sum"), 0, 0)
    with pytest.raises(ConfigError, match="plan of the round"):
        d.release_sum([part], plan, 0, 1.0)


def test_shares_of_noise_add_up_to_what_is_charged() -> None:
    d = door(View.AGGREGATE)
    plan = Plan(clip=1.0, noise_std=0.5, place="upload")
    d.release_sum([d.seal(torch.zeros(7), plan, c, 0) for c in range(4)], plan, 0, 4.0)
    assert entries(d)[0].event == Gaussian(1.0 / (0.5 * 2))


def test_weights_above_one_would_break_the_clip() -> None:
    with pytest.raises(ConfigError, match="weight"):
        door(View.AGGREGATE).seal(torch.ones(7), Plan(clip=1.0), 0, 0, weight=1.5)


# --- cost ---


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_mu_of_plans(adjacency: Adjacency) -> None:
    f = adjacency.factor
    assert plan_mu(Plan(clip=2.0, noise_std=4.0), LAYOUT, f) == pytest.approx(f / 2)
    assert plan_mu(Plan(clip=2.0, noise_std=torch.tensor([4.0, 1.0])), LAYOUT, f) == pytest.approx(2 * f)
    layered = Plan(noise_std=torch.tensor([1.0, 2.0]), layer_clip=torch.tensor([0.6, 1.6]))
    assert plan_mu(layered, LAYOUT, f) == pytest.approx(f * math.sqrt(0.36 + 0.64))
    joint = Plan(clip=1.0, noise_std=torch.tensor([1.0, 2.0]), layer_clip=torch.tensor([0.6, 1.6]))
    assert plan_mu(joint, LAYOUT, f) == pytest.approx(f * math.sqrt(0.36 + 0.64 / 4))
    one_layer = torch.tensor([False] * 3 + [True] * 4)
    assert plan_mu(Plan(clip=2.0, noise_std=torch.tensor([0.0, 1.0]), support=one_layer), LAYOUT, f) == pytest.approx(2 * f)


def test_what_cannot_be_proven_says_why() -> None:
    scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.SERVER)
    cases = {
        "without noise": Plan(clip=1.0),
        "not clipped": Plan(noise_std=1.0),
        "only their sum": Plan(clip=1.0, noise_std=1.0, place="sum"),
        "protects records": Plan(dp_sgd=DpSgd(1.0, 1.0, 0.1, 5)),
    }
    for word, plan in cases.items():
        event = event_of(plan, LAYOUT, scope, rate=0.5)
        assert isinstance(event, Unbounded)
        assert word in event.reason


def test_no_amplification_in_the_server_view() -> None:
    for view, place, kind in ((View.SERVER, "upload", Gaussian), (View.AGGREGATE, "sum", SampledGaussian)):
        plan = Plan(clip=1.0, noise_std=2.0, place=place)  # type: ignore[arg-type]
        event = event_of(plan, LAYOUT, Scope(Unit.CLIENT, Adjacency.ZERO_OUT, view), rate=0.1)
        assert isinstance(event, kind)


def test_dp_sgd_is_charged_as_sampled_steps_at_record_level() -> None:
    scope = Scope(Unit.RECORD, Adjacency.REPLACE_ONE, View.SERVER)
    event = event_of(Plan(dp_sgd=DpSgd(1.0, 3.0, 0.1, 5)), LAYOUT, scope, rate=None)
    assert event == SampledGaussian(0.1, 1.5, 5)


def test_taking_a_record_away_may_turn_a_clipped_update_round() -> None:
    plan = Plan(clip=1.0, noise_std=4.0)
    mus = {}
    for unit in Unit:
        event = event_of(plan, LAYOUT, Scope(unit, Adjacency.ZERO_OUT, View.SERVER), rate=None)
        assert isinstance(event, Gaussian)
        mus[unit] = event.mu
    assert mus == {Unit.CLIENT: 0.25, Unit.RECORD: 0.5}


def test_noise_in_shares_earns_no_amplification_because_its_size_tells_who_took_part() -> None:
    scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
    for place, kind in (("upload", Gaussian), ("sum", SampledGaussian)):
        plan = Plan(clip=1.0, noise_std=2.0, place=place)  # type: ignore[arg-type]
        assert isinstance(event_of(plan, LAYOUT, scope, rate=0.1, noisy_uploads=4), kind)
