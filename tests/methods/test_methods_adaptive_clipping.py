"""Adaptive quantile clipping (Andrew et al. 2021): the clip by hand, its limit, the divided price, and learning."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import method_kit as h
from by_hand import Book, federation, with_client
from fedveil.accounting.types import View
from fedveil.executors.inline import Inline
from fedveil.federation.fit import fit
from fedveil.federation.progress import start
from fedveil.mechanism.plan import Plan
from fedveil.methods.adaptive_clipping import AdaptiveClipping, Counted
from fedveil.training.local import Local
from method_kit import planner

NO_NOISE = 1e-7


@dataclass(frozen=True)
class Norms(Counted):
    """An update of a known norm for each client, whatever its data; counted as the method counts."""

    norms: tuple[float, ...] = ()

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        local.model.vector.copy_(local.start)
        local.model.vector[0] += self.norms[local.client]
        return torch.zeros(())


def clips(norms: list[float], rounds: int, view: View, z: float = NO_NOISE, **method: Any) -> list[dict[int, float]]:
    """The clip of each round: by client in the server view, of all (-1) else."""
    parts = [([[0.0, 0.0]], [0])] * len(norms)
    job = federation(AdaptiveClipping(**method), parts, view=view, z=z, training={"rounds": rounds})
    job = with_client(job, Norms(norms=tuple(norms)))
    fit(job, Inline(job.context), start(job))
    book = job.context.door.ledger
    assert isinstance(book, Book)
    return [{e.client: e.clip[0] for e in book.entries if e.round == t} for t in range(rounds)]


def test_the_clip_of_each_round_by_hand() -> None:
    """Norms 1, 2, 3, 10 and quantile 0.5, rate 0.5: C <- C exp(-0.5 (share within C - 0.5))."""
    norms, expected = [1.0, 2.0, 3.0, 10.0], [1.5]
    for _ in range(12):
        within = sum(norm <= expected[-1] for norm in norms) / 4
        expected.append(expected[-1] * math.exp(-0.5 * (within - 0.5)))
    found = clips(norms, 13, View.AGGREGATE, clip=1.5, quantile=0.5, rate=0.5)
    assert [c[-1] for c in found] == pytest.approx(expected, rel=1e-5)
    assert expected[1] == pytest.approx(1.5 * math.exp(0.125))  # one of four is within 1.5


def test_each_client_of_the_server_view_follows_its_own_norm() -> None:
    """A single client is within its clip or not, so C oscillates about its norm by one step of the rate at most."""
    norms = [0.3, 1.0, 7.0]
    last = clips(norms, 80, View.SERVER, clip=1.0, quantile=0.5, rate=0.2)[-1]
    for client, norm in enumerate(norms):
        assert abs(math.log(last[client] / norm)) <= 0.1 + 1e-4


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("clip", "quantile"),
    [
        (8.0, 0.1),
        (0.2, 0.9),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0.2, 0.1), (0.2, 0.5), (8.0, 0.5), (8.0, 0.9))),
    ],
)
def test_the_clip_converges_to_the_configured_quantile_of_the_norms(clip: float, quantile: float) -> None:
    """Forty norms, log-normal; under noise of z = 1 on a count of forty with a tenth of the price."""
    norms = np.exp(np.random.default_rng(3).normal(0.0, 0.8, 40))
    found = clips(norms.tolist(), 100, View.AGGREGATE, 1.0, clip=clip, quantile=quantile, count_share=0.1, rate=0.5)
    settled = np.array([c[-1] for c in found[50:]])
    shares = (norms[None, :] <= settled[:, None]).mean(axis=1)
    assert shares.mean() == pytest.approx(quantile, abs=0.04)
    off = 2.0 if quantile < 0.9 else 0.5
    wrong = (norms[None, :] <= off * settled[:, None]).mean(axis=1).mean()
    assert abs(wrong - quantile) > 0.08  # a clip that is off by a factor of two would not pass


def test_noise_of_update_and_count_divide_the_price_as_in_the_paper() -> None:
    """Andrew et al., Theorem 1: z = (z_delta^-2 + (2 sigma_b)^-2)^(-1/2), sigma_b the noise of the count of zeros and ones."""
    method = AdaptiveClipping(clip=3.0, count_share=0.2)
    for view, place in ((View.SERVER, "upload"), (View.AGGREGATE, "sum")):
        s = h.setting(view, noise_multiplier=1.7)
        policy = planner(method, s)
        plan = policy.plan(h.released([0.0] * 7), policy.start())
        assert isinstance(plan, Plan)
        z_delta, sigma_b = float(plan.noise_std) / 3.0, plan.extras["within"].noise_std
        assert (z_delta**-2 + (2 * sigma_b) ** -2) ** -0.5 == pytest.approx(1.7)
        assert (plan.clip, plan.place, plan.extras["within"].clip) == (3.0, place, 0.5)
        assert h.method_releases_mu(method, s) == pytest.approx(math.sqrt(20) / 1.7)


def test_a_noisy_count_far_off_moves_the_clip_within_its_bounds() -> None:
    """Shares are used as they come, noise and all, but the clip stays within a millionth and a million times the first."""
    method = AdaptiveClipping(clip=2.0, rate=100.0)
    policy = planner(method, h.setting(View.AGGREGATE))
    state, sent = policy.start(), h.upload([0.0] * 7, [0.0] * 7)
    for count, bound in ((-1e9, 2e6), (1e9, 2e-6)):
        for _ in range(3):
            state = policy.observe(state, replace(sent, extras={"within": torch.tensor(count)}))
        assert state["clip"] == pytest.approx(bound)
