"""Fed-SMP: one public mask for all, scale before clip, the paper's noise by hand, and what is proven of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import method_kit as h
from federation_runs import config
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Gaussian, View
from fedveil.attacks.replay import replay
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool
from fedveil.federation.fit import fit
from fedveil.federation.progress import start
from fedveil.mechanism.plan import Released
from fedveil.papers.fedglp_adp.claim import fedsmp_epsilon, fedsmp_noise_multiplier
from fedveil.papers.fedglp_adp.sparse_baselines import DrawnMask, FedSMP, MovedMask, PublicMask, Scaled
from fedveil.training.local import train
from fisher_clients import X, Y, client
from method_kit import planner
from resumed_runs import go, interrupted, same_end

PUBLIC = {"name": "fed-smp", "share": 0.2, "mask": "public", "public_steps": 3}
SPLIT = "data.public_fraction=0.1"
LAYERS = {"a": (60,), "b": (40,)}


def test_the_mask_is_the_same_for_all_clients_and_another_each_round() -> None:
    method, s = FedSMP(share=0.2), h.setting(layers=LAYERS)
    policy = planner(method, s)
    assert isinstance(policy.part, DrawnMask)
    assert policy.common
    masks = []
    for t in range(50):
        plans = [policy.plan(Released(t, torch.randn(100), None, client=c), {}) for c in (0, 7)]
        assert plans[0].support is not None
        assert plans[1].support is not None
        assert plans[0].support.equal(plans[1].support)
        assert int(plans[0].support.sum()) == 20
        masks.append(plans[0].support)
    assert torch.stack(masks).float().mean(0).min() > 0.02, "every coordinate has its turn"
    again = planner(FedSMP(share=0.2, mask_seed=1), s).plan(Released(0, torch.zeros(100), None), {})
    assert not again.support.equal(masks[0])  # type: ignore[union-attr]


def test_what_the_global_model_moved_most_is_sent() -> None:
    policy = planner(FedSMP(share=0.03, mask="moved"), h.setting(layers=LAYERS))
    assert isinstance(policy.part, MovedMask)
    assert not policy.common
    before, now = torch.zeros(100), torch.zeros(100)
    now[[5, 50, 99]] = torch.tensor([1.0, -2.0, 0.5])
    plan = policy.plan(Released(1, now, before), {})
    assert plan.support is not None
    assert plan.support.nonzero().flatten().tolist() == [5, 50, 99]
    assert int(policy.plan(Released(0, now, None), {}).support.sum()) == 3  # type: ignore[union-attr]


def test_what_training_on_public_data_moves_most_is_sent() -> None:
    policy = planner(FedSMP(share=0.03, mask="public", public_steps=7), h.setting(layers=LAYERS, public_split=True))
    assert isinstance(policy.part, PublicMask)
    assert (policy.part.public_steps, policy.common) == (7, False)
    update = 0.01 * torch.rand(100)
    update[[5, 50, 99]] = torch.tensor([1.0, -2.0, 0.5])
    model = torch.randn(100)
    for t, c in ((0, -1), (3, 0), (3, 8)):
        plan = policy.plan(Released(t, model, model.flip(0), client=c, public_update=update), {})
        assert plan.support is not None
        assert plan.support.nonzero().flatten().tolist() == [5, 50, 99]


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_a_run_with_the_public_mask_is_replayed_without_a_finding(view: str) -> None:
    assert replay(h.digits(PUBLIC, SPLIT, clients=12, privacy={"epsilon": 8.0, "view": view})).findings == {}


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_pool_and_inline_agree_on_the_public_mask(view: str) -> None:
    models = []
    for engine in (Inline, lambda context: ProcessPool(context, workers=2)):
        job = h.job_of(h.at_epsilon_8(PUBLIC, f"privacy.view={view}", SPLIT))
        progress = start(job)
        assert fit(job, engine(job.context), progress) == ""
        models.append(progress.model)
    assert torch.equal(models[0], models[1])


def test_a_run_with_the_public_mask_resumes_to_the_same_bits(tmp_path: Path) -> None:
    data = {"name": "digits", "partition": {"kind": "iid", "clients": 6}, "public_fraction": 0.1}
    calm = config(PUBLIC, "server", data=data)
    go(calm, tmp_path / "calm")
    interrupted(calm, tmp_path / "cut", 1)
    go(calm, tmp_path / "cut", resume=True)
    same_end(tmp_path / "cut", tmp_path / "calm")


def test_random_coordinates_are_scaled_so_that_their_mean_is_that_of_all() -> None:
    s = h.setting(layers=LAYERS)
    assert [FedSMP(share=0.2, mask=mask).scale(s) for mask in ("random", "moved", "public")] == [5.0, 1.0, 1.0]
    plain, scaled = (train(client(1), X, Y, Scaled(scale=f))[0] for f in (1.0, 5.0))
    assert scaled.tolist() == pytest.approx((5 * plain).tolist())


def test_the_papers_noise_by_hand() -> None:
    """q = 1/60, T = 180, epsilon = 1.5, delta = 1 / 6000^1.1: 1.8, where the sampled Gaussian needs 1.0."""
    delta = 6000**-1.1
    sigma = fedsmp_noise_multiplier(1.5, 180, delta, 1 / 60)
    assert sigma == pytest.approx(math.sqrt(7 * 180 / 3600 * (1.5 + 2 * math.log(1 / delta)) / 1.5**2))
    assert sigma == pytest.approx(1.8, abs=0.05)
    assert fedsmp_epsilon(sigma, 180, delta, 1 / 60) == pytest.approx(1.5)


def test_published_noise_is_a_share_of_the_sums_on_the_mask() -> None:
    method = FedSMP(variant="published", clip=0.5, share=0.2)
    s = method.calibrate(h.setting(noise_multiplier=None, epsilon=2.0, layers=LAYERS))
    sigma = fedsmp_noise_multiplier(2.0, 20, 1e-3, 0.4)
    plan = planner(method, s).plan(Released(0, torch.zeros(100), None), {})
    assert plan.noise_std == pytest.approx(sigma * 0.5 / 2)  # type: ignore[union-attr]
    claim = method.claim(s)
    assert claim is not None
    assert (claim.epsilon, claim.scope.view) == (pytest.approx(2.0), View.AGGREGATE)
    for view, mu in ((View.SERVER, math.sqrt(4 * 20) / sigma), (View.AGGREGATE, math.sqrt(20 * 4 / 3) / sigma)):
        (event,) = method.releases(s, view)
        assert isinstance(event, Gaussian)
        assert event.mu * math.sqrt(event.count) == pytest.approx(mu)


@pytest.mark.few(2)
@pytest.mark.parametrize("view", ["server", "aggregate"])
@pytest.mark.parametrize("mask", ["random", "moved", "public"])
def test_proven_costs_the_configured_epsilon_and_noise_reaches_the_mask_only(view: str, mask: str) -> None:
    split = f"data.public_fraction={0.1 if mask == 'public' else 0.0}"
    job = h.job_of(h.at_epsilon_8({"name": "fed-smp", "share": 0.2, "mask": mask}, f"privacy.view={view}", split))
    rows = h.trained(job).history
    for client_number in range(6) if view == "server" else [-1]:
        assert 0.999 * 8.0 < epsilon_of(math.sqrt(h.book(job).mu2(client_number)), 1e-3) <= 8.0
    assert {row["coordinates"] for row in rows} == {130}
    shares = 36 if view == "aggregate" else 6
    assert rows[0]["noise_norm"] == pytest.approx(job.setting.z * 0.5 * math.sqrt(130 / shares), rel=1e-4)


def test_the_statement_names_the_public_split_where_the_mask_reads_it() -> None:
    s = h.setting(public_split=True)
    assert FedSMP(mask="public").assumptions(s) == ("data.public_fraction sets examples aside that are public",)
    assert FedSMP(mask="public").assumptions(h.setting()) == ()
    assert FedSMP().assumptions(s) == FedSMP(mask="moved").assumptions(s) == ()
