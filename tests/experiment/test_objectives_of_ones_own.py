"""What an objective of one's own measures of private states is private under every name, and whatever fails there ends no run."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import federation_runs as runs_of
import fedveil as fv
import method_kit as h
from fedveil.experiment.assembly import federation
from fedveil.experiment.resolve import opened
from fedveil.federation.plain_state import is_storable
from fedveil.federation.progress import Federation
from fedveil.federation.round import Work, attempted, planned
from fedveil.ledger.ledger import Ledger
from fedveil.methods.base import Setting
from fedveil.methods.fedavg import DPFedAvg
from fedveil.methods.method_registry import METHODS
from fedveil.training.local import Client, Local, Plain, Remembering, State
from method_kit import first_task

SECRETS = (0.5, 9.0)
"""What client 0 holds, in two worlds that differ in nothing else."""


@dataclass(frozen=True)
class Seen(Plain, Remembering):
    """Plain training that keeps the client's secret, and does with it as `mode` says."""

    mode: str = ""
    secret: float = 0.0

    def finish(self, local: Local) -> Tensor:
        if self.mode == "fails" and local.client == 0 and self.secret > 5:
            raise ValueError("secret")
        held = self.secret if local.client == 0 else 0.0
        local.state["layers"] = len(local.model.layout)
        local.state["held"] = np.complex64(1) if self.mode == "state" and held > 5 else held
        return super().finish(local)

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        held = state["held"]
        return {
            "names": lambda: {"test_largest": held, "clip": held, "test_accuracy": held, "largest": held},
            "raise": lambda: {"root": math.sqrt(5 - held)},
            "keys": lambda: {"largest": held} | ({"more": 1.0} if held > 5 else {}),
            "lengths": lambda: {"largest": [held] * (2 if held > 5 else 1)},
            "texts": lambda: {"largest": "x" if held > 5 else 1.0},
            "by layer": lambda: {"noise_std": [held] * state["layers"], "largest": [held] * state["layers"]},
            "failures": lambda: {"failures": held} if held > 5 else {},
            "by client": lambda: {"by_client": [held]} if held > 5 else {},
            "client scores": lambda: {"personal_accuracy": [held] * 100} if held > 5 else {},
            "tables": lambda: {"largest": [[held, held]] if held > 5 else 1.0},
            "ends": lambda: {"largest": sys.exit(3) if held > 5 else 1.0},
        }.get(self.mode, dict)()

    def personal(self, model: Tensor, state: State) -> Tensor:
        if self.mode == "personal" and state["held"] > 5:
            raise ValueError("secret")
        return model.add_(state["held"]) if self.mode == "moves the model" else model


def runs(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[Path]:
    """A finished run in each world."""
    options = ("data.client_test_fraction=0.3", "training.clients_per_round=12", "run.engine=inline", "privacy.epsilon=8")
    config = h.digits({"name": "dp-fedavg"}, *options, *more)
    for secret in SECRETS:
        monkeypatch.setattr(DPFedAvg, "client", lambda self, s, secret=secret: Seen(mode=mode, secret=secret))
        result = fv.train(config, tmp_path / f"{secret:g}")
        assert result.privacy.proven.epsilon < 9
    return [tmp_path / f"{secret:g}" for secret in SECRETS]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "mode",
    [
        *("raise", "keys", "lengths", "texts", "personal", "state", "by layer", "failures"),
        *("by client", "client scores", "tables", "ends", "moves the model"),
    ],
)
def test_what_fails_on_one_clients_state_ends_no_run(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = []
    for path in runs(mode, tmp_path, monkeypatch):
        rows = list(csv.DictReader((path / "history.csv").read_text().splitlines()))
        public.append((list(rows[0]), len(rows), sorted(json.loads((path / "summary.json").read_text())["final"])))
        layers = list(csv.DictReader((path / "layers.csv").read_text().splitlines()))
        public[-1] += (len(layers), [row["noise_std"] for row in layers])
    assert public[0] == public[1]


def test_a_personal_model_is_made_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is secret, so the two models differ; by less than the secret that was added to one."""
    models = [load_file(path / "model.safetensors") for path in runs("moves the model", tmp_path, monkeypatch)]
    means = [float(torch.cat([tensor.reshape(-1) for tensor in model.values()]).mean()) for model in models]
    assert max(map(abs, means)) < 0.2  # else 9 or 27 in the second world


def test_private_figures_take_no_public_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, secret in zip(runs("names", tmp_path, monkeypatch), SECRETS, strict=True):
        mean = secret / 12
        final = json.loads((path / "summary.json").read_text())["final"]
        columns = next(csv.reader((path / "history.csv").read_text().splitlines()))
        assert not {"objective_test_largest", "largest", "objective_clip", "objective_test_accuracy"} & {*final, *columns}
        assert final["clip"] == 1.0
        assert final["test_accuracy"] != pytest.approx(mean)
        whole: dict[str, Any] = json.loads((path / "private" / "summary.json").read_text())["final"]
        names = ("objective_test_largest", "largest", "objective_clip", "objective_test_accuracy")
        assert [whole[name] for name in names] == pytest.approx([mean] * 4)


@pytest.mark.parametrize(
    "value",
    [
        np.complex64(1),
        np.longdouble(1),
        np.datetime64("2026-01-01"),
        torch.zeros(2, dtype=torch.complex128),
        torch.zeros(2, dtype=torch.complex64),
        10**5000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_state_that_no_checkpoint_can_hold_is_refused_where_it_is_made(value: Any) -> None:
    from fedveil.federation.round import _is_plain

    state = {"x": [value]}
    assert not (_is_plain(state) and is_storable(state))
    kept = {"x": [1, True, "a", None, np.float32(2), np.int64(3), torch.zeros(2, dtype=torch.bfloat16)]}
    assert _is_plain(kept) and is_storable(kept)  # noqa: PT018


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["inline", "batched", "pool"])
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_under_dp_sgd_a_client_that_fails_sends_the_noise_of_its_steps(
    view: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it sent exact zeros, and the public noise of the round said so."""
    steps = (
        "training.local=dp-sgd",
        "training.example_clip=1.0",
        "privacy.unit=record",
        "privacy.delta=1e-4",
        f"privacy.view={view}",
    )
    noise = []
    for path in runs("fails", tmp_path, monkeypatch, *steps, f"run.engine={engine}"):
        rows = list(csv.DictReader((path / "history.csv").read_text().splitlines()))
        noise.append([row["noise_norm"] for row in rows])
        failed = [row["failed"] for row in csv.DictReader((path / "private" / "history.csv").read_text().splitlines())]
    assert noise[0] == noise[1]
    assert min(map(float, noise[0])) > 0
    assert failed == ["1"] * 3


class Momentum(Plain):
    """A velocity for the gradient, as optimisers have one, on the objective itself: one object, which serves all clients."""

    velocity: Tensor | float = 0.0

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        loss = local.gradient(local, x, y)
        local.model.grad.add_(self.velocity, alpha=0.9) if isinstance(self.velocity, Tensor) else None
        object.__setattr__(self, "velocity", local.model.grad.clone())
        local.descend()
        return loss


def push(local: Local) -> None:
    """A penalty that keeps what it saw, in a function of the user's own."""
    PUSHED.append(float(local.model.grad.norm()))


PUSHED: list[float] = []


class OnModel(Plain):
    """The same velocity where the model lies, which is the same for all clients: on it, or on its module or a layer."""

    def __init__(self, where: Callable[[Any], Any]) -> None:
        super().__init__()
        object.__setattr__(self, "where", where)

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        loss, held = local.gradient(local, x, y), self.where(local.model)  # type: ignore[attr-defined]
        local.model.grad.add_(getattr(held, "velocity", torch.zeros(())), alpha=0.9)
        held.velocity = local.model.grad.clone()
        local.descend()
        return loss


class AddsUp(Plain):
    """A gradient that is taken by hand, on top of what is there."""

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        loss = torch.nn.functional.cross_entropy(local.model.module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        local.descend()
        return loss.detach()


class OwnMethod(DPFedAvg):
    """A method of the user's own."""

    kind: str = "velocity"

    def client(self, s: Setting) -> Client:
        kinds: dict[str, Callable[[], Client]] = {
            "velocity": Momentum,
            "penalty": lambda: Plain(penalty=push),
            "nothing": Plain,
            "on the model": lambda: OnModel(lambda model: model),
            "on the module": lambda: OnModel(lambda model: model.module),
            "on a layer": lambda: OnModel(lambda model: list(model.module.modules())[-1]),
            "adds up": AddsUp,
        }
        return kinds[self.kind]()


@pytest.mark.parametrize("kind", ["velocity", "penalty", "nothing", "on the model", "on the module", "on a layer", "adds up"])
def test_nothing_of_the_client_before_is_left(kind: str, tmp_path: Path) -> None:
    """What an objective kept moved the others' clipped updates by 3.3 clips; so did a gradient that `backward` added to."""
    run = own_run(kind, tmp_path)
    tasks = [first_task(run, client) for client in range(2)]
    alone, _, after = (attempted(run.context, task, planned(run.context, task)) for task in (tasks[1], *tasks))
    assert isinstance(alone, Work)
    assert isinstance(after, Work)
    assert alone.update.equal(after.update)
    assert alone.update.norm() > 0


def own_run(kind: str, tmp_path: Path, **sections: Any) -> Federation:
    """Everything of a run with a method of the user's own."""
    config = runs_of.config({"name": "dp-fedavg"}, "server", **sections)
    experiment, data = opened(config)
    method = OwnMethod(kind=kind)
    experiment = replace(experiment, method=method, client=method.client(experiment.setting))
    Ledger.create(tmp_path / "ledger.sqlite", "run", {}).close()
    return federation(experiment, data, tmp_path / "ledger.sqlite", "run")


def test_the_statement_says_what_is_taken_on_trust_of_a_method_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "dp-fedavg", OwnMethod)
    for isolation, words in (("process", "in a process that is forked"), ("copy", "trains a fresh copy of model")):
        of_own = fv.certify(runs_of.config({"name": "dp-fedavg"}, run={"isolation": isolation}))
        (trusted,) = (one.what for one in of_own.assumptions if "user-defined code carries" in one.what)
        assert words in trusted
    monkeypatch.undo()
    ours = fv.certify(runs_of.config({"name": "dp-fedavg"}))
    assert not [one for one in ours.assumptions if "user-defined code carries" in one.what]
