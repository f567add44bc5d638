"""What plugins may try, on every engine: nobody else's plan, model or release changes, and nothing leaves without noise."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from federation_runs import charged, config, finished, job
from fedveil.executors.batched import Batched
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool
from fedveil.federation.checkpoint import Checkpoints
from fedveil.federation.progress import Federation, Progress
from fedveil.federation.round import Engine
from fedveil.federation.server import server_step
from fedveil.mechanism.plan import Plan, Released, Upload
from fedveil.methods.base import Fixed, Policy, Setting, UploadServer
from fedveil.training.local import Local, Remembering, State
from method_kit import planner

ENGINES: dict[str, Callable[[Any], Engine]] = {
    "inline": Inline,
    "pool": lambda context: ProcessPool(context, 2),
    "batched": lambda context: Batched(context, 2),
}
VIEWS = ["server", "aggregate"]


@dataclass(frozen=True)
class Watched(UploadServer):
    """A method, and its server, which keeps what it gets."""

    inner: Any
    uploads: list[Upload] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def server(self, s: Setting) -> UploadServer:
        return self

    def step(self, s: Setting, state: State, uploads: Sequence[Upload]) -> tuple[State, torch.Tensor]:
        self.uploads.extend(
            replace(u, vector=u.vector.clone(), integers=None if u.integers is None else u.integers.clone()) for u in uploads
        )
        assert uploads[0].start is not None
        return server_step(self.inner, s, state, uploads, uploads[0].start)


def ran(run: Federation, engine: str) -> tuple[Progress, list[Upload]]:
    watched = Watched(run.method)
    run = replace(run, method=watched)
    return finished(run, ENGINES[engine](run.context)), watched.uploads


def with_parts(run: Federation, **parts: Any) -> Federation:
    return replace(run, context=replace(run.context, **parts))


def same_releases(one: list[Upload], other: list[Upload]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(
        a.integers is not None and b.integers is not None and torch.equal(a.integers, b.integers) and a.client == b.client
        for a, b in pairs
    )


# --- what is handed to a client is its own ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner(Remembering):
    """Some method's training, from which the others here differ in one thing."""

    inner: Any

    def begin(self, local: Local) -> None:
        self.inner.begin(local)

    def step(self, local: Local, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner.step(local, x, y)
        return loss

    def finish(self, local: Local) -> torch.Tensor:
        update: torch.Tensor = self.inner.finish(local)
        return update


class Meddling(Inner):
    """Edits in place, once its own update is made, everything that it was handed."""

    def finish(self, local: Local) -> torch.Tensor:
        update: torch.Tensor = self.inner.finish(local).clone()
        plan: Any = local.plan
        assert local.support is not None
        assert not local.support.all(), "somebody else's edit has arrived here"
        assert plan.broadcast["words"] == {"deep": [1, 2]}
        local.support.fill_(True)
        plan.support.fill_(True)
        plan.layer_clip.fill_(1e6)
        plan.noise_std.zero_()
        plan.broadcast["tensor"].fill_(7.0)
        plan.broadcast["array"][:] = 7.0
        plan.broadcast["words"]["deep"].append(3)
        local.start.fill_(math.nan)
        local.model.vector.fill_(math.nan)
        for name in ("clip", "noise_std", "support"):
            object.__setattr__(plan, name, None)
        return update


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("view", VIEWS)
def test_what_a_client_is_handed_is_a_copy(view: str, engine: str, tmp_path: Path) -> None:
    runs, plans = [], []
    for meddle in (False, True):
        run = job(config({"name": "dp-fedavg", "clip": 0.5}, view), tmp_path / str(meddle))
        layout = run.setting.layout
        plan = replace(
            run.context.policy.part.always,  # type: ignore[union-attr]
            support=torch.arange(layout.dimension) % 3 > 0,
            layer_clip=torch.full((len(layout),), 0.4),
            broadcast={"tensor": torch.ones(3), "array": np.ones(3), "words": {"deep": [1, 2]}},
        )
        plan = replace(plan, noise_std=torch.full((len(layout),), 2 * float(plan.noise_std)))
        objective = Meddling(run.context.objective) if meddle else run.context.objective
        runs.append(ran(with_parts(run, policy=planner(Fixed(plan), run.setting), objective=objective), engine))
        plans.append(plan)
    (calm, honest), (progress, uploads) = runs
    assert torch.equal(calm.model, progress.model)
    assert same_releases(honest, uploads)
    assert not any(row["failures"] for row in progress.history)
    assert charged(tmp_path / "False") == charged(tmp_path / "True")
    broadcast = plans[1].broadcast
    assert (broadcast["tensor"].tolist(), broadcast["array"].tolist(), broadcast["words"]) == (
        [1.0] * 3,
        [1.0] * 3,
        {"deep": [1, 2]},
    )
    assert int(plans[1].support.sum()) == int((torch.arange(len(plans[1].support)) % 3 > 0).sum())


class InPlace(Inner):
    """Gives the model's own memory as update, and keeps it as state."""

    def finish(self, local: Local) -> torch.Tensor:
        local.state["parts"] = [local.model.vector, local.model.grad]
        return local.model.vector.sub_(local.start)


class Copying(Inner):
    """The same with copies."""

    def finish(self, local: Local) -> torch.Tensor:
        update = local.model.vector.sub_(local.start).clone()
        local.state["parts"] = [update.clone(), local.model.grad.clone()]
        return update


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("view", VIEWS)
def test_an_update_in_the_model_s_memory_is_not_the_next_client_s(view: str, engine: str, tmp_path: Path) -> None:
    """Two rows serve six clients in `batched`, and one model all of them elsewhere."""
    runs = []
    for kind in (InPlace, Copying):
        run = job(config({"name": "dp-fedavg"}, view, training={"clients_per_round": 6}), tmp_path / kind.__name__)
        runs.append(ran(with_parts(run, objective=kind(run.context.objective)), engine))
    (one, uploads), (other, copies) = runs
    assert torch.equal(one.model, other.model)
    assert same_releases(uploads, copies)
    for client in range(6):
        kept, expected = (p.privates[client]["parts"] for p in (one, other))
        assert all(map(torch.equal, kept, expected))
    assert len({p["parts"][0].numpy().tobytes() for p in one.privates.values()}) == 6


# --- what a client hands over is only its update -------------------------------------------------------------------------


class Attached(Inner):
    """Hands over its update with functions of its own attached, one of which tells private numbers as standard deviations."""

    def finish(self, local: Local) -> torch.Tensor:
        update: torch.Tensor = self.inner.finish(local).clone()
        secret = update[:2].clone()
        update.new_tensor = lambda *_, **__: secret  # type: ignore[method-assign]
        return update


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("view", VIEWS)
def test_what_is_attached_to_an_update_stays_with_the_client(view: str, engine: str, tmp_path: Path) -> None:
    runs = []
    for attach in (False, True):
        run = job(config({"name": "dp-fedavg", "clip": 0.5}, view), tmp_path / str(attach))
        objective = Attached(run.context.objective) if attach else run.context.objective
        runs.append(ran(with_parts(run, objective=objective), engine))
    (calm, honest), (progress, uploads) = runs
    assert torch.equal(calm.model, progress.model)
    assert same_releases(honest, uploads)
    assert all(torch.equal(a.noise_std, b.noise_std) for a, b in zip(honest, uploads, strict=True))


class Wordless(Exception):
    """Fails also when it is asked what it says."""

    def __str__(self) -> str:
        raise ValueError("no words")


def _boom(*_: Any, **__: Any) -> Any:
    raise RuntimeError("looked at")


def _nan_that_cannot_be_looked_at(local: Local, update: torch.Tensor) -> torch.Tensor:
    update = update * math.nan
    update.isnan = _boom  # type: ignore[method-assign]
    return update


def _kept(value: Any) -> Callable[[Local, torch.Tensor], torch.Tensor]:
    def keep(local: Local, update: torch.Tensor) -> torch.Tensor:
        local.state["kept"] = value
        return update

    return keep


def _raised(error: BaseException) -> Callable[[Local, torch.Tensor], torch.Tensor]:
    def fail(local: Local, update: torch.Tensor) -> torch.Tensor:
        raise error

    return fail


SPOILT: dict[str, tuple[Callable[[Local, torch.Tensor], torch.Tensor], str]] = {
    "an error without words": (_raised(Wordless()), "Wordless"),
    "an exit": (_raised(SystemExit(3)), "SystemExit: 3"),
    "an end of another kind": (_raised(GeneratorExit("enough")), "GeneratorExit: enough"),
    "what cannot be looked at": (_nan_that_cannot_be_looked_at, "the update contains NaN"),
    "a state that cannot be saved": (_kept(_boom), "Local.state may hold dense tensors"),
    "a sparse state": (_kept(torch.zeros(2).to_sparse()), "Local.state may hold dense tensors"),
}


class Spoiling(Inner):
    """Spoils each round of client 2, in one of the ways above after the other."""

    def finish(self, local: Local) -> torch.Tensor:
        update: torch.Tensor = self.inner.finish(local)
        return list(SPOILT.values())[local.round][0](local, update) if local.client == 2 else update


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("view", VIEWS)
def test_whatever_a_client_does_it_ends_nobody_else_s_run(view: str, engine: str, tmp_path: Path) -> None:
    """Data can bring it about, and a run that ends is seen: the client releases zero with noise, and its row is charged."""
    run = job(config({"name": "dp-fedavg"}, view, training={"clients_per_round": 6, "rounds": len(SPOILT)}), tmp_path)
    progress, uploads = ran(with_parts(run, objective=Spoiling(run.context.objective)), engine)
    for row, (how, (_, reason)) in zip(progress.history, SPOILT.items(), strict=True):
        assert list(row["failures"]) == [2], how
        assert reason in row["failures"][2]
        assert row["participants"] == 6
    assert len(charged(tmp_path)) == len(uploads) == len(SPOILT) * (6 if view == "server" else 1)
    assert 2 not in progress.privates
    Checkpoints(tmp_path / "checkpoint", {}).save(progress)


# --- plans that change with each call -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moody(Policy):
    """A policy whose plan is another one each time that it is asked, in whichever process."""

    plain: Plan

    def plan(self, s: Setting, released: Released, state: dict[str, Any]) -> Plan:
        rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
        assert self.plain.support is not None
        support = torch.from_numpy(rng.random(len(self.plain.support)) < 0.5)
        return replace(self.plain, support=support, noise_std=float(self.plain.noise_std) * (2 + 8 * rng.random()))


@dataclass(frozen=True)
class Loud:
    """Ones everywhere as an update: a coordinate that leaves without noise shows."""

    def begin(self, local: Local) -> None:
        pass

    def step(self, local: Local, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(())

    def finish(self, local: Local) -> torch.Tensor:
        return torch.ones_like(local.start)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("view", VIEWS)
def test_an_impure_plan_leaves_no_coordinate_without_noise(view: str, engine: str, tmp_path: Path) -> None:
    """Whichever plan it was, that one was executed, charged and told to the server, by all clients of a sum."""
    configuration = config(
        {"name": "dp-fedavg", "clip": 0.5}, view, model={"hidden": [64]}, privacy={"epsilon": None, "noise_multiplier": 1.0}
    )
    run = job(configuration, tmp_path)
    d = run.setting.layout.dimension
    plain = replace(run.context.policy.part.always, support=torch.ones(d, dtype=torch.bool))  # type: ignore[union-attr]
    progress, uploads = ran(with_parts(run, policy=planner(Moody(plain), run.setting), objective=Loud()), engine)
    assert not any(row["failures"] for row in progress.history)
    entries = charged(tmp_path)
    order = sorted(uploads, key=lambda u: (u.round, u.client))
    assert [(e.round, e.client) for e in entries] == [(u.round, u.client) for u in order]
    assert len({e.coordinates for e in entries}) > 1
    for entry, upload in zip(entries, order, strict=True):
        support, std = upload.support, float(upload.plan.noise_std)
        assert support is not None
        assert (entry.coordinates, entry.noise_std[0]) == (int(support.sum()), std)
        assert entry.event.mu == pytest.approx(0.5 / std)
        assert upload.integers is not None
        assert (upload.integers[~support] == 0).all()
        denominator = 4.0 if view == "aggregate" else 1.0
        noise = (upload.vector[support] * denominator).numpy()
        # each of about 2,400 normals of that std; what they were added to is at most 4 * 0.5 / sqrt(2,400) = 0.04
        assert noise.std() == pytest.approx(std, rel=0.1)
        assert abs(noise.mean()) < 6 * std / math.sqrt(len(noise)) + 0.05


# --- DP-SGD -------------------------------------------------------------------------------------------------------------


class IgnoresGradient(Inner):
    """Trains on something else than the noisy gradient."""

    def step(self, local: Local, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        local.model.vector.add_(float(local.examples))
        return x.new_zeros(())


class TenTimes(Inner):
    """Asks for ten gradients of one batch, to average the noise away."""

    def step(self, local: Local, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(local.model.grad)
        for _ in range(10):
            try:
                local.gradient(local, x, y)
            except Exception:
                continue
            total += local.model.grad
        local.model.vector.sub_(total)
        return local.gradient(local, x, y)


@dataclass(frozen=True)
class Peeking(Inner):
    """Looks for examples in what it is handed, or for their number."""

    steps: int = 0
    nominal: int = 0

    def begin(self, local: Local) -> None:
        assert local.examples == self.nominal
        local.scratch["steps"] = local.steps
        self.inner.begin(local)

    def step(self, local: Local, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert local.data is None
        assert local.scratch["steps"] == local.steps == self.steps
        assert x.numel() == y.numel() == x.untyped_storage().nbytes() == y.untyped_storage().nbytes() == 0
        loss: torch.Tensor = self.inner.step(local, x, y)
        assert math.isnan(float(loss))
        return loss


def dp_sgd(view: str, **more: Any) -> Any:
    sections: dict[str, Any] = {
        "training": {"local": "dp-sgd", "rounds": 2, "batch_clip": None, "optimizer": {"lr": 0.1}},
        "privacy": {"unit": "record", "noise_multiplier": 2.0, "delta": 1e-4, "view": view},
    }
    return config(
        {"name": "fedavg", "weighting": "uniform"},
        view,
        **{k: {**sections.get(k, {}), **more.get(k, {})} for k in sections | more},
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("kind", "reason"), [(IgnoresGradient, "it did not in step 0"), (TenTimes, "only once in each step")])
def test_an_objective_that_does_not_ask_for_one_gradient_a_step_releases_noise_alone(
    kind: type[Inner], reason: str, view: str, engine: str, tmp_path: Path
) -> None:
    run = job(dp_sgd(view, training={"rounds": 1}), tmp_path)
    before = run.context.model.vector.clone()
    progress, uploads = ran(with_parts(run, objective=kind(run.context.objective)), engine)
    for row in progress.history:
        assert len(row["failures"]) == 4
        assert all(reason in why for why in row["failures"].values())
    assert uploads
    steps, expected = run.setting.dp_sgd(), math.sqrt(len(before))
    std = 0.1 * steps.noise_multiplier * steps.clip / steps.expected * math.sqrt(steps.steps)  # rate 0.1, plain SGD
    std /= 1 if view == "server" else 2  # the mean of four
    assert all(0.9 * std * expected < float(u.vector.norm()) < 1.1 * std * expected for u in uploads)
    assert not torch.equal(progress.model, before)
    assert len(charged(tmp_path)) == (4 if view == "server" else 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_objective_under_dp_sgd_sees_no_example(engine: str, tmp_path: Path) -> None:
    run = job(dp_sgd("server", training={"local_steps": None, "local_epochs": 2, "clients_per_round": 6}), tmp_path)
    clients, step = run.context.clients, run.setting.dp_sgd()
    assert step is not None
    rows = np.r_[0, int(clients.offsets[1]) : len(clients.y)]  # client 0 has one example
    fewer = np.where(clients.offsets > 0, clients.offsets - int(clients.offsets[1]) + 1, 0)
    run = with_parts(run, clients=replace(clients, x=clients.x[rows], y=clients.y[rows], offsets=fewer))
    progress, uploads = ran(with_parts(run, objective=Peeking(run.context.objective, step.steps, run.setting.records)), engine)
    assert not any(row["failures"] for row in progress.history)
    assert all(u.vector.any() for u in uploads)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("value", "engine"),
    [
        pytest.param(value, engine, marks=[pytest.mark.slow] * (engine != ("inline" if value == 3e38 else "batched")))
        for value in (3e38, math.nan)
        for engine in ENGINES
    ],
)
def test_a_broken_record_is_not_seen_under_dp_sgd(value: float, engine: str, tmp_path: Path) -> None:
    """30 rounds with the record and 30 without: no refusal in either; in the first, uploads differ by what is charged."""
    firsts, refused = [], []
    configuration = dp_sgd("server", training={"rounds": 30, "clients_per_round": 6, "local_steps": 1})
    for world in ("without", "with"):
        run = job(configuration, tmp_path / world)
        clients = run.context.clients
        x, end = clients.x.clone(), int(clients.offsets[3])
        x[end - 1] = value
        offsets, rows = clients.offsets.copy(), torch.arange(len(x))
        if world == "without":
            rows = torch.cat([rows[: end - 1], rows[end:]])
            offsets[3:] -= 1
        run = with_parts(run, clients=replace(clients, x=x[rows], y=clients.y[rows], offsets=offsets))
        progress, uploads = ran(run, engine)
        refused.append(sum(row["failed"] for row in progress.history))
        assert all(u.vector.isfinite().all() and u.vector.any() for u in uploads)
        firsts.append(next(u.vector for u in uploads if u.client == 2))
    assert refused == [0, 0]
    # the last record of its client, so that the batches are the same but for it: a clipped gradient that is finite, or zero
    step = run.setting.dp_sgd()
    assert step is not None
    assert float((firsts[0] - firsts[1]).norm()) <= (1e-6 if math.isnan(value) else 1.001 * 0.1 * step.clip / step.expected)
    assert float(firsts[0].norm()) > 1.5 * 0.1 * step.clip / step.expected


def test_the_noise_of_dp_sgd_does_not_tell_how_many_records_a_client_has(tmp_path: Path) -> None:
    """It was divided by the client's own size once: std 0.133 for 60 records against 0.0142 for 600."""
    configuration = dp_sgd(
        "server",
        model={"hidden": [64]},
        data={"partition": {"kind": "iid", "clients": 2}},
        training={"rounds": 1, "clients_per_round": 2, "local_steps": 4},
        privacy={"noise_multiplier": 300.0},
    )
    run = job(configuration, tmp_path)
    clients = run.context.clients
    rows = torch.arange(660) % len(clients.y)
    uneven = replace(clients, x=clients.x[rows], y=clients.y[rows], offsets=np.array([0, 60, 660]))
    progress, uploads = ran(with_parts(run, clients=uneven), "inline")
    assert progress.history[0]["failures"] == {}
    stds = [float(u.vector.std()) for u in uploads]
    step = run.setting.dp_sgd()
    assert step is not None
    assert step.expected == step.rate * run.setting.records
    planned = 0.1 * 300.0 * step.clip / step.expected * math.sqrt(step.steps)
    # 4,810 normals: the standard error of each std is 1 %
    assert stds == pytest.approx([planned, planned], rel=0.06)
