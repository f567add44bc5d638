"""Adap DP-FL: clip and noise by hand, what the public loss lowers, and that no path costs more than what is planned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import method_kit as h
from fedveil.accounting.accountant import bound
from fedveil.accounting.types import Adjacency, SampledGaussian, Unit, View
from fedveil.mechanism.cost import event_of
from fedveil.mechanism.plan import LocalDpSgd, Plan, Upload, step_of
from fedveil.methods.setting import Setting
from fedveil.papers.fedanc.method import FedANC
from fedveil.papers.ladp_fl.baselines import AdapDPFL, Following, no_cheaper
from method_kit import planner


def silo(view: View = View.SERVER, training: Mapping[str, Any] | None = None, **changes: Any) -> Setting:
    """Batches of 25 of 100 records, four steps a round at rate 0.1, first clip 0.5."""
    return h.setting(view, unit=Unit.RECORD, training={"local": "dp-sgd", "example_clip": 0.5, **(training or {})}, **changes)


def sent(policy: Following, vector: list[float], loss: float | None = None) -> Upload:
    plan = policy.plan(h.released([0.0] * 7), policy.start())
    return replace(h.upload(vector, [0.0] * 7), plan=plan, public_loss=loss)


def step(policy: Following, state: dict[str, Any], server: dict[str, Any] | None = None) -> Any:
    plan = policy.plan(replace(h.released([0.0] * 7, round=1), server=server or {}), state)
    assert isinstance(plan, Plan)
    return step_of(plan)


def test_the_clip_by_hand() -> None:
    """u = -0.1 (3, 0, 0, 4, ...): with 4 steps at rate 0.1, ||u / (eta K)|| = 5/4. Noise power a step: 7 (z C / 25)^2."""
    noise = 7 * (2.0 * 0.5 / 25) ** 2
    vector = [-0.3, 0, 0, -0.4, 0, 0, 0]
    for view, clients in ((View.SERVER, 1), (View.AGGREGATE, 4)):  # the mean of four clients has a quarter of the noise
        clean = (5 / 4) ** 2 - noise / (4 * clients)
        for method, expected in (
            (AdapDPFL(variant="published", factor=0.8, decay=1.0), 0.8 * math.sqrt(clean + noise)),
            (AdapDPFL(headroom=1.5, decay=1.0), 1.5 * math.sqrt(clean)),
        ):
            policy = planner(method, silo(view))
            state = policy.observe(policy.start(), sent(policy, vector))
            assert step(policy, state).clip == pytest.approx(expected, rel=1e-4)
    bounded = planner(AdapDPFL(clip_range=(0.5, 1.5)), silo())
    assert step(bounded, bounded.observe({}, sent(bounded, vector))).clip == 0.75
    assert step(bounded, bounded.observe({}, sent(bounded, [0.0] * 7))).clip == 0.25


def test_one_step_a_round_gives_the_norm_of_the_noised_gradient_itself() -> None:
    s = silo(training={"local_steps": 1})
    policy = planner(AdapDPFL(variant="published"), s)
    state = policy.observe(policy.start(), sent(policy, [-0.06, 0, 0, -0.08, 0, 0, 0]))
    assert step(policy, state).clip == pytest.approx(1.0, rel=1e-6)


def test_noise_alone_makes_the_published_clip_grow_and_the_proven_one_does_not() -> None:
    """z sqrt(d) / L = 4: under the published rule the clip is multiplied by about 4 in each round of pure noise."""
    noisy = silo(noise_multiplier=4 * 25 / math.sqrt(7))
    generator = torch.Generator().manual_seed(0)
    found = {}
    for variant in ("published", "proven"):
        policy = planner(AdapDPFL(variant=variant, clip_range=(0.5, 4.0)), noisy)  # type: ignore[arg-type]
        state = policy.start()
        for _ in range(6):
            plan = policy.plan(h.released([0.0] * 7), state)
            assert isinstance(plan, LocalDpSgd)
            std = step_of(plan).noise_multiplier * step_of(plan).clip / 25 * 0.1 * 2  # of an update of four steps at rate 0.1
            vector = (torch.randn(7, generator=generator) * std).tolist()
            state = policy.observe(state, replace(h.upload(vector, [0.0] * 7), plan=plan))
        found[variant] = step(policy, state).clip
    assert found["published"] > 0.5 * 3**5
    assert found["proven"] <= 2.0


def test_the_noise_falls_after_three_falls_of_the_public_loss() -> None:
    """Losses 5 4 3 2: one lowering after the fourth; a rise starts again; at the end of all falls it is z itself."""
    for view in (View.SERVER, View.AGGREGATE):
        s = silo(view, rounds=8)
        policy = planner(AdapDPFL(decay=0.5), s)
        state: dict[str, Any] = policy.start()
        lowered = []
        for loss in (5.0, 4.0, 3.0, 2.0, 1.0, 1.5, 1.0):
            release = sent(policy, [0.0] * 7, loss)
            state = policy.observe(state, release) if view is View.AGGREGATE else policy.observe_all(state, [release])
            lowered.append(int(state["lowered"]))
        assert lowered == [0, 0, 0, 1, 2, 2, 2]
        own, server = (state, {}) if view is View.AGGREGATE else ({}, state)
        assert step(policy, own, server).noise_multiplier == pytest.approx(2.0 * 0.5 ** -(4 - 2), rel=1e-4)
        assert step(policy, {}).noise_multiplier == pytest.approx(2.0 * 0.5**-4, rel=1e-4)


def test_no_path_costs_more_than_planned() -> None:
    """The loss falls in every round: the last plan is at z, and its price, whatever the clip, is the declared one."""
    s = silo(rounds=9)
    m = AdapDPFL(decay=0.9)
    policy = planner(m, s)
    (declared,) = m.releases(s, View.SERVER)
    assert isinstance(declared, SampledGaussian)
    server: dict[str, Any] = {}
    for t in range(9):
        for clip in (0.05, 0.3333, 0.5, 1.7, 5.0):
            plan = policy.plan(replace(h.released([0.0] * 7, round=t), server=server), {"clip": clip})
            assert isinstance(plan, Plan)
            event = event_of(plan, s.layout, s.scope, rate=None)
            assert isinstance(event, SampledGaussian)
            assert event.noise_multiplier >= declared.noise_multiplier
            if t == 8:
                assert event.noise_multiplier == pytest.approx(declared.noise_multiplier, rel=1e-6)
        server = policy.observe_all(server, [sent(policy, [0.0] * 7, 10.0 - t)])
    first = s.dp_sgd()
    assert first is not None
    assert no_cheaper(first, first, s) == first


def test_the_published_claim_is_the_renyi_sum_at_the_least_noise() -> None:
    s = silo(rounds=5)
    claim = AdapDPFL(variant="published").claim(s)
    assert claim is not None
    events = [SampledGaussian(0.25, 2.0, 4 * 5)]
    assert claim.epsilon == pytest.approx(bound(events, 1e-3, accountant="rdp", adjacency=Adjacency.ZERO_OUT)[0])
    assert AdapDPFL().claim(s) is None


def test_a_run_with_a_public_split_lowers_its_noise_and_keeps_its_budget() -> None:
    """With a decay of 0.9; nothing is proven in another way, and the clip moves."""
    training = {"local": "dp-sgd", "clients_per_round": None, "local_steps": 5, "local_epochs": 1, "optimizer": {"lr": 0.2}}
    for view in ("server", "aggregate"):
        config = h.digits(
            {"name": "adap-dp-fl", "decay": 0.9},
            clients=6,
            rounds=8,
            data={"public_fraction": 0.1},
            training=training,
            privacy={"epsilon": 8.0, "unit": "record", "view": view},
        )
        job = h.job_of(config)
        h.trained(job)
        stds = [entry.event.noise_multiplier for entry in h.book(job).entries if isinstance(entry.event, SampledGaussian)]
        clips = {entry.whole_clip for entry in h.book(job).entries}
        assert stds[-1] < 0.95 * stds[0]
        assert len(clips) > 3


def test_who_reads_the_public_split_says_so_where_there_is_one() -> None:
    for method in (AdapDPFL(), FedANC(variant="proven")):
        assert method.assumptions(h.setting(public_split=True)) == ("data.public_fraction sets examples aside that are public",)
        assert method.assumptions(h.setting()) == ()
    assert FedANC(variant="published").assumptions(h.setting(public_split=True)) == ()
