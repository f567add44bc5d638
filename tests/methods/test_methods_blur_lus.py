"""BLUR+LUS: its penalty and its choice of values by hand, the noise of a sum in shares, and what is proven of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import method_kit as h
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Gaussian, View
from fedveil.experiment.certify import certify_config
from fedveil.mechanism.plan import Plan
from fedveil.methods.method_registry import description
from fedveil.papers.fedglp_adp.claim import opacus_epsilon, opacus_noise_multiplier
from fedveil.papers.fedglp_adp.sparse_baselines import BlurLus, ShortAndSparse
from fedveil.training.local import Local, train
from fisher_clients import X, Y
from method_kit import planner


def client() -> Local:
    """A linear model of 10 weights, two steps of SGD at 0.5 on one batch."""
    module = torch.nn.Linear(4, 2)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view(p.shape) + 0.1 * i)
    return h.local_of(module, training={"local_steps": 2, "batch_size": 4, "optimizer": {"lr": 0.5}}, data=(X, Y))


def gradient_at(w: torch.Tensor) -> torch.Tensor:
    w = w.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(X @ w[:8].view(2, 4).T + w[8:], Y), w)
    return gradient


def test_the_penalty_pulls_only_what_is_longer_than_the_clip() -> None:
    for clip, pulled in ((10.0, False), (0.01, True)):
        local = client()
        update, _ = train(local, X, Y, ShortAndSparse(BlurLus(clip=clip, blur=0.7, drop=0.0)))
        w = local.start - 0.5 * gradient_at(local.start)
        assert float((w - local.start).norm()) > 0.01
        w = w - 0.5 * (gradient_at(w) + 0.7 * pulled * (w - local.start))
        assert update.tolist() == pytest.approx((w - local.start).tolist(), abs=1e-6)


@pytest.mark.parametrize("score", ["effect", "size"])
def test_the_values_that_matter_least_are_dropped_layer_by_layer(score: Any) -> None:
    whole, _ = train(client(), X, Y, ShortAndSparse(BlurLus(blur=0.0, drop=0.0)))
    local = client()
    sparse, _ = train(local, X, Y, ShortAndSparse(BlurLus(blur=0.0, drop=0.5, score=score)))
    effect = whole * (gradient_at(local.start + whole) if score == "effect" else 1)
    for part in (slice(0, 8), slice(8, 10)):
        order = effect[part].abs().argsort()
        dropped = order[: len(order) // 2]
        kept = order[len(order) // 2 :]
        assert not sparse[part][dropped].any()
        assert sparse[part][kept].tolist() == pytest.approx(whole[part][kept].tolist(), abs=1e-7)


def test_a_client_without_examples_sends_zero() -> None:
    assert not train(client(), X[:0], Y[:0], ShortAndSparse(BlurLus()))[0].any()


def test_published_noise_is_a_share_of_the_sums_and_what_is_proven_counts_single_uploads() -> None:
    method = BlurLus(variant="published", clip=0.5)
    s = method.calibrate(h.setting(noise_multiplier=None, epsilon=2.0, delta=0.1, cohort=10))
    sigma = opacus_noise_multiplier(2.0, 20, 0.1)
    plan = planner(method, s).plan(h.released([0.0] * 7), {})
    assert isinstance(plan, Plan)
    assert (plan.support, plan.clip) == (None, 0.5), "noise is dense: which values were dropped does not show"
    assert plan.noise_std == pytest.approx(sigma * 0.5 / math.sqrt(10))
    assert method.calibrate(s) == s
    claim = method.claim(s)
    assert claim is not None
    assert (claim.epsilon, claim.scope.view) == (pytest.approx(2.0, rel=1e-6), View.AGGREGATE)
    for view, mu in ((View.SERVER, math.sqrt(10 * 20) / sigma), (View.AGGREGATE, math.sqrt(20 * 10 / 9) / sigma)):
        (event,) = method.releases(s, view)
        assert isinstance(event, Gaussian)
        assert event.mu * math.sqrt(event.count) == pytest.approx(mu)
    given = BlurLus(variant="published", sigma=0.3)
    s = given.calibrate(h.setting(noise_multiplier=None))
    assert s.noise_multiplier == pytest.approx(0.15)
    claim = given.claim(s)
    assert claim is not None
    assert claim.epsilon == pytest.approx(opacus_epsilon(0.3, 20, 1e-3, rate=0.4))


def test_a_published_run_is_stopped_by_no_budget_of_its_claim() -> None:
    job = h.job_of(h.at_epsilon_8({"name": "blur-lus", "variant": "published"}, "privacy.view=server"))
    assert len(h.trained(job).history) == 4
    own = certify_config(h.at_epsilon_8({"name": "blur-lus", "variant": "published"}, "privacy.view=server"))
    proven = {view.view: view.proven.epsilon for view in own.views}
    assert 8.2 > proven[View.AGGREGATE] > 7, "the exact accountant is a little better than Renyi's; a client knows its own share"
    assert math.inf > proven[View.SERVER] > 20


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_proven_costs_the_configured_epsilon(view: str) -> None:
    job = h.job_of(h.at_epsilon_8({"name": "blur-lus"}, f"privacy.view={view}"))
    assert h.trained(job).history[-1]["test_accuracy"] > (0.3 if view == "aggregate" else 0.05)
    for client_number in range(6) if view == "server" else [-1]:
        assert 0.999 * 8.0 < epsilon_of(math.sqrt(h.book(job).mu2(client_number)), 1e-3) <= 8.0


def test_what_is_reconstructed_is_said() -> None:
    assert "Reconstructed, not read in a source: all but the abstract" in description("blur-lus")
    assert "Reconstructed" not in description("dp-fedavg")
