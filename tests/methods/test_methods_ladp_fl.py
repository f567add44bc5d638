"""LaDP-FL: each equation on numbers worked out by hand; what the proven variant reads, costs and adapts to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.accounting.gaussian import delta_of
from fedveil.accounting.types import Adjacency, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.cost import plan_mu
from fedveil.papers.ladp_fl.claim import scale_leak_delta
from fedveil.papers.ladp_fl.method import LaDPFL, layer_kl, noise_kl
from method_kit import (
    LAYOUT,
    digits,
    job_of,
    planner,
    released,
    setting,
    trained,
    upload,
)
from method_kit import (
    layout as layout_of,
)
from reference_costs import softmax_kl

TWO_PASSES = {"local_epochs": 2, "batch_clip": 20.0}


def published(**options: Any) -> LaDPFL:
    return LaDPFL(variant="published", **options)


def paper(training: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    return setting(training={**TWO_PASSES, **(training or {})}, epsilon=0.5, noise_multiplier=None, delta=0.02, **changes)


# --- the estimate ---


def test_estimate_is_kl_of_softmax_in_nats_by_layer() -> None:
    """softmax(ln 2, 0, 0) = (1/2, 1/4, 1/4) against a uniform one: ln 3 - 1.5 ln 2; a layer that did not move has 0."""
    layout = layout_of({"a": (3,), "b": (2,)})
    kl = layer_kl(torch.tensor([math.log(2), 0.0, 0.0, 1.0, 5.0]), torch.tensor([0.0, 0.0, 0.0, 1.0, 5.0]), layout)
    assert kl.tolist() == pytest.approx([math.log(3) - 1.5 * math.log(2), 0.0], abs=1e-7)
    reverse = layer_kl(torch.zeros(5), torch.tensor([math.log(2), 0.0, 0.0, 0.0, 0.0]), layout)
    assert float(reverse[0]) == pytest.approx(5 / 3 * math.log(2) - math.log(3), abs=1e-7)


@given(st.lists(st.floats(-5, 5, width=32), min_size=7, max_size=7), st.lists(st.floats(-5, 5, width=32), min_size=7, max_size=7))
def test_estimate_agrees_with_the_one_in_the_privacy_room(a: list[float], b: list[float]) -> None:
    kl = layer_kl(torch.tensor(a), torch.tensor(b), LAYOUT).tolist()
    assert kl == pytest.approx([softmax_kl(a[:3], b[:3]), softmax_kl(a[3:], b[3:])], rel=1e-5, abs=1e-9)
    assert min(kl) >= 0


def test_what_noise_adds_to_the_estimate() -> None:
    """The mean KL of pure noise is within 10 % of what is taken off; without the factor 1 - 1/n of a layer of two it is not."""
    layout = layout_of({"a": (400,), "b": (2,)})
    generator = torch.Generator().manual_seed(0)
    std = 0.2
    mean = torch.stack(
        [layer_kl(std * torch.randn(402, generator=generator), torch.zeros(402), layout) for _ in range(4000)]
    ).mean(0)
    expected = noise_kl(torch.full((2,), std), layout)
    assert expected.tolist() == pytest.approx([std**2 / 2 * (1 - 1 / 400), std**2 / 4])
    assert (mean / expected).tolist() == pytest.approx([1.0, 1.0], abs=0.1)


# --- published ---


def test_published_noise_by_hand() -> None:
    """Delta = 2 * 0.1 * 2 * 20 = 8; s = ln(2/(pi 0.0004)); c/B = (sqrt s + sqrt(s + 4))/4; sigma = c Delta / (eps P)."""
    s, m = paper(), published(bound=0.1, spread=10.0)
    square = math.log(2 / (math.pi * 0.0004))
    unit = (math.sqrt(square) + math.sqrt(square + 4)) / 4 * 8 / 0.5
    assert m.unit_std(s) == pytest.approx(unit)
    model, update = [0.0] * 7, torch.tensor([math.log(2), 0, 0, 0, 0, 0.5, 0])
    plan = m.by_raw_layers(s, released(model), update)
    small = softmax_kl([0, 0, 0.5, 0], [0, 0, 0, 0])
    assert math.log(3) - 1.5 * math.log(2) < 0.1
    assert small > 0.01
    first = math.log(3) - 1.5 * math.log(2)
    assert isinstance(plan.noise_std, torch.Tensor)
    assert plan.noise_std.tolist() == pytest.approx([unit * 0.1 / first, unit * 0.1 / small], rel=1e-5)


def test_published_estimates_stay_between_the_bounds() -> None:
    m = published(bound=1e-3, spread=5.0)
    plan, unit = m.by_raw_layers(paper(), released([0.0] * 7), torch.tensor([3.0, 0, 0, 0, 0, 0, 0])), m.unit_std(paper())
    assert isinstance(plan.noise_std, torch.Tensor)
    assert plan.noise_std.tolist() == pytest.approx([unit, 5 * unit])
    constant = m.model_copy(update={"privacy_estimation": False}).by_raw_layers(paper(), released([0.0] * 7), torch.ones(7))
    assert isinstance(constant.noise_std, torch.Tensor)
    assert constant.noise_std.tolist() == pytest.approx([unit, unit])


def test_published_layers_below_the_threshold_leave_without_noise() -> None:
    """The norm is that of the trained weights, not of the received ones or of the update."""
    m = published(threshold=1.5)
    answer = planner(m, paper()).plan(released([1.0, 0, 0, 0, 0, 0, 0]), {})
    plan = answer.make(torch.tensor([1.0, 0, 0, 1.4, 0, 0, 0]))
    assert isinstance(plan.noise_std, torch.Tensor)
    assert plan.noise_std[0] > 0
    assert plan.noise_std[1] == 0
    assert math.isinf(plan.clip)
    assert "layer norms" in answer.reads
    assert "without noise" in answer.reason


@pytest.mark.parametrize("copies", [0, 2])
def test_deleting_or_replicating_one_instance_shows_in_the_scale_and_in_layers_without_noise(copies: int) -> None:
    """Instances a and b against b alone, and against a, a, b, the paper's neighbours: a step along the mean gradient."""
    a, b = torch.tensor([0.5, 0, 0, 0, 0, 0, 0]), torch.tensor([0, 0.5, 0, 0.5, 0, 0.5, 0])
    updates = [(n * a + b) / (n + 1) for n in (1, copies)]
    m, s = published(bound=1.0, spread=1000.0), paper()
    stds = [m.by_raw_layers(s, released([0.0] * 7), update).noise_std for update in updates]
    ratio = float((stds[0] / stds[1])[0])
    assert scale_leak_delta(1728, ratio, 0.5) > 0.02, "of a convolution of 64 channels on three, more than the claimed delta"
    bare = published(threshold=10.0)
    assert all(bare.by_raw_layers(s, released([0.0] * 7), update).noise_std.eq(0).all() for update in updates)
    assert not torch.equal(*updates), "so what leaves differs for certain"


def test_sensitivity_counts_epochs_or_steps() -> None:
    """100 records in batches of 25 for 2 epochs: 8 steps, so four times Theorem 2."""
    assert published(sensitivity="per_step").unit_std(paper()) == pytest.approx(4 * published().unit_std(paper()))


def test_exact_calibration_meets_the_target_and_the_printed_one_does_not_at_small_delta() -> None:
    s = replace(paper(), delta=1e-5)
    exact, printed = published(calibration="exact").unit_std(s), published().unit_std(s)
    assert delta_of(8 / exact, 0.5) == pytest.approx(1e-5, rel=1e-6)
    assert delta_of(8 / printed, 0.5) > 20e-5


def test_published_needs_the_papers_setting() -> None:
    for wrong in ({"batch_clip": None}, {"optimizer": {"name": "adam"}}, {"optimizer": {"momentum": 0.9}}):
        with pytest.raises(ConfigError, match=r"training\.batch_clip"):
            published().calibrate(paper(wrong))
    with pytest.raises(ConfigError, match=r"privacy\.epsilon"):
        published().calibrate(setting(training=TWO_PASSES))
    with pytest.raises(ConfigError, match=r"training\.local = 'sgd'"):
        LaDPFL().calibrate(setting(training={"local": "dp-sgd"}))


def test_published_claims_and_proves_nothing() -> None:
    """q = 25/100, T = 20: q T = 5; delta 0.3 over 20 rounds would be 1.5, so only one round is claimed."""
    m = published()
    claim = m.claim(paper())
    assert claim is not None
    assert claim.epsilon == pytest.approx(2.5)
    assert claim.delta == pytest.approx(0.1)
    assert claim.scope.unit is Unit.RECORD
    vacuous = m.claim(replace(paper(), delta=0.3))
    assert vacuous is not None
    assert (vacuous.epsilon, vacuous.delta) == (0.5, 0.3)
    assert "vacuous" in vacuous.note
    assert all(isinstance(e, Unbounded) for view in View for e in m.releases(paper(), view))
    assert m.weighting == "examples"
    assert m.clip_norm(paper()) is None


# --- proven ---


def test_first_plan_treats_all_layers_alike() -> None:
    """Layer clips C sqrt(3/7) and C sqrt(4/7), one noise std z C: mu = 1 / z."""
    s = setting()
    plan = planner(LaDPFL(clip=0.7), s).plan(released([1.0] * 7), {})
    assert plan.layer_clip is not None
    assert isinstance(plan.noise_std, torch.Tensor)
    assert plan.layer_clip.tolist() == pytest.approx([0.7 * math.sqrt(3 / 7), 0.7 * math.sqrt(4 / 7)])
    assert plan.noise_std.tolist() == pytest.approx([1.4, 1.4])
    assert plan.place == "upload"
    whole = planner(LaDPFL(clip=0.7, clipping="whole"), s).plan(released([1.0] * 7), {})
    assert whole.layer_clip is None
    assert whole.noise_std.tolist() == pytest.approx([1.4, 1.4])


def test_noise_is_inverse_to_the_estimate_of_what_was_released() -> None:
    m = LaDPFL(bound=1.0, spread=100.0, clipping="whole", clip=1.0)
    policy = planner(m, setting())
    state = policy.observe({}, upload([math.log(2), 0, 0, 0, 0, 0.6, 0], [0.0] * 7))
    plan = policy.plan(released([0.0] * 7, 1), state)
    p = [math.log(3) - 1.5 * math.log(2), softmax_kl([0, 0, 0.6, 0], [0.0] * 4)]
    assert p[0] > p[1]
    assert isinstance(plan.noise_std, torch.Tensor)
    assert plan.noise_std.tolist() == pytest.approx([2.0, 2.0 * p[0] / p[1]], rel=1e-5)
    narrow = planner(m.model_copy(update={"spread": 1.5}), setting()).plan(released([0.0] * 7, 1), state)
    assert narrow.noise_std.tolist() == pytest.approx([2.0, 2.0 * min(1.5, p[0] / p[1])], rel=1e-5)


def test_server_view_compares_with_the_current_model_and_a_sum_with_the_one_it_started_from() -> None:
    """The client released start + vector; the global model has moved there since: nothing left to see in the server view."""
    vector, start = [0.5, 0, 0, 0, 0, 0.1, 0], [0.0] * 7
    m = LaDPFL(bound=1.0, spread=50.0)
    server, central = planner(m, setting()), planner(m, setting(View.AGGREGATE))
    state = server.observe({}, upload(vector, start))
    moved = released(vector, 1, start)
    equal = server.plan(moved, state).noise_std
    differs = central.plan(moved, central.observe({}, upload(vector, start))).noise_std
    assert equal[0] == equal[1]
    assert differs[0] < differs[1]
    assert central.plan(moved, {}).place == "sum"


def test_estimates_of_pure_noise_are_taken_as_equal() -> None:
    """With the noise's own share taken off nothing remains; left in, the layers would differ."""
    policy = planner(LaDPFL(bound=10.0, spread=50.0), setting())
    vector = [0.1, -0.1, 0.1, 0.05, -0.05, 0.05, 0.0]
    assert policy.plan(released([0.0] * 7), policy.observe({}, upload(vector, [0.0] * 7, 0.2))).noise_std.unique().numel() == 1
    assert policy.plan(released([0.0] * 7), policy.observe({}, upload(vector, [0.0] * 7, 0.0))).noise_std.unique().numel() == 2


def test_layers_below_the_threshold_are_not_sent() -> None:
    policy = planner(LaDPFL(threshold=1.0), setting())
    plan = policy.plan(released([1.0, 1.0, 0, 0.1, 0, 0, 0]), {})
    assert plan.support is not None
    assert plan.support.tolist() == [True] * 3 + [False] * 4
    assert plan.noise_std.tolist() == pytest.approx([2.0, 0.0])
    with pytest.raises(ConfigError, match=r"method\.threshold"):
        policy.plan(released([0.1] * 7), {})


@given(
    st.lists(st.floats(-3, 3, width=32), min_size=7, max_size=7),
    st.floats(0, 1),
    st.floats(1, 50),
    st.sampled_from(["whole", "layers"]),
    st.sampled_from(list(View)),
    st.sampled_from(list(Adjacency)),
)
def test_every_plan_costs_exactly_its_share(
    vector: list[float], std: float, spread: float, clipping: str, view: View, adjacency: Adjacency
) -> None:
    s = setting(view, adjacency=adjacency)
    policy = planner(LaDPFL(bound=1.0, spread=spread, clipping=clipping), s)
    plan = policy.plan(released([0.5] * 7, 1), policy.observe({}, upload(vector, [0.0] * 7, std)))
    assert plan_mu(plan, s.layout, adjacency.factor) == pytest.approx(adjacency.factor / 2.0, rel=1e-6)


def test_the_server_keeps_layers_that_were_not_sent(tmp_path: Path) -> None:
    """The bias of the linear model has norm 0.2, its weights 1.8."""
    job = job_of(digits({"name": "ladp-fl", "threshold": 0.5}, privacy={"noise_multiplier": 0.1}), tmp_path / "l.sqlite")
    before = job.context.model.vector.clone()
    after = trained(job).model
    weight, bias = job.setting.layout.split(after - before)
    assert weight.abs().min() > 0
    assert bias.abs().max() == 0
