"""A client before a server that is broken or lies: it answers what it agreed to, refuses, and never breaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from federation_runs import config, job
from fedveil.deploy.client_node import ClientStates, Generation
from fedveil.deploy.round_messages import (
    RefusalMessage,
    ReleaseMessage,
    RoundMessage,
    TaskMessage,
    read_reply,
    read_round,
    round_bytes,
    task_bytes,
)
from fedveil.deploy.wire_format import WireError
from fedveil.errors import BudgetExhausted, ConfigError, FedveilError, LedgerError
from fedveil.federation.progress import start
from fedveil.mechanism.plan import Released
from flower_nodes import Nodes


def asked(folder: Path, view: str = "server") -> tuple[Nodes, RoundMessage, TaskMessage]:
    run = job(config({"name": "dp-fedavg"}, view), folder / "run")
    nodes = Nodes(run.context, folder / "clients", rounds=3)
    state = run.context.policy.start() if view == "aggregate" else {}
    told = RoundMessage("r", Released(0, start(run).model, None), state, None)
    return nodes, told, TaskMessage("r", 0, 2, 1.0)


def test_a_round_comes_back_as_it_was(tmp_path: Path) -> None:
    _, told, _ = asked(tmp_path)
    server = {"a": torch.arange(3), "b": [1.5, None, {"c": (torch.tensor([True]), "x")}]}
    whole = replace(told, released=replace(told.released, previous=told.released.model * 2, public_loss=0.1, server=server))
    update = told.released.model + 1
    whole = replace(whole, released=replace(whole.released, public_update=update))
    found = read_round(round_bytes(whole), len(told.released.model))
    assert found.released.model.equal(told.released.model)
    assert found.released.previous is not None
    assert found.released.previous.equal(told.released.model * 2)
    assert found.released.public_update is not None
    assert found.released.public_update.equal(update)
    assert (found.released.round, found.released.public_loss, found.run) == (0, 0.1, "r")
    assert found.released.server["a"].equal(server["a"])
    assert found.released.server["b"][2]["c"][1] == "x"


@pytest.mark.parametrize(
    "changed",
    [
        lambda told: replace(told, released=replace(told.released, model=told.released.model * torch.nan)),
        lambda told: replace(told, released=replace(told.released, model=told.released.model[:-1])),
        lambda told: replace(told, released=replace(told.released, model=told.released.model.double())),
        lambda told: replace(told, released=replace(told.released, previous=torch.ones(1))),
        lambda told: replace(told, released=replace(told.released, public_update=told.released.model * torch.inf)),
        lambda told: replace(told, buffers=torch.tensor([torch.inf])),
        lambda told: replace(told, run="other"),
        lambda told: replace(told, released=replace(told.released, round=1)),
    ],
)
def test_a_model_that_is_none_and_a_task_of_another_round_are_refused(changed: Any, tmp_path: Path) -> None:
    nodes, told, task = asked(tmp_path)
    with pytest.raises(WireError):
        nodes.node(2).answer(round_bytes(changed(told)), task_bytes(task))


@pytest.mark.parametrize(("client", "weight"), [(1, 1.0), (2, 2.0), (2, 0.0)])
def test_a_task_for_another_client_or_with_an_impossible_weight_is_refused(client: int, weight: float, tmp_path: Path) -> None:
    nodes, told, _ = asked(tmp_path)
    with pytest.raises(WireError):
        nodes.node(2).answer(round_bytes(told), task_bytes(TaskMessage("r", 0, client, weight)))


def answers(nodes: Nodes, told: RoundMessage, rounds: list[int]) -> list[type]:
    """What kinds of answers these rounds get, each asked with another model."""
    kinds, model = [], told.released.model
    for factor, number in enumerate(rounds, 1):
        lie = replace(told, released=replace(told.released, round=number, model=model * factor))
        task = TaskMessage("r", number, 2, 1.0)
        kinds.append(type(read_reply(nodes.node(2).answer(round_bytes(lie), task_bytes(task)), task, len(model))))
    return kinds


def test_a_client_that_charges_each_release_answers_as_many_rounds_as_are_planned_however_they_are_asked(tmp_path: Path) -> None:
    nodes, told, _ = asked(tmp_path, "server")
    assert answers(nodes, told, [0] * 5) == [ReleaseMessage] * 3 + [RefusalMessage] * 2


def test_where_uploads_are_summed_a_round_is_answered_once_and_the_same_request_alone_again(tmp_path: Path) -> None:
    """Rounds may differ in price, and each was charged once, in advance."""
    nodes, told, task = asked(tmp_path, "aggregate")
    request = round_bytes(told), task_bytes(task)
    first = nodes.node(2).answer(*request)
    assert answers(nodes, told, [0, 2, 2, 1, 0]) == [ReleaseMessage] * 2 + [RefusalMessage] * 3
    assert nodes.node(2).answer(*request) == first
    assert nodes.node(2).states.before(3).answers == 2


def test_an_error_in_training_says_nothing_to_the_server(tmp_path: Path) -> None:
    nodes, told, task = asked(tmp_path)

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the diagnosis is in here")

    nodes.context = replace(nodes.context, policy=Broken())  # type: ignore[arg-type]
    answer = nodes.node(2).answer(round_bytes(told), task_bytes(task))
    assert b"diagnosis" not in answer
    assert b"an error at the client" in answer


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (BudgetExhausted("/home/alice: 16.6814% is asked"), b"the release costs more privacy than this client"),
        (LedgerError("/home/alice: 16.6814% is asked"), b"own record of the run does not allow it"),
        (ConfigError("the planned rounds"), b"the planned rounds"),
    ],
)
def test_a_refusal_tells_the_server_nothing_of_the_lifetime_and_the_log_all(
    problem: FedveilError, said: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, told, task = asked(tmp_path)

    class Refusing:
        def charge_all(self, entries: Any) -> None:
            raise problem

    node = nodes.node(2)
    node = replace(node, context=replace(node.context, door=replace(node.context.door, ledger=Refusing())))  # type: ignore[arg-type]
    answer = node.answer(round_bytes(told), task_bytes(task))
    assert said in answer
    assert b"alice" not in answer
    assert b"%" not in answer
    assert str(problem) in caplog.text


def test_two_generations_are_kept_and_a_third_goes(tmp_path: Path) -> None:
    states = ClientStates(tmp_path / "c")
    for number in range(4):
        states.keep(
            number, Generation(private={"n": number}, request=str(number), answer=b"x", rounds=number + 1, answers=number + 1)
        )
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["2.safetensors", "3.safetensors"]
    assert states.before(3).private == {"n": 2}
    assert states.answered(3, "3") == b"x"
    assert states.answered(3, "other") is None
    states.keep(3, replace(states.before(3), rounds=4, answers=5))
    assert states.before(4).answers == 5


def fuzzed(messages: int, folder: Path) -> int:
    nodes, told, task = asked(folder)
    nodes.rounds = 10**9
    real, rng, refused = (round_bytes(told), task_bytes(task)), np.random.default_rng(2), 0
    for _ in range(messages):
        which = int(rng.integers(2))
        content = bytearray(real[which])
        for _ in range(rng.integers(1, 8)):
            where, kind = int(rng.integers(min(len(content), 600))), rng.integers(3)
            if kind == 0:
                content[where] = int(rng.integers(256))
            elif kind == 1 and len(content) > 40:
                del content[where : where + int(rng.integers(1, 5))]
            else:
                content[where:where] = bytes(rng.integers(0, 256, 3, dtype=np.uint8))
        parts = [bytes(content) if place == which else part for place, part in enumerate(real)]
        try:
            read_reply(nodes.node(2).answer(*parts), task, len(told.released.model))
        except WireError:
            refused += 1
    return refused


def test_no_fuzzed_round_breaks_a_client(tmp_path: Path) -> None:
    assert fuzzed(300, tmp_path) > 200


@pytest.mark.slow
def test_ten_thousand_fuzzed_rounds(tmp_path: Path) -> None:
    assert fuzzed(10_000, tmp_path) > 7000
