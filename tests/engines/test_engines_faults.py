"""Clients that go wrong in every way: under a promise they release zero with noise, which nobody can tell from an honest zero.

Without a promise they are left out with the reason. Only a process that vanishes is an absence.
"""

from __future__ import annotations

import copy
import csv
import itertools
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from by_hand import ONE, with_client
from by_hand import federation as by_hand
from federation_runs import assert_same, charged, config, covering, every_method, job, same_state, small_digits
from fedveil import certify
from fedveil.accounting.types import Gaussian
from fedveil.errors import FedveilError
from fedveil.executors import pool
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool, work
from fedveil.experiment.run_directory import write_history
from fedveil.federation.fit import fit
from fedveil.federation.progress import Federation, Progress, start
from fedveil.federation.round import Engine, sealed_outcome
from fedveil.methods.fedavg import FedAvg
from fedveil.training.local import Local, Remembering, remembers

RUNS = dict(every_method())
ENGINES: dict[str, Callable[[Any], Engine]] = {"inline": Inline, "pool": lambda context: ProcessPool(context, 2)}


def _raise(error: Exception) -> Any:
    raise error


class Liar(torch.Tensor):
    """A tensor that says of itself that it is short and finite."""

    def norm(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(())

    def isfinite(self) -> torch.Tensor:
        return torch.ones(self.shape, dtype=torch.bool)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("linalg_vector_norm", "vector_norm", "norm"):
            return torch.zeros((), dtype=torch.float64)
        return super().__torch_function__(func, types, args, kwargs or {})


FAULTS: list[tuple[str, Callable[[torch.Tensor], Any], str]] = [
    ("raises", lambda u: _raise(ValueError("a bug in a client")), "ValueError: a bug in a client"),
    ("raises without a word", lambda u: _raise(MemoryError()), "MemoryError: MemoryError"),
    ("one NaN", lambda u: u.index_fill(0, torch.tensor(3), math.nan), r"contains NaN"),
    ("infinite", lambda u: torch.full_like(u, -math.inf), r"contains infinite values"),
    ("too long", lambda u: torch.cat([u, u[:1]]), r"must have shape \(610,\), got \(611,\)"),
    ("a row", lambda u: u[None], r"got \(1, 610\)"),
    ("a number", lambda u: u.sum(), r"got \(\)"),
    ("float64", lambda u: u.double(), "must be a float32 tensor, got torch.float64"),
    ("half", lambda u: u.half(), "must be a float32 tensor, got torch.float16"),
    ("integers", lambda u: u.long(), "must be a float32 tensor, got torch.int64"),
    ("a list", lambda u: u.tolist(), "must be a float32 tensor, got list"),
    ("an array", lambda u: u.numpy(), "must be a float32 tensor, got float32"),
    ("nothing", lambda u: None, "training gave no update"),
    ("a subclass", lambda u: torch.full_like(u, 1e5).as_subclass(Liar), r"must be a float32 tensor, got torch.float32 \(Liar\)"),
    ("sparse", lambda u: u.to_sparse(), "must be a plain dense tensor, got torch.sparse_coo"),
    ("still differentiable", lambda u: u.clone().requires_grad_(), "got one that requires a gradient"),
    ("oversized", lambda u: torch.full_like(u, 1e5), r"norm 2.47e\+06, above training.max_update_norm = 1e\+06"),
    ("near overflow", lambda u: torch.full_like(u, 3e38), "above training.max_update_norm = 1e.06"),
]
ZERO = len(FAULTS)
"""Not a fault but an honest client whose update is zero."""
FAULTS.append(("zero", torch.zeros_like, ""))


@dataclass(frozen=True)
class Faulty:
    """Some method's training, after which some clients go wrong in the rounds given."""

    inner: Any
    victims: tuple[int, ...]
    faults: tuple[int, ...]
    rounds: tuple[int, ...] = tuple(range(100))
    still: bool = False

    def begin(self, local: Local) -> None:
        self.inner.begin(local)

    def step(self, local: Local, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner.step(local, x, y)
        return loss

    def finish(self, local: Local) -> Any:
        update = self.inner.finish(local)
        if local.client in self.victims and local.round in self.rounds:
            return FAULTS[self.faults[local.round % len(self.faults)]][1](update)
        return torch.zeros_like(update) if self.still else update


class FaultyMemory(Faulty, Remembering):
    """The same of clients who keep a private state."""


def faulty(configuration: Any, folder: Path, count: int = 1, **how: Any) -> tuple[Federation, list[int]]:
    """A run over six unequal clients, all of them in each round, and the clients in it that go wrong."""
    more = {"partition": {"kind": "dirichlet", "clients": 6, "alpha": 0.5}}
    configuration = configuration.model_copy(update={"data": configuration.data.model_copy(update=more)})
    configuration = configuration.model_copy(
        update={"training": configuration.training.model_copy(update={"clients_per_round": 6})}
    )
    if configuration.method.name == "banded-mf":  # all six in each round
        configuration = configuration.model_copy(update={"method": configuration.method.model_copy(update={"separation": 1})})
    run = job(configuration, folder)
    victims = list(range(count))
    kind = FaultyMemory if remembers(run.context.objective) else Faulty
    objective = kind(run.context.objective, tuple(victims), **how)
    return replace(run, context=replace(run.context, objective=objective)), victims


def finished(run: Federation, engine: str) -> Progress:
    progress = start(run)
    assert fit(run, ENGINES[engine](run.context), progress) == ""
    return progress


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_every_fault_is_released_as_zero_with_noise_and_nobody_can_tell(view: str, engine: str, tmp_path: Path) -> None:
    """To the bit what a run releases in which that client is honest and has a zero update, and to the row what it is charged."""
    configuration = config(
        {"name": "dp-fedavg", "clip": 0.5}, view, privacy={"epsilon": None, "noise_multiplier": 0.5}, training={"rounds": ZERO}
    )
    run, (victim,) = faulty(configuration, tmp_path / "faulty", faults=tuple(range(ZERO)))
    honest, _ = faulty(configuration, tmp_path / "zero", faults=(ZERO,))
    progress, other = finished(run, engine), finished(honest, "inline")
    assert torch.equal(progress.model, other.model)
    assert progress.seen == other.seen
    assert same_state(progress.policies, other.policies)
    assert charged(tmp_path / "faulty") == charged(tmp_path / "zero")
    for row, calm, (name, _, reason) in zip(progress.history, other.history, FAULTS, strict=False):
        assert list(row["failures"]) == [victim], name
        assert re.search(reason, row["failures"][victim]), (name, row["failures"][victim])
        assert (row["participants"], row["failed"]) == (6, 1)
        assert calm["failures"] == {}
        assert row["noise_norm"] == calm["noise_norm"]
    entries = charged(tmp_path / "faulty")
    if view == "server":
        assert [(e.round, e.client) for e in entries] == [(t, c) for t in range(ZERO) for c in range(6)]
    else:
        assert [(e.round, e.client, e.participants) for e in entries] == [(t, -1, 6) for t in range(ZERO)]
    assert {e.event for e in entries} == {Gaussian(2.0)}
    write_history(tmp_path, progress.history, run.context.door.layout)
    with (tmp_path / "private" / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    for written, (name, _, reason) in zip(rows, FAULTS, strict=False):
        assert re.search(f"^{victim}: .*{reason}", written["failures"]), name


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_promise_every_fault_is_left_out_with_its_reason(engine: str, tmp_path: Path) -> None:
    configuration = config({"name": "fedavg", "weighting": "uniform"}, training={"rounds": ZERO})
    run, (victim,) = faulty(configuration, tmp_path, faults=tuple(range(ZERO)))
    progress = finished(run, engine)
    assert torch.isfinite(progress.model).all()
    for row, (name, _, reason) in zip(progress.history, FAULTS, strict=False):
        assert list(row["failures"]) == [victim], name
        assert re.search(reason, row["failures"][victim]), (name, row["failures"][victim])
        assert (row["participants"], row["failed"]) == (5, 1)
    assert [(e.round, e.participants) for e in charged(tmp_path)] == [(t, 5) for t in range(ZERO)]
    assert victim not in progress.policies
    assert victim not in progress.seen


def noise_of(progress: list[torch.Tensor]) -> float:
    steps = torch.stack([b - a for a, b in itertools.pairwise(progress)]).double()
    return float(steps.std())


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("method", "view", "std"),
    [
        # z = 2, C = 0.5 and six clients, of whom two fail; the updates of the others are zero, so that steps are noise
        ({"name": "dp-fedavg", "clip": 0.5}, "server", 1.0 / math.sqrt(6)),
        ({"name": "dp-fedavg", "clip": 0.5}, "aggregate", 1.0 / 6),
        ({"name": "noisy-fedavg"}, "aggregate", None),
    ],
    ids=["each upload", "the sum", "shares"],
)
def test_clients_that_fail_send_their_noise(
    method: dict[str, Any], view: str, std: float | None, engine: str, tmp_path: Path
) -> None:
    configuration = config(
        method,
        view,
        model={"hidden": [64]},
        privacy={"epsilon": None, "noise_multiplier": 2.0},
        training={"rounds": 4, "clients_per_round": 6},
    )
    run, _ = faulty(configuration, tmp_path, 2, faults=(0, 2), still=True)
    progress, models = start(run), []
    models.append(progress.model)
    assert fit(run, ENGINES[engine](run.context), progress, lambda p: models.append(p.model)) == ""
    entries = charged(tmp_path)
    if std is None:  # noise in shares: the sum of six holds six, of which five are charged
        charges = [(e.clip[0], e.event.mu) for e in entries if isinstance(e.event, Gaussian)]
        (clip, mu) = charges[0]
        assert charges == [(clip, mu)] * 4
        std = run.setting.scope.update_factor * clip / (mu * math.sqrt(5)) * math.sqrt(6) / 6
    measured = noise_of(models)
    # 19,240 normals: the standard error of their std is 0.5 %; the noise of the four others alone is 18 % or 22 % away
    assert measured == pytest.approx(std, rel=0.025)
    for row in progress.history:
        assert row["participants"] == 6
        assert row["layer_noise_std"] == pytest.approx([std] * 4, rel=1e-6)
        assert row["noise_norm"] == pytest.approx(std * math.sqrt(4810), rel=1e-5)
    assert len(entries) == (24 if view == "server" else 4)


@dataclass(frozen=True)
class Dying:
    """Some method's training, in which the processes of some clients end or hang."""

    inner: Any
    victims: tuple[int, ...]
    hang: bool = False
    rounds: tuple[int, ...] = (1,)

    def begin(self, local: Local) -> None:
        if local.client in self.victims and local.round in self.rounds:
            if self.hang:
                time.sleep(60)
            os._exit(1)
        self.inner.begin(local)

    def step(self, local: Local, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner.step(local, x, y)
        return loss

    def finish(self, local: Local) -> Any:
        return self.inner.finish(local)


def dying(configuration: Any, folder: Path, count: int = 1, **how: Any) -> tuple[Federation, list[int]]:
    run, victims = faulty(configuration, folder, count, faults=(ZERO,), rounds=())
    objective = Dying(run.context.objective.inner, tuple(victims), **how)  # type: ignore[attr-defined]
    return replace(run, context=replace(run.context, objective=objective)), victims


@pytest.mark.few(2)
@pytest.mark.parametrize("view", ["server", "aggregate"])
@pytest.mark.parametrize("failing", [1, 2, 6])
def test_a_round_with_too_few_survivors_is_skipped(failing: int, view: str, tmp_path: Path) -> None:
    configuration = config({"name": "dp-fedavg"}, view, privacy={"min_survivors": 5})
    run, victims = dying(configuration, tmp_path, failing)
    progress, models = start(run), []
    assert fit(run, ProcessPool(run.context, 2), progress, lambda p: models.append(p.model.clone())) == ""
    row = progress.history[1]
    assert sorted(row["failures"]) == victims
    assert all("worker process died" in reason for reason in row["failures"].values())
    skipped = failing > 1
    assert torch.equal(models[0], models[1]) == skipped
    assert ("skipped" in row) == skipped
    assert not skipped or f"{6 - failing} of the 5 clients" in row["skipped"]
    if view == "aggregate":  # nothing left: nothing is charged
        assert [e.round for e in charged(tmp_path)] == ([0, 2] if skipped else [0, 1, 2])
        assert skipped or [e.participants for e in charged(tmp_path)] == [6, 5, 6]
    else:  # the uploads had left before the round was given up
        assert [e.client for e in charged(tmp_path) if e.round == 1] == [c for c in range(6) if c not in victims]
    assert not torch.equal(models[1], models[2])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_clients_that_fail_are_survivors_of_the_round(view: str, engine: str, tmp_path: Path) -> None:
    """Six failures of six, and 5 survivors asked for: a round that failures skipped would show them."""
    run, victims = faulty(
        config({"name": "dp-fedavg"}, view, privacy={"min_survivors": 5}), tmp_path, 6, faults=(2,), rounds=(1,)
    )
    progress = finished(run, engine)
    assert sorted(progress.history[1]["failures"]) == victims
    assert not any("skipped" in row for row in progress.history)
    assert [e.round for e in charged(tmp_path)] == [t for t in range(3) for _ in range(6 if view == "server" else 1)]


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_a_client_that_takes_too_long_releases_zero_from_the_parent(view: str, tmp_path: Path) -> None:
    configuration = config({"name": "dp-fedavg"}, view)
    run, (victim,) = dying(configuration, tmp_path / "slow", hang=True)
    honest, _ = faulty(configuration, tmp_path / "zero", faults=(ZERO,), rounds=(1,))
    progress = start(run)
    assert fit(run, ProcessPool(run.context, 2, timeout=1.0), progress) == ""
    assert progress.history[1]["failures"] == {victim: "no answer within 1 seconds"}
    other = finished(honest, "inline")
    assert torch.equal(progress.model, other.model)
    assert progress.seen == other.seen
    assert same_state(progress.policies, other.policies)
    assert charged(tmp_path / "slow") == charged(tmp_path / "zero")
    assert {e.participants for e in charged(tmp_path / "slow")} == ({1} if view == "server" else {6})


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_under_dp_sgd_a_client_that_takes_too_long_sends_the_noise_of_its_steps(
    view: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No configuration has this time-out; a program that builds its own pool may."""
    by_record = {
        "model": {"hidden": [64]},
        "training": {"local": "dp-sgd", "batch_clip": None, "rounds": 2, "optimizer": {"lr": 0.1}},
        "privacy": {"unit": "record", "epsilon": None, "noise_multiplier": 2.0, "delta": 1e-4},
    }
    run, (victim,) = dying(config({"name": "dp-fedavg"}, view, **by_record), tmp_path, hang=True)
    sent: dict[tuple[int, int], torch.Tensor] = {}

    def kept(context: Any, task: Any, work: Any, start: float) -> Any:
        sent[task.released.round, task.client] = work.noise.update
        return sealed_outcome(context, task, work, start)

    monkeypatch.setattr(pool, "sealed_outcome", kept)
    progress = start(run)
    assert fit(run, ProcessPool(run.context, 2, timeout=2.0), progress) == ""
    assert progress.history[1]["failures"] == {victim: "no answer within 2 seconds"}
    step = run.setting.dp_sgd()
    assert step is not None
    planned = 0.1 * 2.0 * step.clip / step.expected * math.sqrt(step.steps)  # 4,810 normals: the standard error is 1 %
    assert list(sent) == [(1, victim)]
    assert float(sent[1, victim].std()) == pytest.approx(planned, rel=0.06)
    assert progress.history[1]["noise_norm"] == progress.history[0]["noise_norm"]


def test_a_client_that_takes_too_long_is_left_out_where_nothing_is_promised(tmp_path: Path) -> None:
    run, (victim,) = dying(config({"name": "fedavg", "weighting": "uniform"}), tmp_path, hang=True)
    progress = start(run)
    assert fit(run, ProcessPool(run.context, 2, timeout=1.0), progress) == ""
    assert progress.history[1]["failures"] == {victim: "no answer within 1 seconds"}
    assert [e.participants for e in charged(tmp_path)] == [6, 5, 6]


def test_without_a_number_of_survivors_a_round_without_clients_ends_the_run(tmp_path: Path) -> None:
    run, _ = faulty(config({"name": "fedavg"}), tmp_path / "open", 6, faults=(0,), rounds=(1,))
    progress = start(run)
    with pytest.raises(FedveilError, match="every client of round 1 failed; the first reason: ValueError: a bug"):
        fit(run, Inline(run.context), progress)
    assert progress.round == 1
    run, _ = dying(config({"name": "dp-fedavg"}), tmp_path / "dead", 6)
    progress = start(run)
    with pytest.raises(FedveilError, match="every client of round 1 failed; the first reason: its worker process died"):
        fit(run, ProcessPool(run.context, 2), progress)
    assert progress.round == 1


KEEPING = ("aldp-fl-published", "fedglp-adp-proven", "dp-scaffold")
"""Methods whose clients keep states of each kind: both engines."""


@pytest.mark.few(4)
@pytest.mark.parametrize("name", covering(RUNS, 1, [f"{name}-server" for name in KEEPING]))
def test_a_client_that_fails_keeps_its_state(name: str, tmp_path: Path) -> None:
    """It trained and went wrong at the end: what it had is untouched, and both engines go on alike.

    What its policy observes is another matter: under a promise the zero was released.
    """
    configuration = RUNS[name]
    ends = []
    for engine in ENGINES if name.startswith(KEEPING) else ["inline"]:
        run, (victim,) = faulty(configuration, tmp_path / engine, faults=(2,), rounds=(1,))
        progress, before = start(run), {}
        promised = math.isfinite(certify(configuration, small_digits()).proven.epsilon)

        def look(p: Progress, victim: int = victim, before: dict[str, Any] = before, promised: bool = promised) -> None:
            states = {"policy": None if promised else p.policies.get(victim), "private": p.privates.get(victim)}
            if p.round == 1:
                before.update(copy.deepcopy(states))
            elif p.round == 2:
                assert same_state(states, before)
                assert list(p.history[-1]["failures"]) == [victim]

        ended = fit(run, ENGINES[engine](run.context), progress, look)
        assert progress.round == 3
        assert progress.seen[victim] == (3 if promised else 2)
        assert ended == ""
        ends.append(progress)
    assert_same(ends[0], ends[-1])


def test_batch_statistics_that_are_not_finite_are_refused_where_they_would_leave() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    run = by_hand(FedAvg(), [ONE, ONE, ([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], [0, 1, 1])], module=module)

    class Poisoned(Faulty):
        def finish(self, local: Local) -> Any:
            if local.examples == 3:
                local.model.module[1].running_var.fill_(math.inf)  # type: ignore[index,union-attr,operator]
            return self.inner.finish(local)

    run = with_client(run, Poisoned(run.context.objective, (), (0,)))
    progress = start(run)
    fit(run, Inline(run.context), progress)
    assert progress.history[0]["failures"][2] == "the batch statistics contain NaN or infinite values"
    assert progress.buffers is not None
    assert torch.isfinite(progress.buffers).all()


def test_workers_that_never_come_up_end_the_run_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "work", lambda *_: os._exit(3))
    run = job(RUNS["dp-fedavg-aggregate"], tmp_path)
    engine = ProcessPool(run.context, 2)
    with pytest.raises(FedveilError, match=r"worker processes do not come up .*if __name__ == '__main__'"):
        fit(run, engine, start(run))
    assert engine._workers == []


def test_a_client_s_time_does_not_count_while_its_worker_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned worker imports for seconds before it can take a client."""

    def late(*arguments: Any) -> None:
        time.sleep(1.5)
        work(*arguments)

    monkeypatch.setattr(pool, "work", late)
    run = job(RUNS["dp-fedavg-aggregate"], tmp_path)
    progress = start(run)
    assert fit(run, ProcessPool(run.context, 2, timeout=1.0), progress) == ""
    assert [row["failed"] for row in progress.history] == [0, 0, 0]
