"""One round against hand computation; determinism; faulty clients; odd clients."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from by_hand import ONE, TWO, Book, federation
from fedveil.accounting.types import Gaussian, SampledGaussian, View
from fedveil.errors import BudgetExhausted, FedveilError
from fedveil.executors.inline import Inline
from fedveil.federation.fit import fit
from fedveil.federation.history import all_failed
from fedveil.federation.progress import Federation, Progress, start
from fedveil.federation.round import ClientTask, Outcome
from fedveil.ledger.ledger import Entry
from fedveil.methods.fedavg import DPFedAvg, FedAvg
from fedveil.release.sealed import AGGREGATE


def trained(job: Federation, progress: Progress | None = None) -> Progress:
    progress = progress or start(job)
    fit(job, Inline(job.context), progress)
    return progress


def hand_gradient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Cross-entropy gradient of a linear model at zero: logits 0, so p = 1/2 for both classes. Weight rows, then bias."""
    error = np.full((len(y), 2), 0.5)
    error[np.arange(len(y)), y] -= 1
    return np.concatenate([(error.T @ x / len(y)).ravel(), error.mean(0)])


@pytest.mark.parametrize("view", [View.SERVER, View.AGGREGATE])
def test_one_round_of_fedavg_by_hand(view: View) -> None:
    progress = trained(federation(FedAvg(), [ONE, TWO], view=view))
    updates = [-0.5 * hand_gradient(np.array(x), np.array(y)) for x, y in (ONE, TWO)]
    expected = (2 * updates[0] + 1 * updates[1]) / 3
    assert progress.model.numpy() == pytest.approx(expected, abs=1e-6)
    uniform = trained(federation(FedAvg(weighting="uniform"), [ONE, TWO], view=view))
    assert uniform.model.numpy() == pytest.approx((updates[0] + updates[1]) / 2, abs=1e-6)


@pytest.mark.parametrize("view", [View.SERVER, View.AGGREGATE])
def test_one_round_of_dp_fedavg_by_hand_up_to_tiny_noise(view: View) -> None:
    clip = 0.1
    job = federation(DPFedAvg(clip=clip), [ONE, TWO], z=1e-7, view=view)
    updates = [-0.5 * hand_gradient(np.array(x), np.array(y)) for x, y in (ONE, TWO)]
    short = [u * min(1, clip / np.linalg.norm(u)) for u in updates]
    assert trained(job).model.numpy() == pytest.approx(sum(short) / 2, abs=1e-6)
    book = job.context.door.ledger
    assert isinstance(book, Book)
    assert [e.client for e in book.entries] == ([0, 1] if view is View.SERVER else [AGGREGATE])


def test_a_run_spares_older_objects_the_garbage_collector_and_thaws_them_unless_they_are_somebody_elses() -> None:
    job = federation(FedAvg(), [ONE, TWO])
    counts: list[int] = []
    assert not gc.get_freeze_count()
    fit(job, Inline(job.context), start(job), lambda _: counts.append(gc.get_freeze_count()))
    assert counts[0] > 0
    assert not gc.get_freeze_count()
    with pytest.raises(RuntimeError, match="stop"):
        fit(job, Inline(job.context), start(job), stop)
    assert not gc.get_freeze_count()
    gc.freeze()
    try:
        fit(job, Inline(job.context), start(job))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_garbage_from_before_a_run_and_of_the_run_is_gone_after_it() -> None:
    """Else it would pile up over many short runs."""
    seen: list[weakref.ref[Progress]] = []

    def leave_a_cycle(progress: Progress) -> None:
        lost = start(job)
        lost.common["itself"] = lost
        seen.append(weakref.ref(lost))

    job = federation(FedAvg(), [ONE, TWO])
    leave_a_cycle(progress := start(job))
    fit(job, Inline(job.context), progress, leave_a_cycle)
    assert len(seen) == 1 + job.setting.rounds
    assert [one() for one in seen] == [None] * len(seen)


def stop(progress: Progress) -> None:
    raise RuntimeError("stop")


def test_fedprox_pulls_towards_the_global_model() -> None:
    steps = {"local_steps": 2}
    plain, prox = (trained(federation(FedAvg(proximal=a), [TWO], training=steps)).model.numpy() for a in (0.0, 1.0))
    first = -0.5 * hand_gradient(np.array(TWO[0]), np.array(TWO[1]))
    # the penalty's gradient at step 2 is alpha * (w_1 - w) = first, so the second step is shorter by lr * first
    assert prox == pytest.approx(plain - 0.5 * first, abs=1e-6)


def test_batch_clip_bounds_the_trajectory_and_schedules_scale_it() -> None:
    for schedule, total in (("constant", 3.0), ("cyclic", 1 + 1 / 2 + 1 / 3), ("iterative", 1 + 1 / 2 + 1 / 3)):
        steps = {"local_steps": 3, "batch_clip": 0.01, "schedule": schedule}
        moved = float(trained(federation(FedAvg(), [TWO], training=steps)).model.norm())
        assert moved == pytest.approx(0.5 * 0.01 * total, rel=1e-3)


def test_schedules_of_paper_002() -> None:
    rate = {
        s: federation(FedAvg(), [ONE], training={"schedule": s, "optimizer": {"lr": 1.0}}).context.spec.learning_rate(3, 2, 5)
        for s in ("constant", "cyclic", "stage-wise", "iterative")
    }
    assert rate == {"constant": 1.0, "cyclic": 1 / 3, "stage-wise": 1 / 4, "iterative": 1 / (3 * 5 + 3)}


def test_same_seed_same_bits_other_seed_other_bits() -> None:
    drawn = {"rounds": 4, "clients_per_round": 4, "sampling": "poisson"}

    def run(seed: int) -> torch.Tensor:
        job = federation(DPFedAvg(clip=0.1), [ONE, TWO] * 5, z=0.5, training=drawn, seed=seed)
        return trained(job).model

    assert torch.equal(run(7), run(7))
    assert not torch.equal(run(7), run(8))


def with_examples(job: Federation, x: torch.Tensor) -> Federation:
    clients = job.context.clients
    return replace(job, context=replace(job.context, clients=replace(clients, x=x)))


def poisoned(job: Federation, value: float, row: int = 2) -> Federation:
    """The same data, but for one feature of one example."""
    x = job.context.clients.x.clone()
    x[row, 0] = value
    return with_examples(job, x)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("view", [View.SERVER, View.AGGREGATE])
def test_a_client_with_a_broken_example_releases_zero_with_noise(view: View, value: float) -> None:
    """The model moves by the two other clients and by noise, the divisor stays three, and each has its rows in the ledger."""
    clip = 0.1
    job = poisoned(federation(DPFedAvg(clip=clip), [ONE, TWO, ONE], z=1e-7, training={"rounds": 2}, view=view), value)
    progress = trained(job)
    assert progress.round == 2
    for row in progress.history:
        assert row["failed"] == 1
        assert "NaN" in row["failures"][1] or "infinite" in row["failures"][1] or "max_update_norm" in row["failures"][1]
    book = job.context.door.ledger
    assert isinstance(book, Book)
    if view is View.SERVER:
        assert [(e.round, e.client) for e in book.entries] == [(t, c) for t in (0, 1) for c in (0, 1, 2)]
    else:
        assert [(e.round, e.client, e.participants) for e in book.entries] == [(0, -1, 3), (1, -1, 3)]
    assert {e.event for e in book.entries} == {Gaussian(1e7)}
    one_round = trained(poisoned(federation(DPFedAvg(clip=clip), [ONE, TWO, ONE], z=1e-7, view=view), value))
    u = -0.5 * hand_gradient(np.array(ONE[0]), np.array(ONE[1]))
    short = u * min(1, clip / np.linalg.norm(u))
    assert one_round.model.numpy() == pytest.approx(2 * short / 3, abs=1e-6)


@pytest.mark.parametrize("view", [View.SERVER, View.AGGREGATE])
def test_a_broken_example_says_nothing_to_the_server(view: View) -> None:
    """The server's record of a run with NaN and of one in which that client's data give no gradient are equal to the bit."""
    parts = [ONE, TWO, ONE]
    broken = poisoned(federation(DPFedAvg(clip=0.1), parts, z=1.0, training={"rounds": 3}, view=view), math.nan)
    still = federation(DPFedAvg(clip=0.1), [ONE, ([], []), ONE], z=1.0, training={"rounds": 3}, view=view)
    one, other = trained(broken), trained(still)
    assert [row["failed"] for row in one.history] == [1, 1, 1]
    assert [row["failed"] for row in other.history] == [0, 0, 0]
    assert torch.equal(one.model, other.model)
    assert one.seen == other.seen
    books = [job.context.door.ledger for job in (broken, still)]
    assert books[0] == books[1]


@pytest.mark.parametrize("view", [View.SERVER, View.AGGREGATE])
def test_without_a_promise_a_client_with_a_broken_example_is_left_out(view: View) -> None:
    job = poisoned(federation(FedAvg(weighting="uniform"), [ONE, TWO, ONE], training={"rounds": 2}, view=view), math.nan)
    progress = trained(job)
    u = -0.5 * hand_gradient(np.array(ONE[0]), np.array(ONE[1]))
    first = trained(poisoned(federation(FedAvg(weighting="uniform"), [ONE, TWO, ONE], view=view), math.nan)).model.numpy()
    # the server averages the two uploads that it got; a sum is divided by the planned three
    assert first == pytest.approx(u if view is View.SERVER else 2 * u / 3, abs=1e-6)
    assert [sorted(row["failures"]) for row in progress.history] == [[1], [1]]
    book = job.context.door.ledger
    assert isinstance(book, Book)
    rows = [(e.client, e.participants) for e in book.entries]
    assert rows == ([(0, 1), (2, 1)] * 2 if view is View.SERVER else [(-1, 2)] * 2)


class Shuffled(Inline):
    """Clients train and answer in another order."""

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        todo = list(tasks)
        return super().map(todo[i] for i in np.random.default_rng(0).permutation(len(todo)))


def test_the_order_of_clients_changes_no_bit_of_the_model() -> None:
    parts = [ONE, TWO, (ONE[0] + TWO[0], ONE[1] + TWO[1])] * 5
    models = []
    for engine in (Inline, Shuffled):
        job = federation(DPFedAvg(clip=0.1), parts, z=0.3, training={"rounds": 5})
        progress = start(job)
        fit(job, engine(job.context), progress)
        models.append(progress.model)
    assert torch.equal(*models)


def test_a_run_in_which_every_client_fails_stops_with_the_reason() -> None:
    job = federation(FedAvg(), [ONE, TWO])
    with pytest.raises(FedveilError, match="every client of round 0 failed; the first reason: the update contains NaN"):
        trained(with_examples(job, torch.full_like(job.context.clients.x, math.nan)))


def test_a_run_with_a_promise_ends_after_a_round_in_which_every_client_failed() -> None:
    """What they released in it is zeros with noise, and charged; the next round is not."""
    job = federation(DPFedAvg(clip=0.1), [ONE, TWO], z=1.0, training={"rounds": 3})
    progress = trained(with_examples(job, torch.full_like(job.context.clients.x, math.nan)))
    assert [row["failed"] for row in progress.history] == [2]
    assert all_failed(progress.history[0])
    book = job.context.door.ledger
    assert isinstance(book, Book)
    assert [(entry.round, entry.participants) for entry in book.entries] == [(0, 2)]
    assert progress.model.isfinite().all()
    assert progress.model.norm() > 0


def test_empty_and_single_example_clients_and_short_batches() -> None:
    empty: tuple[list[list[float]], list[int]] = ([], [])
    passes = {"local_epochs": 2, "batch_size": 2}
    three = (ONE[0] + TWO[0], ONE[1] + TWO[1])
    progress = trained(federation(DPFedAvg(clip=1.0), [empty, TWO, three], z=1e-7, training=passes))
    assert torch.isfinite(progress.model).all()
    assert progress.history[0]["failed"] == 0
    alone = trained(federation(DPFedAvg(clip=1.0), [empty], z=1e-7))
    assert alone.model.norm() < 1e-5


def test_integer_buffers_are_never_noised_and_private_statistics_stay() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    job = federation(DPFedAvg(clip=0.1), [ONE, ONE], z=1.0, training={"rounds": 2}, module=module)
    assert job.context.door.layout.dimension == sum(p.numel() for p in module.parameters())
    progress = trained(job)
    assert progress.buffers is None
    assert set(progress.privates) == {0, 1}
    assert "buffers" in progress.privates[0]
    assert module[1].num_batches_tracked.dtype == torch.int64  # type: ignore[union-attr]
    open_job = federation(
        FedAvg(),
        [ONE, ONE],
        training={"rounds": 2},
        module=torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)),
    )
    assert trained(open_job).buffers is not None


def test_an_exhausted_budget_ends_the_run_with_its_last_model() -> None:
    class Purse(Book):
        def charge_all(self, entries: Sequence[Entry]) -> None:
            if len(self.entries) == 2:
                raise BudgetExhausted("the budget is spent")
            super().charge_all(entries)

    job = federation(DPFedAvg(clip=0.1), [ONE, TWO], z=1.0, training={"rounds": 5}, book=Purse())
    progress = start(job)
    assert fit(job, Inline(job.context), progress) == "the budget is spent"
    assert progress.round == 2
    assert len(progress.history) == 2


def test_poisson_sampling_has_the_right_rate_and_its_amplification_is_charged() -> None:
    job = federation(
        DPFedAvg(clip=0.1), [TWO] * 200, z=2.0, training={"rounds": 30, "clients_per_round": 50, "sampling": "poisson"}
    )
    progress = trained(job)
    counts = [r["participants"] for r in progress.history]
    # 30 draws of Bin(200, 1/4): mean 50, sd of the mean 1.12; 2/3 and 3/2 of the rate are 15 and 22 sd away
    assert abs(float(np.mean(counts)) - 50) < 5 * 6.12 / math.sqrt(30)
    assert len(set(counts)) > 3
    assert [r["uplink_bytes"] for r in progress.history] == [4 * 6 * n for n in counts]
    book = job.context.door.ledger
    assert isinstance(book, Book)
    assert all(e.event == SampledGaussian(0.25, 2.0) for e in book.entries)


def test_max_participations_is_never_exceeded() -> None:
    job = federation(
        DPFedAvg(clip=0.1), [TWO] * 10, view="server", z=2.0, training={"rounds": 8, "clients_per_round": 5}, max_participations=3
    )
    progress = trained(job)
    assert max(progress.seen.values()) == 3
    assert sum(r["participants"] for r in progress.history) == 30
