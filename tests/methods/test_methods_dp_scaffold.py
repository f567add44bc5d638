"""DP-SCAFFOLD (Noble et al. 2022; Karimireddy et al. 2020): its equations by hand, its two parts and their price, learning."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import method_kit as h
from by_hand import ONE, TWO, Book, federation, gradient
from fedveil.accounting.types import Unbounded, View
from fedveil.errors import ConfigError
from fedveil.executors.inline import Inline
from fedveil.federation.fit import fit
from fedveil.federation.progress import Federation, Progress, start
from fedveil.mechanism.plan import Plan
from fedveil.methods.dp_scaffold import DPScaffold, Scaffold
from fedveil.methods.fedavg import DPFedAvg
from fedveil.methods.method import Method
from method_kit import planner

Vector = NDArray[np.float64]
LR, STEPS, NO_NOISE = 0.5, 3, 1e-9
FREE = DPScaffold(clip=100.0, control_clip=100.0)


def small(method: Method, rounds: int, view: View, z: float | None = NO_NOISE, **more: Any) -> Federation:
    """Clients ONE and TWO, three steps of full batches of a linear layer that starts at zero."""
    training = {"local_steps": STEPS, "optimizer": {"lr": LR}, "rounds": rounds, **more}
    return federation(method, [ONE, TWO], view=view, training=training, z=z)


def run(job: Federation) -> Progress:
    progress = start(job)
    assert fit(job, Inline(job.context), progress) == ""
    return progress


def scaffold_by_hand(cohorts: list[list[int]]) -> tuple[Vector, Vector, list[Vector]]:
    """Global model, server's and clients' control variates after these rounds of two clients.

    Client: y <- y - lr (g_i(y) + c - c_i); the new c_i is the mean of the gradients on the way, which is what option II reads off
    the update. Server: x <- x + mean of (y_i - x), c <- c + (n / N) mean of the changes of c_i.
    """
    w, c, own = np.zeros(6), np.zeros(6), [np.zeros(6), np.zeros(6)]
    for cohort in cohorts:
        updates, changes = [], []
        for i in cohort:
            y, seen = w.copy(), []
            for _ in range(STEPS):
                seen.append(gradient(y, (ONE, TWO)[i]))
                y -= LR * (seen[-1] + c - own[i])
            updates.append(y - w)
            changes.append(np.mean(seen, axis=0) - own[i])
        for i, change in zip(cohort, changes, strict=True):
            own[i] = own[i] + change
        w = w + np.mean(updates, axis=0)
        c = c + len(cohort) / 2 * np.mean(changes, axis=0)
    return w, c, own


@pytest.mark.parametrize("view", [View.SERVER, View.AGGREGATE])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_two_clients_by_hand(view: View, rounds: int) -> None:
    progress = run(small(FREE, rounds, view))
    w, c, own = scaffold_by_hand([[0, 1]] * rounds)
    assert progress.model.numpy() == pytest.approx(w, abs=2e-6)
    assert progress.common["control"].numpy() == pytest.approx(c, abs=2e-6)
    for i in (0, 1):
        assert progress.privates[i]["control"].numpy() == pytest.approx(own[i], abs=2e-6)
    if rounds == 5:  # without the correction the model is another one
        plain = run(small(DPFedAvg(clip=100.0), rounds, view)).model.numpy()
        assert np.abs(plain - w).max() > 1e-3


@pytest.mark.parametrize("view", [View.SERVER, View.AGGREGATE])
def test_scaffold_without_noise_by_hand_is_proven_nothing(view: View) -> None:
    job = small(Scaffold(), 5, view, z=None)
    progress = run(job)
    w, c, _ = scaffold_by_hand([[0, 1]] * 5)
    assert progress.model.numpy() == pytest.approx(w, abs=2e-7)
    assert progress.common["control"].numpy() == pytest.approx(c, abs=2e-7)
    assert [type(event) for event in Scaffold().releases(job.setting, view)] == [Unbounded]
    with pytest.raises(ConfigError, match="scaffold adds no noise"):
        Scaffold().calibrate(h.setting(view, noise_multiplier=3.0))


def test_one_client_a_round_by_hand() -> None:
    """Then c moves by half of the change, and a client that is not there keeps its own control variate."""
    job = small(FREE, 6, View.SERVER, clients_per_round=1)
    progress = run(job)
    book = job.context.door.ledger
    assert isinstance(book, Book)
    cohorts = [[e.client] for e in book.entries]
    assert {0, 1} == {i for (i,) in cohorts}
    w, c, own = scaffold_by_hand(cohorts)
    assert progress.model.numpy() == pytest.approx(w, abs=2e-6)
    assert progress.common["control"].numpy() == pytest.approx(c, abs=2e-6)
    assert progress.privates[1]["control"].numpy() == pytest.approx(own[1], abs=2e-6)


def test_it_ends_where_the_loss_of_all_is_flat_and_fedavg_does_not() -> None:
    """Two clients that disagree, many local steps: FedAvg stops elsewhere (client drift), SCAFFOLD at the optimum."""
    parts: list[tuple[Any, Any]] = [([[1, 0], [1, 0], [0, 1]], [0, 1, 1]), ([[1, 0], [0, 1], [0, 1], [0, 1]], [1, 0, 1, 0])]
    left = []
    for method in (FREE, DPFedAvg(clip=100.0)):
        training = {"local_steps": 20, "optimizer": {"lr": 0.3}, "rounds": 50}
        w = run(federation(method, parts, training=training, z=NO_NOISE)).model.numpy().astype(np.float64)
        left.append(float(np.linalg.norm(np.mean([gradient(w, part) for part in parts], axis=0))))
    assert left[0] < 1e-5
    assert left[1] > 0.1


@pytest.mark.parametrize("view", [View.SERVER, View.AGGREGATE])
def test_both_parts_are_clipped_and_noised_and_share_the_price(view: View) -> None:
    method = DPScaffold(clip=2.0, control_clip=0.5, control_share=0.4)
    s = h.setting(view, noise_multiplier=3.0)
    policy = planner(method, s)
    plan = policy.plan(h.released([0.0] * 7), policy.start())
    assert isinstance(plan, Plan)
    control = plan.extras["control"]
    assert (plan.clip, control.clip) == (2.0, 0.5)
    mu2 = (2.0 / float(plan.noise_std)) ** 2, (0.5 / control.noise_std) ** 2
    assert mu2 == pytest.approx((0.6 / 9, 0.4 / 9))
    assert h.method_releases_mu(method, s) == pytest.approx(math.sqrt(20) / 3)


def test_what_leaves_is_within_both_clips() -> None:
    job = small(DPScaffold(clip=0.1, control_clip=0.02), 1, View.SERVER)
    sent: list[Any] = []
    policy = job.context.policy

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(policy, name)

        def observe(self, state: Any, upload: Any) -> Any:
            sent.append(upload)
            return policy.observe(state, upload)

        def observe_all(self, state: Any, uploads: Any) -> Any:
            return policy.observe_all(state, uploads)  # type: ignore[attr-defined]

    run(replace(job, context=replace(job.context, policy=Watched())))
    assert [float(u.vector.norm()) for u in sent] == pytest.approx([0.1, 0.1], rel=1e-4)
    assert [float(u.extras["control"].norm()) for u in sent] == pytest.approx([0.02, 0.02], rel=1e-4)


def test_a_client_without_examples_moves_nothing() -> None:
    job = federation(FREE, [ONE, ([], [])], training={"rounds": 2}, z=NO_NOISE)
    progress = run(job)
    assert bool(torch.isfinite(progress.model).all())
    assert not progress.privates[1]["control"].any()
