"""Engine `stacked`: close to inline; a client's bits depend on no other client, on no worker, and on nobody else's failure."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedveil.executors.inline as stacked
from federation_runs import bits, compared, config, finished, job, small_digits
from fedveil.executors.inline import Inline, StackedClients
from fedveil.executors.pool import ProcessPool
from fedveil.executors.select_engine import engine, engine_to_record
from fedveil.executors.stacked_models import by_example, dense, keeps_apart, losses_of, obstacle
from fedveil.experiment.config import Config
from fedveil.experiment.config_files import read_config
from fedveil.experiment.run import run
from fedveil.federation.progress import Federation, start
from fedveil.federation.round import ClientTask, client_round, planned, sealed_outcome
from fedveil.mechanism.plan import Plan, Released
from fedveil.release.sealed import Contribution, SealedUpload
from fedveil.tasks.classification import Classification
from fedveil.training.local import Plain
from method_kit import model_of, spec_of

SIZES = (1, 5, 16, 20, 32, 20, 5, 33, 17, 1)
"""Examples of each client: short batches, several batches, equals."""


def small(view: str = "aggregate", clients: int = 10, **more: Any) -> Config:
    training = {"clients_per_round": clients, "rounds": 2} | more.pop("training", {})
    data = {"partition": {"kind": "iid", "clients": clients}}
    return config({"name": "dp-fedavg"}, view, data=data, training=training, **more)


def federation(folder: Path, configuration: Config | None = None) -> Federation:
    """Ten clients of `SIZES`, whatever the configuration divides."""
    made = job(configuration or small(), folder)
    ends = np.concatenate([[0], np.cumsum(SIZES)])
    digits = made.context.clients
    clients = replace(digits, y=digits.y.clone(), offsets=ends.astype(np.int64))
    return replace(made, context=replace(made.context, clients=clients))


def tasks(made: Federation, *clients: int) -> list[ClientTask]:
    released, policy = Released(0, start(made).model, None, None, server={}), made.context.policy
    return [ClientTask(c, released, 1.0, made.context.plan(released, policy.start()), policy.start(), {}) for c in clients]


def left(made: Federation, *clients: int) -> dict[int, bytes]:
    """What each client lets out when these train together."""
    found = {}
    for outcome in StackedClients(made.context).outcomes(tasks(made, *clients)):
        release = outcome.release
        assert isinstance(release, Contribution | SealedUpload)
        vector = release.sealed if isinstance(release, Contribution) else made.context.door.released_bits(release.upload)
        found[outcome.client] = bits(vector)
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize("view", ["aggregate", "server"])
@pytest.mark.parametrize(
    ("hidden", "training"),
    [
        ([], {"local_steps": None, "local_epochs": 2}),
        ([8, 4], {"local_steps": 5}),
        ([8], {"optimizer": {"name": "adam", "lr": 0.01}}),
        ([8], {"optimizer": {"name": "sgd", "momentum": 0.9}, "schedule": "iterative", "batch_clip": 0.1}),
    ],
)
def test_close_to_inline(view: str, hidden: list[int], training: dict[str, Any], tmp_path: Path) -> None:
    configuration = small(view, model={"hidden": hidden}, training=training)
    runs = [federation(tmp_path / name, configuration) for name in ("one", "stacked")]
    one, other = (finished(made, Inline(made.context, stacked=kind)) for made, kind in zip(runs, (False, True), strict=True))
    assert 0 < float((one.model - other.model).norm() / one.model.norm()) < 1e-6
    for mine, theirs in zip(compared(one), compared(other), strict=True):
        assert mine["failures"] == theirs["failures"] == {}
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["aggregate", "server"])
def test_the_bits_of_a_client_do_not_depend_on_the_others(view: str, tmp_path: Path) -> None:
    made, every = federation(tmp_path, small(view)), range(len(SIZES))
    alone = {client: left(made, client)[client] for client in every}
    assert left(made, *every) == left(made, *reversed(every)) == left(made, *every, *every) == alone
    assert left(made, 3, 5) == {3: alone[3], 5: alone[5]}


def test_nor_on_the_number_of_workers(tmp_path: Path) -> None:
    made = federation(tmp_path / "one")
    one = finished(made, Inline(made.context, stacked=True))
    for workers in (1, 3):
        made = federation(tmp_path / str(workers))
        other = finished(made, ProcessPool(made.context, workers, stacked=True))
        assert torch.equal(one.model, other.model)
        assert compared(one) == compared(other)


def test_a_client_that_fails_fails_alone(tmp_path: Path) -> None:
    made = federation(tmp_path)
    before = left(made, *range(len(SIZES)))
    made.context.clients.y[int(made.context.clients.offsets[5])] = 99  # no such class
    outcomes = list(StackedClients(made.context).outcomes(tasks(made, *range(len(SIZES)))))
    assert [o.client for o in outcomes if o.error] == [5]
    assert "out of bounds" in outcomes[5].error
    after = left(made, *range(len(SIZES)))
    assert after[5] != before[5]
    assert {c: row for c, row in after.items() if c != 5} == {c: row for c, row in before.items() if c != 5}


def test_a_stack_whose_worker_dies_costs_the_client_that_killed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = StackedClients._trained

    def dying(self: StackedClients, part: list[ClientTask], *more: Any) -> Any:
        if any(task.client == 5 for task in part):
            os._exit(1)
        return trained(self, part, *more)

    made = federation(tmp_path, small("server"))
    before = left(made, *range(len(SIZES)))
    monkeypatch.setattr(StackedClients, "_trained", dying)
    with ProcessPool(made.context, 2, stacked=True) as pool:
        outcomes = list(pool.map(tasks(made, *range(len(SIZES)))))
    assert {o.client: o.error for o in outcomes if o.error} == {5: "its worker process died (tried 2 times)"}
    leaving = made.context.door.released_bits
    rows = {o.client: bits(leaving(o.release.upload)) for o in outcomes if isinstance(o.release, SealedUpload)}
    assert rows == {client: row for client, row in before.items() if client != 5}


def test_workers_add_up_the_integers_of_their_stacks(tmp_path: Path) -> None:
    made = federation(tmp_path)
    each = [o.release for o in StackedClients(made.context).outcomes(tasks(made, *range(len(SIZES))))]
    whole = sum(one.sealed for one in each if isinstance(one, Contribution))
    with ProcessPool(made.context, 2, stacked=True) as pool:
        for _ in range(2):
            sums = [o.release for o in pool.map(tasks(made, *range(len(SIZES))))]
            vectors = [one.sealed for one in sums if isinstance(one, Contribution) and len(one.sealed)]
            assert len(sums) == len(SIZES)
            assert 1 <= len(vectors) < len(sums)
            assert torch.equal(sum(vectors), whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("view", ["aggregate", "server"])
def test_a_stack_leaves_by_the_door_as_each_alone(view: str, tmp_path: Path) -> None:
    """Bits, ledger rows and what the clients' own logs say, with one update that is too large and one that is not finite."""
    made = federation(tmp_path, small(view))
    trained = StackedClients._trained

    def odd(self: StackedClients, *arguments: Any) -> Any:
        works = trained(self, *arguments)
        factors = {1: math.nan, 4: 1e9}
        return [replace(w, update=w.update * factors.get(i, 1.0)) for i, w in enumerate(works)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StackedClients, "_trained", odd)
        stacks = StackedClients(made.context)
        todo = tasks(made, 3, 5, 3, 5, 3, 5)
        works = stacks._works(
            stacks._shape(todo[0], planned(made.context, todo[0])), todo, [planned(made.context, t) for t in todo]
        )
        together = list(stacks.outcomes(todo))
    alone = [sealed_outcome(made.context, task, work, 0.0) for task, work in zip(todo, works, strict=True)]
    assert [bool(o.error) for o in together] == [False, True, False, False, True, False]
    assert [o.error for o in together] == [o.error for o in alone]
    for mine, theirs in zip(together, alone, strict=True):
        one, other = mine.release, theirs.release
        if isinstance(one, SealedUpload) and isinstance(other, SealedUpload):
            assert one.entry == other.entry
            assert bits(made.context.door.released_bits(one.upload)) == bits(made.context.door.released_bits(other.upload))
        else:
            assert isinstance(one, Contribution)
            assert isinstance(other, Contribution)
            assert bits(one.sealed) == bits(other.sealed)
            assert bool(one.sealed.any()) is not bool(mine.error)


def test_a_policy_that_changes_its_plan_meanwhile_changes_neither_clip_nor_noise_nor_price(tmp_path: Path) -> None:
    made = federation(tmp_path, small("server"))
    door, clips = made.context.door, torch.ones(len(made.context.door.layout))
    plan = Plan(layer_clip=clips, noise_std=1.0)
    update = torch.full((door.layout.dimension,), 10.0)
    before = door.seal_upload(update, plan, 3, 0)
    terms = door.compile(plan)
    clips *= 100
    after = door.seal_upload(update, terms, 3, 0)
    assert after.entry == before.entry
    assert bits(door.released_bits(after.upload)) == bits(door.released_bits(before.upload))
    assert door.seal_upload(update, plan, 3, 0).entry != before.entry


def test_where_rows_are_not_kept_apart_clients_train_as_inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (federation(tmp_path / name) for name in "ab")
    monkeypatch.setattr(stacked, "keeps_apart", lambda *arguments: False)
    models = [finished(made, Inline(made.context, stacked=kind)).model for made, kind in ((one, False), (other, True))]
    assert torch.equal(*models)


def test_a_pass_that_lets_rows_touch_each_other_is_found() -> None:
    model = model_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    apart, examples, targets = dense(model.module), torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)

    def touching(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        out = apart(parameters, x)
        return out + 1e-6 * out.detach().mean(0)

    for forward, kept in ((apart, True), (touching, False)):
        learned = forward, model.layout, losses_of(Classification())
        assert keeps_apart(learned, spec_of(), (4, 32), examples, targets) is kept
    assert keeps_apart((touching, model.layout, losses_of(Classification())), spec_of(), (1, 32), examples, targets)


@pytest.mark.parametrize("task", [Classification(), Classification(class_weights=(1.0, 2.0, 0.5))])
def test_losses_with_examples_as_columns_are_those_of_the_task(task: Classification) -> None:
    draw = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(4, 32, 3, generator=draw), torch.randint(0, 3, (4, 32), generator=draw)
    assert torch.allclose(losses_of(task)(outputs, targets), by_example(task)(outputs, targets), rtol=1e-6, atol=0)


def test_a_task_of_the_users_own_keeps_its_losses() -> None:
    class Absolute(Classification):
        def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (output.argmax(1) - target).abs().float()

    outputs, targets = torch.eye(3).expand(2, 3, 3), torch.tensor([[0, 1, 2], [2, 1, 0]])
    assert losses_of(Absolute())(outputs, targets).tolist() == [[0, 0, 0], [2, 0, 2]]


SHARED = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("module", "dense_only"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False)), True),
        (nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 3), nn.Tanh()), nn.Linear(3, 2)), True),
        (nn.Sequential(nn.Linear(4, 3)), False),
        (nn.Sequential(nn.Flatten(0), nn.Linear(4, 3)), False),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Dropout()), False),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3)), False),
        (nn.Sequential(nn.Flatten(), SHARED, nn.ReLU(), SHARED), False),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 2)), False),
    ],
)
def test_which_networks_can_be_stacked(module: nn.Module, dense_only: bool) -> None:
    why = obstacle(model_of(module), spec_of(), Plain(), Classification())
    assert why == ("" if dense_only else "its network is not a flattening of examples and then dense layers, all of them trained")


def test_auto_stacks_many_clients_of_small_dense_networks(tmp_path: Path) -> None:
    def chosen(configuration: Config, timeout: float | None = None, name: str = "auto") -> str:
        made = job(configuration, tmp_path / str(len(list(tmp_path.iterdir()))))
        return engine_to_record(name, made.context.model, made.context.objective, made.setting, timeout)

    assert chosen(small(clients=32)) == "stacked"
    assert chosen(small(clients=31)) == chosen(small(clients=32), timeout=1.0) == "auto"
    assert chosen(small(clients=32), name="pool") == "pool"
    assert chosen(small(clients=32, training={"optimizer": {"name": "adam"}})) == "stacked"
    assert chosen(small(clients=32, training={"batch_size": 4096})) == "auto"
    assert chosen(small(clients=32, run={"precision": "bf16"})) == "auto"
    cohort = {"training": {"clients_per_round": 32}, "data": {"partition": {"kind": "iid", "clients": 32}}}
    assert chosen(config({"name": "noisy-fedprox"}, **cohort)) == "auto"


def test_what_cannot_be_stacked_trains_one_at_a_time_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    configuration = config({"name": "noisy-fedprox"})
    runs = [job(configuration, tmp_path / name) for name in "ab"]
    models = [finished(made, Inline(made.context, stacked=kind)).model for made, kind in zip(runs, (False, True), strict=True)]
    assert torch.equal(*models)
    assert "trains clients one at a time: its method has local training of its own" in caplog.text
    assert isinstance(engine("stacked", runs[0].context), Inline | ProcessPool)


def test_a_run_records_that_it_stacks_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    configuration = small(clients=32, run={"engine": "auto"})

    def interrupted(row: dict[str, Any]) -> None:
        if row["round"] == 0:
            raise KeyboardInterrupt

    whole = run(configuration, tmp_path / "whole", data=small_digits())
    assert read_config(tmp_path / "whole" / "config.toml").run.engine == "stacked"
    with pytest.raises(KeyboardInterrupt):
        run(configuration, tmp_path / "cut", interrupted, data=small_digits())
    resumed = run(configuration, tmp_path / "cut", data=small_digits(), resume=True)
    assert torch.equal(whole.model.vector, resumed.model.vector)
    plain = run(small(clients=32), tmp_path / "plain", data=small_digits())
    assert not torch.equal(whole.model.vector, plain.model.vector)
    assert float((whole.model.vector - plain.model.vector).norm() / plain.model.vector.norm()) < 1e-6


def test_counts_of_the_clients_own_tests_leave_as_inline(tmp_path: Path) -> None:
    data = {"partition": {"kind": "iid", "clients": 4}, "client_test_fraction": 0.5}
    private = {"evaluation": {"share": 0.4, "examples": 8}}
    made = job(config({"name": "dp-fedavg"}, data=data, privacy=private), tmp_path)
    d = made.context.door.layout.dimension
    together = StackedClients(made.context).outcomes(tasks(made, *range(4)))
    for outcome, task in zip(together, tasks(made, *range(4)), strict=True):
        alone = client_round(made.context, task).release
        assert isinstance(outcome.release, Contribution)
        assert isinstance(alone, Contribution)
        assert torch.equal(outcome.release.sealed[d:], alone.sealed[d:])
        assert outcome.release.sealed[d:].any()
