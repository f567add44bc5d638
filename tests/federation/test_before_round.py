"""What everyone has when a round begins: the public update by hand, from public data alone, and the model of nobody else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import method_kit as h
from by_hand import ONE
from by_hand import federation as by_hand
from fedveil.errors import ConfigError, FedveilError
from fedveil.experiment.config import Config
from fedveil.federation.before_round import released
from fedveil.federation.progress import Federation, start
from fedveil.mechanism.plan import Plan, Released
from fedveil.methods.base import Policy, Setting
from fedveil.methods.fedavg import FedAvg
from fedveil.training.local import State

STEPS = 4


@dataclass(frozen=True)
class Asking(Policy):
    """A policy of no method that asks for steps on the public split."""

    public_steps: ClassVar[int] = STEPS

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        return Plan(clip=1.0)


def config(*overrides: str) -> Config:
    return h.at_epsilon_8({"name": "dp-fedavg"}, "data.public_fraction=0.1", *overrides)


def asking(*overrides: str) -> Federation:
    return asked(h.job_of(config(*overrides)), Asking())


def asked(job: Federation, policy: Policy) -> Federation:
    """The federation with this policy in the place of the method's."""
    return replace(job, context=replace(job.context, policy=replace(job.context.policy, part=policy)))


def test_the_public_update_by_hand() -> None:
    """Whole batches, so that their order does not matter: gradient descent on the public examples."""
    job = asking("training.batch_size=1000", "training.optimizer.lr=0.3")
    assert job.public is not None
    x, y = job.public
    first = start(job).model
    parts = [part.clone().view(shape) for part, shape in zip(job.context.model.layout.split(first), shapes(job), strict=True)]
    weight, bias = (part.requires_grad_() for part in parts)
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(x.flatten(1) @ weight.T + bias, y)
        for part, gradient in zip((weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True):
            part.data -= 0.3 * gradient
    expected = torch.cat([weight.detach().reshape(-1), bias.detach()]) - first
    found = released(job, start(job)).public_update
    assert found is not None
    assert torch.allclose(found, expected, atol=1e-6)
    assert float(expected.abs().max()) > 0.01


def shapes(job: Federation) -> tuple[tuple[int, ...], ...]:
    return job.context.model.layout.shapes


def test_it_depends_on_the_model_the_round_and_public_data_alone() -> None:
    job = asking()
    progress = start(job)
    before = torch.get_rng_state()
    first = released(job, progress).public_update
    assert torch.get_rng_state().equal(before)
    assert first is not None
    again = released(job, progress).public_update
    assert again is not None
    assert first.equal(again)
    own = job.context.clients
    others = replace(own, x=torch.randn(own.x.shape), y=own.y.roll(1))
    elsewhere = released(replace(job, context=replace(job.context, clients=others)), progress).public_update
    assert elsewhere is not None
    assert first.equal(elsewhere)
    job.context.model.load(torch.randn(len(first)))  # whatever a client's training left there
    moved = released(job, progress).public_update
    assert moved is not None
    assert moved.equal(first)
    assert job.public is not None
    x, y = job.public
    for changed in (
        released(replace(job, public=(x, y.roll(1))), progress),
        released(job, replace(progress, round=1)),
        released(job, replace(progress, model=progress.model + 0.1)),
    ):
        assert changed.public_update is not None
        assert not changed.public_update.equal(first)


def test_layers_that_draw_and_remember_do_not_tell() -> None:
    """Dropout draws from the global generator, batch norm keeps what it saw: what others drew and saw does not count."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    public = torch.randn(40, 2), torch.arange(40) % 2
    job = replace(asked(by_hand(FedAvg(), [ONE, ONE], module=module), Asking()), public=public)
    progress = start(job)
    before = torch.get_rng_state()
    first = released(job, progress).public_update
    assert first is not None
    assert torch.get_rng_state().equal(before)
    torch.rand(5)
    job.context.model.module.train()(torch.randn(50, 2) + 3)  # a client's batch: it draws, and moves the running means
    again = released(job, progress).public_update
    assert again is not None
    assert again.equal(first)
    other = released(replace(job, draws=replace(job.draws, seed=1)), progress).public_update
    assert other is not None
    assert not other.equal(first)


@pytest.mark.parametrize("steps", [0, -1])
def test_steps_that_are_none_are_refused(steps: int) -> None:
    job = asking()

    class Idle(Asking):
        public_steps = steps

    job = asked(job, Idle())
    with pytest.raises(ConfigError, match="public_steps is at least 1"):
        released(job, start(job))


def test_nobody_trains_on_public_data_unasked() -> None:
    job = h.job_of(config())
    found = released(job, start(job))
    assert found.public_loss is not None
    assert found.public_update is None


def test_a_policy_that_asks_where_nothing_is_public_is_refused() -> None:
    job = replace(asking(), public=None)
    with pytest.raises(ConfigError, match=r"dp-fedavg trains on public examples .* set data\.public_fraction"):
        released(job, start(job))


def test_training_on_public_data_that_diverges_is_an_error() -> None:
    job = asking()
    assert job.public is not None
    job = replace(job, public=(job.public[0] * 1e38, job.public[1]))
    with pytest.raises(FedveilError, match=r"lower training\.optimizer\.lr"):
        released(job, start(job))
