"""The door: restrict, clip, noise, charge, hand over."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.accounting.types import Adjacency, Gaussian, SampledGaussian, Scope, Unbounded, Unit, View
from fedveil.errors import BudgetExhausted, ConfigError, UpdateRefused
from fedveil.ledger.ledger import Entry
from fedveil.mechanism.cost import event_of, plan_mu
from fedveil.mechanism.grid import exponent_for, to_grid
from fedveil.mechanism.mechanisms import Independent
from fedveil.mechanism.plan import DpSgd, LocalDpSgd, Plan, Raw, UnprovenPlan
from fedveil.mechanism.sampler import rounded_normal
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.release.sealed import AGGREGATE, clipped
from fedveil.training.params import Layout

LAYOUT = Layout(("a", "b"), ((3,), (2, 2)))


@dataclass
class Book:
    """A ledger that keeps its entries in a list."""

    entries: list[Entry] = field(default_factory=list)

    def charge_all(self, entries: Sequence[Entry]) -> None:
        self.entries += entries


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


class Liar(torch.Tensor):
    """A tensor that says of itself that its norm is zero, whoever asks."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm" in getattr(func, "__name__", ""):
            return torch.zeros((), dtype=torch.float64)
        return super().__torch_function__(func, types, args, kwargs or {})


BAD: list[tuple[Any, str]] = [
    (None, "training gave no update"),
    (torch.full((7,), math.nan), "NaN"),
    (torch.tensor([math.inf, 0, 0, 0, 0, 0, 0]), "infinite"),
    (torch.zeros(6), r"shape \(7,\), got \(6,\)"),
    (torch.zeros(7, dtype=torch.float64), "float32"),
    (torch.zeros(7, dtype=torch.float16), "float32"),
    (torch.zeros(7, dtype=torch.int64), "float32"),
    (torch.zeros(7).to_sparse(), "plain dense tensor"),
    (torch.zeros(7, requires_grad=True), "requires a gradient"),
    (torch.full((7,), 1e5).as_subclass(Liar), r"float32 tensor, got torch.float32 \(Liar\)"),
    (torch.full((7,), 1e7), "max_update_norm"),
    ([0.0] * 7, "got list"),
]
PROMISING = {"upload": Plan(clip=1.0, noise_std=1.0), "sum": Plan(clip=1.0, noise_std=1.0, place="sum")}


@pytest.mark.parametrize(("update", "word"), BAD)
def test_without_a_promise_bad_updates_are_refused_and_nothing_is_charged(update: Any, word: str) -> None:
    raw = Raw(("weights",), lambda _: Plan(clip=1.0, noise_std=1.0), "reads the update")
    for plan in (
        Plan(),
        Plan(clip=1.0),
        Plan(noise_std=1.0),
        UnprovenPlan(clip=1.0, noise_std=1.0, reason="noise is not fresh"),
        raw,
    ):
        for act in ("upload", "seal"):
            d = door(View.SERVER if act == "upload" else View.AGGREGATE)
            with pytest.raises(UpdateRefused, match=word):
                getattr(d, act)(update, plan, 4, 2)
            assert entries(d) == []
        assert re.search(word, door().problem(update, {}))


@pytest.mark.parametrize(("update", "word"), BAD)
def test_under_a_promise_bad_updates_are_zero_with_noise_to_the_bit(update: Any, word: str) -> None:
    """What leaves, and the row, are those of an honest zero: with seeded noise they are equal to the bit."""
    zero, plan = torch.zeros(7), PROMISING["upload"]
    bad, honest = door(), door()
    one, other = bad.upload(update, plan, 4, 2), honest.upload(zero, plan, 4, 2)
    assert one.integers is not None
    assert other.integers is not None
    assert torch.equal(one.integers, other.integers)
    assert torch.equal(one.vector, other.vector)
    assert entries(bad) == entries(honest)
    assert len(entries(bad)) == 1
    for shared in PROMISING.values():
        bad, honest = door(View.AGGREGATE), door(View.AGGREGATE)
        sums = [
            d.release_sum([d.seal(u, shared, 4, 2), d.seal(torch.ones(7), shared, 5, 2)], shared, 2, 2.0)
            for d, u in ((bad, update), (honest, zero))
        ]
        assert torch.equal(sums[0].vector, sums[1].vector)
        assert entries(bad) == entries(honest)
        assert entries(bad)[0].participants == 2


def test_the_zero_of_a_bad_update_is_pure_noise_of_the_planned_std() -> None:
    n = 40_000
    layout = Layout(("w",), ((n,),))
    vector = door(layout=layout, seeded=False).upload(torch.full((n,), math.nan), Plan(clip=1e3, noise_std=1.5), 0, 0).vector
    lo, hi = stats.chi2.ppf([1e-7, 1 - 1e-7], n)
    for std, right in ((1.5, True), (1.0, False), (2.25, False)):
        assert (lo < float((vector.double() ** 2).sum()) / std**2 < hi) == right
    assert stats.kstest(vector.numpy() / 1.5, "norm").pvalue > 1e-6


def test_an_update_too_large_for_float32_norms_is_still_clipped_exactly() -> None:
    d = door(max_norm=math.inf)
    out = d.upload(torch.full((7,), 1e30), Plan(clip=1.0, noise_std=1e-12), 0, 0).vector
    assert out.norm() == pytest.approx(1.0, rel=1e-5)
    assert d.problem(torch.full((7,), 1e30), {}) == ""


# --- charging ---


def test_charge_comes_before_the_hand_over_and_a_refusal_lets_nothing_out() -> None:
    class Purse(Book):
        def charge_all(self, entries: Sequence[Entry]) -> None:
            if self.entries:
                raise BudgetExhausted("empty")
            super().charge_all(entries)

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
        def charge_all(self, entries: Sequence[Entry]) -> None:
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


@pytest.mark.parametrize("std", [0.5, torch.tensor([0.5, 0.3])], ids=["one std", "two"])
def test_the_noise_of_a_large_sum_has_the_same_bits_on_any_number_of_cores(
    std: float | torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, drawn, uploads = Layout(("a", "b"), ((150_000,), (50_001,))), list[Any](), list[torch.Tensor]()

    def noted(std: Any, n: int, key: bytes, *, threads: int | None) -> Any:
        drawn.append(threads)
        return rounded_normal(std, n, key, threads=threads)

    monkeypatch.setattr("fedveil.release.noise.rounded_normal", noted)
    plan = Plan(clip=1.0, noise_std=std, place="sum")
    for large, cores in ((2**23, 3), (1000, 1), (1000, 2), (1000, 3)):
        monkeypatch.setattr("fedveil.release.noise.LARGE", large)
        monkeypatch.setattr("fedveil.release.noise.available_cores", lambda cores=cores: cores)
        d = door(View.AGGREGATE, layout=layout)
        integers = d.release_sum([d.seal(torch.ones(200_001), plan, 0, 0)], plan, 0, 1.0).integers
        assert integers is not None
        uploads.append(integers)
    assert drawn == [None, 1, 2, 3]
    assert all(torch.equal(one, uploads[0]) for one in uploads)
    one = door(View.SERVER, layout=layout)  # of a worker, beside others
    one.seal_upload(torch.ones(200_001), replace(plan, place="upload"), 0, 0)
    assert drawn[4:] == [None]


def test_an_empty_round_still_releases_noise() -> None:
    d = door(View.AGGREGATE, rate=0.1)
    upload = d.release_sum([], Plan(clip=1.0, noise_std=1.0, place="sum"), 0, 2.0)
    assert upload.vector.norm() > 0
    assert len(entries(d)) == 1


@pytest.mark.parametrize(
    "sealed_under", [Plan(), Plan(clip=1.0, place="sum"), LocalDpSgd(step=DpSgd(1.0, 1.0, 0.1, 5, 10.0, 60))]
)
def test_contributions_that_promise_nothing_stay_out_of_a_sum_that_does(sealed_under: Plan) -> None:
    d = door(View.AGGREGATE)
    part = d.seal(torch.ones(7), sealed_under, 0, 0)
    for plan, parts in ((PROMISING["sum"], [part]), (sealed_under, [d.seal(torch.ones(7), PROMISING["sum"], 0, 0)])):
        with pytest.raises(ConfigError, match="plan of the round"):
            d.release_sum(parts, plan, 0, 1.0)
    assert entries(d) == []


@pytest.mark.parametrize("place", ["upload", "sum"])
@given(order=st.permutations(range(9)))
@pytest.mark.heavy
def test_the_order_of_clients_changes_no_bit_of_a_sum(place: str, order: list[int]) -> None:
    """In float32 it does: the same vectors, added up in these orders, give other sums."""
    d = door(View.AGGREGATE)
    plan = Plan(clip=3.0, noise_std=torch.tensor([0.7, 1.9]), place=place)  # type: ignore[arg-type]
    parts = [d.seal(vector, plan, c, 0) for c, vector in enumerate(NINE)]
    one, other = d.release_sum(parts, plan, 0, 4.0), d.release_sum([parts[c] for c in order], plan, 0, 4.0)
    assert one.integers is not None
    assert other.integers is not None
    assert torch.equal(one.integers, other.integers)
    assert torch.equal(one.vector, other.vector)
    sums = {sum((NINE[c] for c in some), torch.zeros(7)).numpy().tobytes() for some in itertools.permutations(range(4, 9))}
    assert len(sums) > 1


NINE = list(torch.randn(9, 7, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 9)[:, None])


@pytest.mark.parametrize("view", list(View)[:2])
def test_what_leaves_is_integers_data_plus_noise(view: View) -> None:
    """m + K: K the draw of this release and m the clipped vector, truncated; the sum of the clients' m in a sum."""
    vectors, plan = NINE[:3], Plan(clip=1.0, noise_std=0.3, place="sum" if view is View.AGGREGATE else "upload")
    d, grid_step = door(view), 2.0 ** exponent_for(0.3)
    gridded = [to_grid(v, [(slice(0, 7), exponent_for(0.3))], 1.0) for v in vectors]
    if view is View.AGGREGATE:
        released = [d.release_sum([d.seal(v, plan, c, 0) for c, v in enumerate(vectors)], plan, 0, 5.0)]
        expected, keys, denominator = [np.sum(gridded, axis=0)], [(0, AGGREGATE)], 5.0
    else:
        released = [d.upload(v, plan, c, 0) for c, v in enumerate(vectors)]
        expected, keys, denominator = gridded, [(0, c) for c in range(3)], 1.0
    for upload, m, key in zip(released, expected, keys, strict=True):
        assert upload.integers is not None
        assert upload.integers.dtype == torch.int64
        noise = d.randomness.integers(0.3 / grid_step, 7, *key)
        assert upload.integers.tolist() == (m + noise).tolist()
        exact = (m + noise).astype(np.float64) * grid_step
        assert upload.vector.tolist() == pytest.approx((exact / denominator).tolist(), rel=2e-7)


@pytest.mark.parametrize("weight", [0.5, 0.999, 1e-9])
def test_a_sum_with_a_promise_needs_equal_weights(weight: float) -> None:
    for plan in PROMISING.values():
        d = door(View.AGGREGATE)
        with pytest.raises(ConfigError, match=f"all weigh 1; got the weight {weight}"):
            d.seal(torch.ones(7), plan, 0, 0, weight=weight)
    assert door(View.AGGREGATE).seal(torch.ones(7), Plan(), 0, 0, weight=weight).weight == weight


@pytest.mark.parametrize("bits", [0, 1, 2])
def test_a_share_of_noise_has_at_least_four_grid_steps(bits: int) -> None:
    """Below, a sum of rounded shares is not what is charged (docs/exact-release.md, noise in shares)."""
    plan = Plan(clip=1.0, noise_std=1.0, mechanism=Independent(bits=bits))
    for make in (door(View.AGGREGATE).seal, door().seal_upload):
        if bits < 2:
            with pytest.raises(ConfigError, match="grid steps, and noise that is added up over uploads needs at least 4"):
                make(torch.ones(7), plan, 0, 0)
        else:
            make(torch.ones(7), plan, 0, 0)
    summed = replace(plan, place="sum")
    d = door(View.AGGREGATE)
    d.release_sum([d.seal(torch.ones(7), summed, 0, 0)], summed, 0, 4.0)  # one draw: any grid will do


def test_noise_in_shares_cannot_be_clamped_and_other_noise_can() -> None:
    """The clamp of a share is not post-processing of the sum: its noise has another law, and the sum less of it."""
    plan = Plan(clip=1.0, noise_std=1.0, clamp=0.5)
    with pytest.raises(ConfigError, match="clamping noise in shares"):
        door(View.AGGREGATE).seal(torch.ones(7), plan, 0, 0)
    assert door().upload(torch.ones(7), plan, 0, 0).vector.abs().max() <= 0.5
    d, summed = door(View.AGGREGATE), replace(plan, place="sum", noise_std=50.0)
    upload = d.release_sum([d.seal(torch.ones(7), summed, 0, 0)], summed, 0, 4.0)
    assert upload.vector.abs().max() == 0.5 / 4  # the sum is clamped, then divided
    assert upload.integers is not None
    assert float(upload.integers.double().abs().max()) * 2.0 ** exponent_for(50.0) > 0.5  # what left; the clamp is the server's


@pytest.mark.parametrize(("reads", "reason"), [((), "reads the update"), (("update",), ""), ((), "")])
def test_a_raw_plan_must_say_what_it_reads_and_why_nothing_is_proven(reads: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match="must name what it reads and say why"):
        Raw(reads, lambda update: Plan(clip=1.0, noise_std=1.0), reason)


@pytest.mark.parametrize("view", [View.AGGREGATE, View.FINAL])
@pytest.mark.parametrize(("n", "colluders", "hidden"), [(5, 0, 4), (5, 1, 4), (10, 0, 9), (10, 6, 4), (2, 0, 1)])
def test_shares_of_noise_add_up_to_what_is_charged(n: int, colluders: int, hidden: int, view: View) -> None:
    """All but those that the adversary knows: its own, where it is a client who takes part, or those of all who collude."""
    d = door(view, colluders=colluders)
    plan = Plan(clip=1.0, noise_std=0.5, place="upload")
    d.release_sum([d.seal(torch.zeros(7), plan, c, 0) for c in range(n)], plan, 0, float(n))
    (entry,) = entries(d)
    assert entry.event == Gaussian(1.0 / (0.5 * math.sqrt(hidden)))
    once = replace(plan, place="sum")
    d.release_sum([d.seal(torch.zeros(7), once, c, 1) for c in range(n)], once, 1, float(n))
    assert entries(d)[1].event == Gaussian(2.0), "noise that is added once, no client knows"


@pytest.mark.parametrize(("n", "colluders"), [(1, 0), (3, 3)])
def test_a_sum_whose_noise_is_known_promises_nothing(n: int, colluders: int) -> None:
    d = door(View.AGGREGATE, colluders=colluders)
    plan = Plan(clip=1.0, noise_std=0.5, place="upload")
    d.release_sum([d.seal(torch.zeros(7), plan, c, 0) for c in range(n)], plan, 0, float(n))
    event = entries(d)[0].event
    assert isinstance(event, Unbounded)
    assert "besides a fellow client's" in event.reason


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
        "protects records": LocalDpSgd(step=DpSgd(1.0, 1.0, 0.1, 5, 10.0, 60)),
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


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_dp_sgd_is_charged_as_sampled_steps_at_record_level(adjacency: Adjacency) -> None:
    """Slightly dearer than z alone: the errors of norms, sums and grid are in the sensitivity."""
    scope = Scope(Unit.RECORD, adjacency, View.SERVER)
    event = event_of(LocalDpSgd(step=DpSgd(1.0, 3.0, 0.1, 5, 10.0, 60)), LAYOUT, scope, rate=None)
    assert isinstance(event, SampledGaussian)
    assert (event.rate, event.count) == (0.1, 5)
    assert 3.0 / adjacency.factor * (1 - 1e-5) < event.noise_multiplier < 3.0 / adjacency.factor


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
