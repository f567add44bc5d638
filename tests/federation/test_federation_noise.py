"""The noise of the global step, as the history tells it, against noise that is drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from by_hand import federation, with_client
from fedveil.accounting.types import View
from fedveil.executors.inline import Inline
from fedveil.federation.fit import one_round
from fedveil.federation.progress import start
from fedveil.federation.server import _noise
from fedveil.mechanism.plan import DpSgd, Plan, Upload
from fedveil.methods.base import CoverageMean, Mean
from fedveil.methods.fedavg import DPFedAvg
from fedveil.release.dpsgd import step_noise
from fedveil.training.local import Local, LocalSpec, Plain
from method_kit import layout, local_of, spec_of, stepped

LAYOUT = layout({"a": (3,), "b": (2,)})
VARIANCES = [torch.tensor([4.0, 1.0]), torch.tensor([9.0, 16.0])]
SUPPORTS = [torch.tensor([True, True, False, True, False]), torch.tensor([False, True, True, True, False])]
WEIGHTS = (1.0, 0.5)


def uploads(*, sparse: bool) -> list[Upload]:
    return [
        Upload(i, 0, torch.zeros(5), v.sqrt(), Plan(), support if sparse else None, weight)
        for i, (v, support, weight) in enumerate(zip(VARIANCES, SUPPORTS, WEIGHTS, strict=True))
    ]


def test_a_mean_over_those_who_sent_by_hand() -> None:
    """a: 4 | (1 * 4 + 0.25 * 9) / 1.5^2 | 9; b: (1 * 1 + 0.25 * 16) / 1.5^2 | nobody."""
    noise = _noise(VARIANCES, uploads(sparse=True), LAYOUT, by_coverage=True)
    a, b = 4 + 6.25 / 2.25 + 9, 5 / 2.25
    assert noise["noise_norm"] == pytest.approx(math.sqrt(a + b))
    assert noise["layer_noise_std"] == pytest.approx([math.sqrt(a / 3), math.sqrt(b)])


def test_a_mean_over_all_by_hand() -> None:
    """All weights are in the divisor: a: (4 * 2 + 0.25 * 9 * 2) / 2.25; b: 5 / 2.25."""
    noise = _noise(VARIANCES, uploads(sparse=True), LAYOUT, by_coverage=False)
    assert noise["noise_norm"] == pytest.approx(math.sqrt((8 + 4.5 + 5) / 2.25))


@pytest.mark.few(2)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("by_coverage", [True, False])
def test_it_is_the_noise_that_the_server_adds(by_coverage: bool, sparse: bool) -> None:
    generator, total = torch.Generator().manual_seed(0), 0.0
    sent = uploads(sparse=sparse)
    for _ in range(4000):
        for u, v in zip(sent, VARIANCES, strict=True):
            noise = torch.randn(5, generator=generator) * LAYOUT.expand(v.sqrt())
            u.vector.copy_(noise if u.support is None else noise * u.support)
        total += float(stepped(CoverageMean() if by_coverage else Mean(), sent, torch.zeros(5)).square().sum())
    noise = _noise(VARIANCES, sent, LAYOUT, by_coverage=by_coverage)
    # The noise_power's standard error over 4,000 draws is below 2 %.
    assert total / 4000 == pytest.approx(noise["noise_norm"] ** 2, rel=0.06)


def test_nothing_is_told_where_nothing_is_known() -> None:
    assert _noise([torch.tensor([math.nan, 1.0])], uploads(sparse=False)[:1], LAYOUT, by_coverage=False) == {}


@pytest.mark.parametrize(
    ("optimizer", "known"),
    [({"lr": 0.5}, True), ({"lr": 0.5, "momentum": 0.9}, False), ({"name": "adam", "lr": 0.01}, False)],
)
def test_noise_in_a_gradient_counts_by_the_rate_of_plain_sgd(optimizer: dict[str, Any], known: bool) -> None:
    local = local_of(torch.nn.Linear(2, 2), training={"optimizer": optimizer, "schedule": "cyclic"}, steps=2)
    for local.step in range(2):
        local.noised_gradient(torch.tensor([8.0, 2.0]))
    assert local.noise_power is not None
    if known:  # rates 0.5 and 0.25
        assert local.noise_power.tolist() == pytest.approx([8 * 0.3125, 2 * 0.3125])
    else:
        assert local.noise_power.isnan().all()


@pytest.mark.parametrize("view", list(View)[:2])
def test_an_objective_has_no_say_in_the_figures_of_a_proven_release(view: View) -> None:
    class Telling(Plain):
        def finish(self, local: Local) -> torch.Tensor:
            update = super().finish(local)
            local.noised(local.model.layout.norms(update))
            return update

    rows = []
    for client in (Plain(), Telling()):
        job = with_client(federation(DPFedAvg(clip=1.0), [([[1.0, 2.0]], [0]), ([[3.0, 1.0]], [1])], view=view, z=1.0), client)
        progress = start(job)
        one_round(job, Inline(job.context), progress)
        rows.append(progress.history[0])
    assert rows[0]["noise_norm"] == rows[1]["noise_norm"]
    assert rows[0]["layer_noise_std"] == rows[1]["layer_noise_std"]


def test_noise_of_dp_sgd_steps_follows_from_the_plan() -> None:
    plan = DpSgd(clip=2.0, noise_multiplier=3.0, rate=0.5, steps=2, expected=6.0, cap=12)
    spec = spec_of(optimizer={"lr": 0.5}, schedule="cyclic")
    assert step_noise(plan, spec, LAYOUT, 0).tolist() == pytest.approx([n * 0.3125 for n in LAYOUT.sizes])


def test_what_all_clients_of_a_round_share_is_added_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = DpSgd(clip=2.0, noise_multiplier=3.0, rate=0.5, steps=5, expected=6.0, cap=12)
    spec, gain, asked = spec_of(optimizer={"lr": 0.0625}, schedule="iterative"), LocalSpec.gain, []

    def counted(self: LocalSpec, round: int, step: int, steps: int) -> float:
        asked.append(step)
        return gain(self, round, step, steps)

    monkeypatch.setattr(LocalSpec, "gain", counted)
    first, second = step_noise(plan, spec, LAYOUT, 7), step_noise(plan, spec, LAYOUT, 7)
    assert asked == [0, 1, 2, 3, 4]
    assert torch.equal(first, second)
    assert not torch.equal(step_noise(plan, spec, LAYOUT, 8), first)
