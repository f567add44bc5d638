"""`dp_mod`: what a train function answers leaves through the door, and nothing else of it."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs flwr (pip install 'fedveil[flower]')")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import message_size_mod
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedProx

import fedveil as fv
from fedveil.accounting.types import Gaussian
from fedveil.deploy.dp_mod import SCOPE, DpMod, dp_mod
from fedveil.errors import ConfigError
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.population_budget import lifetime_budget
from flower_apps import AppGrid, added, answer, arrays, context, instruction, model, values

LOUD: dict[str, Any] = {"clip": 1.0, "epsilon": 1e6, "delta": 1e-5, "rounds": 10}
"""Noise of about 0.01, so that what leaves can be read."""


def mod(folder: Path, **changed: Any) -> DpMod:
    return dp_mod(**{**LOUD, "ledger": folder, **changed})


def rows(folder: Path, name: str = "client-0") -> list[Any]:
    path = folder / f"{name}.sqlite"
    if not path.exists():
        return []
    with Ledger.open(path) as ledger:
        return [entry for _, _, entry in ledger.entries()]


def moved(reply: Message) -> dict[str, Any]:
    before = {name: array.numpy() for name, array in model().items()}
    return {name: value - before[name] for name, value in values(reply).items()}


def test_the_update_is_clipped_noised_and_charged(tmp_path: Path) -> None:
    reply = mod(tmp_path)(instruction(), context(), added(5.0))
    step = moved(reply)
    whole = np.concatenate([step[n].reshape(-1) for n in ("w", "b", "v")])
    assert np.allclose(whole, 1 / math.sqrt(11), atol=0.1)
    assert step["b"].shape == ()
    assert step["n"].tolist() == [0, 0]
    (row,) = rows(tmp_path)
    assert (row.whole_clip, row.dimension, row.client, row.view, row.run) == (1.0, 11, 0, "server", "flower/1")
    assert isinstance(row.event, Gaussian)
    assert row.grid is not None


def test_small_updates_are_not_scaled_and_noise_is_fresh(tmp_path: Path) -> None:
    quiet = mod(tmp_path, epsilon=1e9)
    first, second = (moved(quiet(instruction(), context(), added(0.1))) for _ in range(2))
    assert np.allclose(first["w"], 0.1, atol=5e-3)
    assert (first["w"] != second["w"]).mean() > 0.5  # on the grid of float32 one may come twice


def test_the_noise_is_that_of_the_matching_configuration(tmp_path: Path) -> None:
    config = fv.configure(
        method={"name": "dp-fedavg", "clip": 2.0},
        privacy={"epsilon": 8.0, "delta": 1e-5, "view": "server", "allow_vacuous_delta": True},
        training={"rounds": 7},
    )
    statement = fv.certify(config)
    made = mod(tmp_path, clip=2.0, epsilon=8.0, rounds=7)
    assert made.plan.noise_std == statement.noise_multiplier * 2.0
    whole = arrays(w=np.zeros(2000, np.float32))
    drawn = values(made(instruction(whole), context(), added(0.0)))["w"]
    assert 0.9 < drawn.std() / made.plan.noise_std < 1.1


def test_a_release_beyond_the_budget_is_refused_before_training_and_not_charged(tmp_path: Path) -> None:
    once, trained = mod(tmp_path, epsilon=2.0, rounds=1), []

    def train(message: Message, context: Any) -> Message:
        trained.append(1)
        return added(1.0)(message, context)

    assert not once(instruction(), context(), train).has_error()
    second = once(instruction(), context(), train)
    assert second.error.reason == "refused: the budget of this client is spent"
    assert len(trained) == len(rows(tmp_path)) == 1
    assert not once(instruction(), context(1), train).has_error()  # another client of the simulation
    assert not mod(tmp_path / "other", epsilon=2.0, rounds=1)(instruction(), context(None), train).has_error()
    assert len(rows(tmp_path / "other", "client")) == 1


def raising(message: Message, context: Any) -> Message:
    raise ValueError("the diagnosis is in here")


def leaving(message: Message, context: Any) -> Message:
    raise SystemExit("the diagnosis is in here")


def cancelled(message: Message, context: Any) -> Message:
    raise asyncio.CancelledError("the diagnosis is in here")


def on_another_device(message: Message, context: Any) -> Message:
    torch.set_default_device("meta")
    raise ValueError("the diagnosis is in here")


def failing(message: Message, context: Any) -> Message:
    return Message(Error(code=4242, reason="the diagnosis is in here"), reply_to=message)


def shown(**changed: Any) -> Any:
    """A train function that answers with these arrays in the place of its own."""

    def train(message: Message, context: Any) -> Message:
        whole = {name: array.numpy() for name, array in message.content["arrays"].items()} | changed
        return answer(message, arrays(**{name: value for name, value in whole.items() if value is not None}))

    return train


def two_records(message: Message, context: Any) -> Message:
    reply = added(1.0)(message, context)
    reply.content["more"] = model()
    return reply


UNFIT = [
    raising,
    leaving,
    cancelled,
    on_another_device,
    failing,
    two_records,
    lambda message, context: None,
    lambda message, context: "text",
    shown(w=np.full((2, 3), np.nan, np.float32)),
    shown(w=np.full((2, 3), np.inf, np.float32)),
    shown(w=np.full((2, 3), 1e30, np.float32)),
    shown(w=np.zeros((3, 2), np.float32)),
    shown(w=np.zeros((1, 3), np.float32)),
    shown(w=np.zeros((2, 3), np.int64)),
    shown(w=np.zeros((2, 3), np.complex64)),
    shown(w=None),
    shown(b=np.zeros(1, np.float32)),
]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What a train function sets for the whole process is put back."""
    with np.errstate():
        yield
    torch.set_default_device("cpu")


@pytest.mark.parametrize("train", UNFIT)
def test_what_cannot_leave_is_a_noised_zero_and_looks_like_any_other_reply(train: Any, tmp_path: Path) -> None:
    reply = mod(tmp_path)(instruction(), context(), train)
    honest = mod(tmp_path)(instruction(), context(1), added(0.0))
    assert all(0 < abs(part).max() < 0.2 for name, part in moved(reply).items() if name in "wv")
    assert b"diagnosis" not in repr(reply).encode()
    for one in (reply, honest):
        assert list(one.content) == ["arrays", "metrics"]
        assert dict(one.content["metrics"]) == {"num-examples": 1}
    same = [[(n, a.dtype, a.shape, a.stype, len(a.data)) for n, a in one.content["arrays"].items()] for one in (reply, honest)]
    assert same[0] == same[1]
    assert len(rows(tmp_path)) == 1


def test_errors_that_an_app_wants_raised_do_not_tell_of_an_update(tmp_path: Path) -> None:
    """The largest number of 16 bits, to which noise is added, becomes infinite."""
    record = arrays(w=np.full(64, 65504, np.float16))

    def strict(message: Message, context: Any) -> Message:
        np.seterr(all="raise")
        return added(-1e-3)(message, context)

    quiet = mod(tmp_path, clip=1e4, epsilon=1e3)
    assert np.isinf(values(quiet(instruction(record), context(), strict))["w"]).any()


def talkative(message: Message, context: Any) -> Message:
    """Everything that a train function can put into a reply beside its arrays."""
    told = {f"patient-{i}": float(i) for i in range(3)}
    message.content["arrays"]["w"] = Array(np.full((2, 3), 1e9, np.float32))
    message.metadata.group_id = "the diagnosis"
    message.metadata.ttl = 123.0
    context.state["told"] = MetricRecord(told)
    old = {name: array.numpy() for name, array in model().items()}
    renamed = {n: np.asfortranarray(old[n].astype(np.float64) + 0.01) for n in reversed(list(old)) if n != "n"}
    record = arrays(**renamed, n=np.array([77, 78], np.int64), diagnosis=np.ones(3, np.float32))
    content = {
        "diagnosis": record,
        "m": MetricRecord({"num-examples": 31337, **told, "list": [1.0, 2.0]}),
        "c": ConfigRecord({"diagnosis": "in here"}),
    }
    reply = Message(RecordDict(content), reply_to=message, ttl=99.0)
    reply.metadata.group_id = "the diagnosis"
    return reply


def test_nothing_passes_beside_the_arrays(tmp_path: Path) -> None:
    message = instruction()
    reply = mod(tmp_path)(message, context(), talkative)
    step = moved(reply)
    assert list(step) == ["w", "b", "v", "n"]
    assert abs(step["w"]).max() < 0.2  # of the instruction as it came, not as the function left it
    assert step["n"].tolist() == [0, 0]
    assert {name: array.dtype for name, array in reply.content["arrays"].items()} == {
        name: array.dtype for name, array in model().items()
    }
    assert dict(reply.content["metrics"]) == {"num-examples": 1}
    assert "diagnosis" not in repr(reply)
    assert "31337" not in repr(reply)
    assert reply.metadata.ttl > 10_000


def test_the_replys_metadata_are_older_than_the_training(tmp_path: Path) -> None:
    began: list[float] = []

    def train(message: Message, context: Any) -> Message:
        began.append(time.time())
        return added(1.0)(message, context)

    assert mod(tmp_path)(instruction(), context(), train).metadata.created_at <= began[0]


@pytest.mark.parametrize("kind", ["evaluate", "query", "query.state"])
def test_other_messages_are_refused_where_the_mod_is_for_the_whole_app(kind: str, tmp_path: Path) -> None:
    reply = mod(tmp_path)(instruction(kind=kind), context(), added(1.0))
    assert reply.error.reason.startswith("refused: dp_mod releases what a train function trained")
    assert not rows(tmp_path)


def test_in_an_app_with_an_action_and_for_the_whole_app(tmp_path: Path) -> None:
    app = ClientApp(mods=[mod(tmp_path)])
    app.train("more")(added(5.0))
    app.evaluate()(added(5.0))
    # mods of a whole app are those that its functions were registered with
    reply = app(instruction(kind="train.more"), context())
    assert abs(moved(reply)["b"]) < 0.5
    assert app(instruction(kind="evaluate"), context()).has_error()


@pytest.mark.parametrize(
    "content",
    [
        {"config": ConfigRecord({"server-round": 1})},
        {"arrays": model(), "more": model()},
        {"arrays": arrays(n=np.array([1]))},
        {"arrays": ArrayRecord()},
    ],
)
def test_an_instruction_without_a_model_is_refused(content: Any, tmp_path: Path) -> None:
    message = Message(RecordDict(content), dst_node_id=7, message_type="train")
    assert mod(tmp_path)(message, context(), added(1.0)).error.reason.startswith("refused: the instruction")
    assert not rows(tmp_path)


@pytest.mark.parametrize("number", [0, -5, 2**62, 1.5, "1", True])
def test_the_servers_number_of_the_round_is_a_label(number: Any, tmp_path: Path) -> None:
    message = instruction()
    message.content["config"]["server-round"] = number
    assert not mod(tmp_path)(message, context(), added(1.0)).has_error()
    assert [row.round for row in rows(tmp_path)] == [0]


def test_counts_that_became_floats_and_named_buffers_stay(tmp_path: Path) -> None:
    record = arrays(w=np.zeros(2, np.float32), **{"bn.num_batches_tracked": np.float64(7.0), "bn.ids": np.arange(2.0)})
    reply = mod(tmp_path, untouched=("num_batches_tracked", "ids"))(instruction(record), context(), added(1.0))
    assert values(reply)["bn.num_batches_tracked"] == 7.0
    assert values(reply)["bn.ids"].tolist() == [0.0, 1.0]
    assert [row.dimension for row in rows(tmp_path)] == [2]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_arrays_keep_their_type(dtype: Any, tmp_path: Path) -> None:
    reply = mod(tmp_path)(instruction(arrays(w=np.zeros((2, 2), dtype))), context(), added(0.1))
    assert values(reply)["w"].dtype == dtype


def test_a_model_with_nan_or_a_lost_ledger_tells_nothing(tmp_path: Path) -> None:
    broken = instruction(arrays(w=np.array([np.nan, 1.0], np.float32)))
    words = mod(tmp_path)(broken, context(), added(1.0)).error.reason
    assert not rows(tmp_path)
    assert not mod(tmp_path)(instruction(), context(), added(1.0)).has_error()
    (tmp_path / "client-0.sqlite").unlink()
    refused = mod(tmp_path)(instruction(), context(), added(1.0))
    assert refused.error.reason == words
    assert refused.error.reason == "refused: the instruction, or the ledger of this client, is not what dp_mod needs; " + (
        "the client's own log has the reason"
    )
    assert str(tmp_path) not in refused.error.reason


def test_other_numbers_than_those_of_the_ledger_are_refused(tmp_path: Path) -> None:
    mod(tmp_path)(instruction(), context(), added(1.0))
    assert mod(tmp_path, epsilon=2e6)(instruction(), context(), added(1.0)).has_error()
    assert len(rows(tmp_path)) == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ledger": "here"}, "absolute path"),
        ({"epsilon": 0.0}, "epsilon = 0.0"),
        ({"epsilon": math.inf}, "epsilon = inf"),
        ({"delta": 1.0}, "delta = 1 "),
        ({"rounds": 0}, "rounds = 0"),
        ({"rounds": 1.5}, "rounds = 1.5"),
        ({"clip": -1.0}, "clip = -1.0 is not possible"),
        ({"clip": 1e300}, "clip = 1e.300 is not possible"),
        ({"clip": 1e-300}, "clip = 1e-300 is not possible"),
    ],
)
def test_impossible_numbers_are_refused_at_once(changed: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        mod(tmp_path, **changed)


def test_a_mod_travels_to_a_worker(tmp_path: Path) -> None:
    there = pickle.loads(pickle.dumps(mod(tmp_path)))
    assert not there(instruction(), context(), added(1.0)).has_error()


def warned(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


INTEGERS = {
    "position_ids": np.arange(6),
    "mask": np.array([True, False, True]),
    "small": np.array([-128, 0, 127], np.int8),
    "pixels": np.array([[0, 255]], np.uint8),
    "long": np.array([2**62, -(2**63), 2**63 - 1]),
    "count": np.int32(7),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("strategy", [FedAvg, FedAdam, FedAvgM, FedProx, FedMedian])
def test_integers_come_back_as_they_came_in_every_round(strategy: Any, listed: bool, tmp_path: Path) -> None:
    """Whatever a strategy makes of them, and also to a client that is asked for the first time in a later round."""
    whole = {"w": np.zeros(4, np.float32), **INTEGERS}
    names = [str(i) for i in range(len(whole))] if listed else list(whole)
    sent: list[Any] = []

    def train(message: Message, context: Context) -> Message:
        came = {n: a.numpy() for n, a in message.content["arrays"].items()}
        sent.append(came)
        return answer(message, arrays(**(came | {names[0]: came[names[0]] + np.float32(0.1)})))

    app = ClientApp(mods=[mod(tmp_path, epsilon=1e9)])
    app.train()(train)
    options = {"proximal_mu": 0.5} if strategy is FedProx else {}
    grid, start = AppGrid(app, 3), arrays(**dict(zip(names, whole.values(), strict=True)))
    made = strategy(fraction_evaluate=0.0, **options).start(grid, start, 4)
    found = {name: array.numpy() for name, array in made.arrays.items()}
    for name, value in zip(names[1:], list(whole.values())[1:], strict=True):
        assert np.allclose(found[name].astype(np.float64), value.astype(np.float64), rtol=1e-9, atol=1e-9)  # Flower rounds
    assert len(sent) == 12
    for came in sent:
        for name, value in zip(names[1:], list(whole.values())[1:], strict=True):
            assert came[name].dtype == np.asarray(value).dtype
            assert np.array_equal(came[name], value)
    assert {row.dimension for row in rows(tmp_path)} == {4}
    late = values(app(instruction(made.arrays, **{"server-round": 5}), context(5, 105)))
    assert all(np.array_equal(late[name], found[name]) for name in names[1:])
    assert (late[names[0]] != found[names[0]]).any()


def test_integers_that_floats_cannot_hold_are_not_made_others(tmp_path: Path) -> None:
    quiet, first = mod(tmp_path), {"w": np.zeros(2, np.float32), "long": INTEGERS["long"]}
    assert values(quiet(instruction(arrays(**first)), context(), added(0.0)))["long"].tolist() == INTEGERS["long"].tolist()
    for came in (
        np.array([0.5, 1, 2]),
        np.array([np.nan, 1, 2]),
        np.array([1e300, 1, 2]),
        np.array([2.0**62, -(2.0**63), 2.0**64]),
    ):
        back = values(quiet(instruction(arrays(w=np.ones(2, np.float32), long=came)), context(), added(0.0)))["long"]
        assert np.array_equal(back, came, equal_nan=True)


def test_integers_of_any_size_go_back_exactly_and_those_that_a_strategy_changed_as_changed(tmp_path: Path) -> None:
    """Above 2^53 a float64 holds not every integer, so that they came back as floats, with other digits."""
    quiet = mod(tmp_path, epsilon=1e9)
    long = np.array([2**53 + 1, 2**63 - 1, -(2**62) - 1, 0, 1000], np.int64)
    for came, back in (
        (long, long),
        (long * np.float64(1 / 3) * 3, long),
        (np.array([2.0**53, 2.0**63, -(2.0**62), 1, 1001]), np.array([*long[:3], 1, 1001])),
        (np.array([2.0**52, 2.0**63, 7, 0, 1000]), np.array([2**52, 2**63 - 1, 7, 0, 1000])),
    ):
        found = values(quiet(instruction(arrays(w=np.zeros(2, np.float32), long=came)), context(), added(0.0)))["long"]
        assert found.dtype == np.int64
        assert found.tolist() == back.tolist()


def test_a_folder_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It has no values of the first time."""
    whole = arrays(w=np.zeros(2, np.float32), n=np.array([3, 4]))
    assert not mod(tmp_path)(instruction(whole), context(), added(0.0)).has_error()
    (file,) = tmp_path.glob("*.models.json")
    (models,) = json.loads(file.read_text()).values()
    file.write_text(json.dumps({"1": [{name: kind[:3] for name, kind in one.items()} for one in models]}))
    averaged = arrays(w=np.zeros(2, np.float32), n=np.array([3.0, 4.0]))
    assert values(mod(tmp_path)(instruction(averaged), context(), added(0.0)))["n"].dtype == np.int64


def test_a_model_of_whole_numbers_is_trained_when_nobody_took_part_before(tmp_path: Path) -> None:
    """Zeros to begin with, in double precision: round 2 is the first that a client sees."""
    reply = mod(tmp_path)(instruction(arrays(w=np.zeros(3), b=np.ones(2)), **{"server-round": 2}), context(), added(5.0))
    assert (values(reply)["w"] != 0).all()
    assert [row.dimension for row in rows(tmp_path)] == [5]


def of(**changed: Any) -> Any:
    """A train function that moves `w` by 0.1 and answers with these arrays in the place of what came."""

    def train(message: Message, context: Context) -> Message:
        came = {name: array.numpy() for name, array in message.content["arrays"].items()}
        return answer(message, arrays(**(came | {"w": came["w"] + np.float32(0.1)} | changed)))

    return train


@pytest.mark.parametrize("hole", [-np.inf, np.inf, np.nan])
def test_a_constant_buffer_of_no_finite_numbers_goes_back_as_it_came(hole: float, tmp_path: Path) -> None:
    quiet, buffer = mod(tmp_path, epsilon=1e9), np.array([0, hole], np.float32)
    w = np.zeros(4, np.float32)
    for round in (1, 2, 3):
        reply = quiet(instruction(arrays(w=w, mask=buffer), **{"server-round": round}), context(), of())
        assert np.array_equal(values(reply)["mask"], buffer, equal_nan=True)
        w = values(reply)["w"]
    assert w == pytest.approx(np.full(4, 0.3), abs=0.02)
    assert [row.dimension for row in rows(tmp_path)] == [4] * 3
    later = quiet(instruction(arrays(w=w, mask=buffer)), context(), of(mask=np.zeros(2, np.float32)))
    assert np.array_equal(values(later)["mask"], buffer, equal_nan=True)  # a refusal would tell something by now


@pytest.mark.parametrize("after", [[0, 1], [0.1, -np.inf], [0, np.nan]])
def test_a_buffer_that_training_fills_is_refused_before_the_first_charge(
    after: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained: list[int] = []

    def train(message: Message, context: Context) -> Message:
        trained.append(1)
        return of(lowest=np.array(after, np.float32))(message, context)

    came = arrays(w=np.zeros(4, np.float32), lowest=np.array([0, -np.inf], np.float32))
    for function in (train, train, of()):
        assert mod(tmp_path)(instruction(came), context(), function).error.reason.startswith("refused: the instruction")
    assert not rows(tmp_path)
    assert len(trained) == 1  # one answer tells one thing
    assert "NaN or infinite values in ['lowest'], and training changed" in warned(caplog)


def test_a_model_that_diverged_is_refused_before_it_trains_and_is_charged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = mod(tmp_path)
    assert not quiet(instruction(arrays(w=np.zeros(2, np.float32))), context(), of()).has_error()
    assert quiet(instruction(arrays(w=np.array([1, np.nan], np.float32))), context(), of()).has_error()
    assert len(rows(tmp_path)) == 1
    assert "NaN or infinite values in ['w'], which it did not have before" in warned(caplog)


def test_complex_parameters_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert mod(tmp_path)(instruction(arrays(w=np.zeros(2, np.complex64))), context(), of()).has_error()
    assert "complex parameters" in warned(caplog)
    assert not rows(tmp_path)


def test_an_update_that_counts_as_zero_is_said_with_what_is_public(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mod(tmp_path, epsilon=8.0)(instruction(), context(), added(1e9))
    assert "the noise of each release has norm 6.3 (1.9 on each of 11 numbers)" in warned(caplog)
    assert "an update at most 1, the clip" in warned(caplog)
    assert "above 1e+06; a noised zero is released in its place, and charged (the model" in warned(caplog)
    caplog.clear()
    mod(tmp_path, epsilon=8.0)(instruction(), context(), shown(w=None))
    assert "['w', 'b', 'v'] were sent, and {'arrays': ['b', 'v', 'n']} came back (without ['w'])" in warned(caplog)
    assert "has norm 6.3 (1.9 on each of 11 numbers)" not in warned(caplog)  # once a run


def adding(message: Message, context: Context, call_next: Any) -> Message:
    reply = call_next(message, context)
    reply.content["own"] = MetricRecord({"examples": 137})
    return reply


def evaluated(message: Message, context: Context) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.9})}), reply_to=message)


@pytest.mark.parametrize("place", ["function", "second", "both sides"])
def test_mods_outside_are_named_when_they_can_first_add_something(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private = mod(tmp_path)
    app = ClientApp(mods={"function": [adding], "second": [adding, private], "both sides": [adding, message_size_mod]}[place])
    app.train(mods=[] if place == "second" else [private, adding])(added(0.1))
    assert list(app(instruction(), context()).content) == ["arrays", "metrics", "own"]
    named = "adding, message_size_mod" if place == "both sides" else "adding"
    assert sorted(warned(caplog).partition(": outside dp_mod")[0].splitlines()[-1].split(", ")) == named.split(", ")
    caplog.clear()
    app(instruction(), context())
    assert "outside dp_mod" not in warned(caplog)


def test_first_in_the_whole_app_nothing_is_outside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = ClientApp(mods=[mod(tmp_path, epsilon=1e9), adding])
    app.train()(added(0.1))
    app.train("more", mods=[adding])(added(0.1))
    app.evaluate()(evaluated)
    app.query("state")(evaluated)
    for kind in ("train", "train.more"):
        assert list(app(instruction(kind=kind), context()).content) == ["arrays", "metrics"]
    for kind in ("evaluate", "query.state"):
        assert app(instruction(kind=kind), context()).has_error()
    assert not warned(caplog)


def test_functions_that_answer_without_noise_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = ClientApp()
    app.train(mods=[mod(tmp_path)])(added(0.1))
    app.evaluate()(evaluated)
    app.query("state", mods=[adding])(evaluated)
    app.query("count", mods=[mod(tmp_path)])(evaluated)
    app(instruction(), context())
    assert "evaluate.default, query.state: registered without dp_mod" in warned(caplog)


def test_a_train_function_without_the_mod_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = ClientApp()
    app.train(mods=[mod(tmp_path)])(added(0.1))
    app.train("more", mods=[adding])(added(0.1))
    assert app(instruction(), context()).has_error()
    assert not rows(tmp_path)
    assert "train.more: registered without dp_mod" in warned(caplog)


def test_a_mod_for_the_app_and_its_function_releases_once(tmp_path: Path) -> None:
    private = mod(tmp_path, rounds=3)
    app = ClientApp(mods=[private])
    app.train(mods=[private])(added(0.1))
    assert not any(app(instruction(), context()).has_error() for _ in range(3))
    assert app(instruction(), context()).has_error()
    assert len(rows(tmp_path)) == 3


def node(number: int, run: int = 1, **config: Any) -> Context:
    return Context(
        run_id=run,
        node_id=number,
        node_config={key.replace("_", "-"): v for key, v in config.items()},
        state=RecordDict(),
        run_config={},
    )


OTHERS = {
    "another part": node(7, partition_id=1),
    "another run": node(7, run=2, partition_id=1),
    "another node": node(8, partition_id=1),
    "another part of so many": node(7, partition_id=1, num_partitions=3),
    "another node of so many": node(8, partition_id=1, num_partitions=3),
    "no part": node(8),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_is_one_lifetime_whatever_the_node_is_called(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, copy, own = tmp_path / "own", tmp_path / "copy", node(7, partition_id=0)
    once = mod(folder, epsilon=8.0, rounds=2)
    assert [once(instruction(), own, added(0.1)).has_error() for _ in range(3)] == [False, False, True]
    assert once(instruction(), OTHERS[name], added(0.1)).has_error()
    assert sum(len(rows(folder, path.stem)) for path in folder.glob("*.sqlite")) == 2
    assert f"{folder} is the lifetime of one client, kept as client-0" in warned(caplog)
    shutil.copytree(folder, copy)
    copied = mod(copy, epsilon=8.0, rounds=2)
    assert copied(instruction(), own, added(0.1)).has_error()
    assert copied(instruction(), OTHERS[name], added(0.1)).has_error()


@pytest.mark.parametrize("loss", ["folder", "ledger", "older copy"])
def test_a_node_remembers_what_its_folder_has_lost(loss: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, copy, own = tmp_path / "own", tmp_path / "copy", context()
    app = ClientApp(mods=[mod(folder, epsilon=8.0, rounds=2)])
    app.train()(added(0.1))
    assert not app(instruction(), own).has_error()
    shutil.copytree(folder, copy)
    assert not app(instruction(), own).has_error()
    if loss == "ledger":
        for file in folder.glob("client-0.sqlite*"):
            file.unlink()
    else:
        shutil.rmtree(folder)
    if loss == "older copy":
        shutil.copytree(copy, folder)
    assert app(instruction(), own).has_error()
    assert f"{folder / 'client-0.sqlite'} has lost releases of this run, or is gone" in warned(caplog)


def test_ledgers_that_are_there_go_on(tmp_path: Path) -> None:
    """Those that earlier versions gave to several nodes of one machine."""
    for number in (0, 1):
        lifetime_budget(tmp_path / f"client-{number}.sqlite", 8.0, 1e-5, SCOPE)
    once = mod(tmp_path, epsilon=8.0, rounds=1)
    found = [once(instruction(), node(7 + i, partition_id=i), added(0.1)).has_error() for i in (0, 1, 2, 0)]
    assert found == [False, False, True, True]


def test_nodes_of_a_simulation_have_lifetimes_of_their_own(tmp_path: Path) -> None:
    once = mod(tmp_path, epsilon=8.0, rounds=1)
    assert [once(instruction(), context(i), added(0.1)).has_error() for i in (0, 1, 2, 0, 2)] == [False] * 3 + [True] * 2
    other = Context(
        run_id=2, node_id=99, node_config={"partition-id": 1, "num-partitions": 10}, state=RecordDict(), run_config={}
    )
    assert once(instruction(), other, added(0.1)).has_error()  # the same part in another run
    cut_anew = Context(
        run_id=2, node_id=98, node_config={"partition-id": 11, "num-partitions": 20}, state=RecordDict(), run_config={}
    )
    assert once(instruction(), cut_anew, added(0.1)).has_error()


def test_two_nodes_that_share_a_lifetime_read_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    once = mod(tmp_path, epsilon=8.0, rounds=2)
    assert [once(instruction(), node(i % 2), added(0.1)).has_error() for i in range(4)] == [False, False, True, True]
    assert "all nodes, runs and apps that use this file share what it allows" in warned(caplog)
