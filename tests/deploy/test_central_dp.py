"""`CentralDP` round strategies of Flower: what they are shown, what is released and charged, and what a stranger verifies."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flwr (pip install 'fedveil[flower]')")

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Bulyan, FedAdam, FedAvg, FedProx, QFedAvg, Strategy

import fedveil as fv
from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.deploy.central_dp import CentralDP
from fedveil.errors import BudgetExhausted, ConfigError
from fedveil.experiment.published_copy import publish
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.population_budget import create_budget, spending
from flower_apps import AppGrid, added, answer, arrays, context, model

CLEAR: dict[str, Any] = {"clip": 1.0, "clients": 8, "rate": 1.0, "rounds": 2, "noise_multiplier": 1e-4, "delta": 1e-2}
"""Next to no noise, so that what the strategy makes of the mean can be read."""


def app(train: Any = None) -> ClientApp:
    made = ClientApp()
    made.train()(train or added(0.1))
    made.evaluate()(lambda message, context: answer(message, model(), loss=1.0))
    return made


def central(folder: Path, strategy: Strategy | None = None, **changed: Any) -> CentralDP:
    return CentralDP(strategy or FedAvg(), **{**CLEAR, "out": folder / "run", **changed})


def values(record: ArrayRecord | None) -> dict[str, Any]:
    assert record is not None
    return {name: array.numpy() for name, array in record.items()}


def rows(folder: Path) -> list[Any]:
    with Ledger.open(folder / "run" / "ledger.sqlite", read_only=True) as ledger:
        return [entry for _, _, entry in ledger.entries()]


def private(folder: Path, name: str = "history") -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "run" / "private" / f"{name}.csv").read_text().splitlines()))


@pytest.mark.parametrize(("epsilon", "rate"), [(8.0, 0.5), (1.0, 0.25), (4.0, 1.0)])
def test_epsilon_is_that_of_certify_for_the_matching_configuration(epsilon: float, rate: float, tmp_path: Path) -> None:
    made = central(tmp_path, rate=rate, rounds=3, epsilon=epsilon, noise_multiplier=None)
    made.start(AppGrid(app(), 8), model(), 3)
    config = fv.configure(
        data={"partition": {"kind": "iid", "clients": 8}},
        method={"name": "dp-fedavg", "clip": 1.0},
        training={"rounds": 3, "clients_per_round": round(8 * rate)},
        privacy={"epsilon": epsilon, "delta": 1e-2},
    )
    wanted, found = fv.certify(config), json.loads((tmp_path / "run" / "statement.json").read_text())
    assert found["views"][1]["proven"]["epsilon"] == wanted.proven.epsilon
    assert found["noise_multiplier"] == wanted.noise_multiplier
    assert wanted.noise_multiplier is not None
    assert {row.noise_std for row in rows(tmp_path)} == {(wanted.noise_multiplier,) * 3}
    (kind,) = {row.event for row in rows(tmp_path)}
    assert getattr(kind, "rate", 1.0) == rate


def test_a_stranger_verifies_the_run(tmp_path: Path) -> None:
    made = central(tmp_path, rate=0.5, epsilon=8.0, noise_multiplier=None)
    made.start(AppGrid(app(), 8), model(), 2)
    found = fv.verification(tmp_path / "run")
    assert found.outcome == "verified", [f for f in found.findings if f.kind != "verified"]
    (tmp_path / "run" / "flower.md").write_text("clients were asked nothing else")
    assert fv.verification(tmp_path / "run").outcome == "contradicted"


def test_its_ledger_tells_nothing_of_private_files(tmp_path: Path) -> None:
    """No name, since failures.csv says that a client failed, and no digest that confirms a guess."""
    closed = []
    for broken in (set[int](), {101}):
        folder, grid = tmp_path / f"{len(broken)}", AppGrid(app(), 8)
        grid.fails = broken
        central(folder, noise_multiplier=1.0).start(grid, model(), 2)
        assert (folder / "run" / "private" / "failures.csv").exists() == bool(broken)
        with Ledger.open(folder / "run" / "ledger.sqlite", read_only=True) as ledger:
            assert ledger.closing is not None
            files = {**ledger.meta["files"], **ledger.closing[0]["files"]}
        closed.append(set(files))
        own = [file for file in (folder / "run" / "private").iterdir() if file.name != "salt"]
        assert not {hashlib.sha256(file.read_bytes()).hexdigest() for file in own} & set(files.values())
    assert closed[0] == closed[1]


@pytest.mark.parametrize("kind", [FedAvg, FedProx, FedAdam])
def test_the_strategy_takes_the_same_step_as_without(kind: Any, tmp_path: Path) -> None:
    """Clients that all move the model alike, within the clip: the mean is that of the strategy alone."""
    options = {"proximal_mu": 0.5} if kind is FedProx else {}
    seen: list[Any] = []

    def train(message: Message, context: Any) -> Message:
        seen.append(dict(message.content["config"]))
        return added(0.1)(message, context)

    alone = kind(**options).start(AppGrid(app(train), 8), model(), 2)
    made = central(tmp_path, kind(**options)).start(AppGrid(app(train), 8), model(), 2)
    for name, value in values(made.arrays).items():
        if name == "n":
            assert (value.dtype, value.tolist()) == (np.int64, [3, 4])  # plain FedAvg returns floats, and what clients counted
        else:
            assert np.allclose(value, values(alone.arrays)[name], atol=2e-3)
            assert value.dtype == np.float32
    assert ({"proximal-mu"} <= seen[0].keys()) == (kind is FedProx)


class Watching(FedAvg):
    """A strategy that writes down all that it is shown."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.shown: list[Any] = []

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Iterable[Message]:
        self.shown.append([name for name in dir(grid) if not name.startswith("_")])
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        self.shown.append(list(replies))
        return super().aggregate_train(server_round, self.shown[-1])


@pytest.mark.few(2)
@pytest.mark.parametrize(("rate", "broken"), [(1.0, 0), (1.0, 8), (0.125, 0), (0.5, 3)])
def test_a_strategy_sees_one_reply_whoever_took_part(
    rate: float, broken: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, grid = Watching(), AppGrid(app(), 8)
    grid.fails, grid.silent = {100 + i for i in range(broken) if i % 2}, {100 + i for i in range(broken) if not i % 2}
    with caplog.at_level(logging.INFO):
        result = central(tmp_path, strategy, rate=rate, rounds=4, noise_multiplier=1.0).start(grid, model(), 4)
    assert [name for shown in strategy.shown[::2] for name in shown] == ["get_node_ids"] * 4
    for (reply,) in strategy.shown[1::2]:
        assert dict(reply.content["metrics"]) == {"num-examples": 1}
        assert list(reply.content) == ["arrays", "metrics"]
        assert reply.metadata.src_node_id == 100
    assert [row.round for row in rows(tmp_path)] == [0, 1, 2, 3]
    assert result.train_metrics_clientapp == {r: {} for r in range(1, 5)}
    assert "diagnosis" not in caplog.text
    counts = [int(row["participants"]) for row in private(tmp_path)] if rate < 1 else [8] * 4
    assert [len(nodes) for nodes in grid.asked[::2]] == counts
    assert fv.verification(tmp_path / "run").outcome == "verified"
    if broken:
        told = (tmp_path / "run" / "private" / "failures.csv").read_text()
        assert "no reply" in told or "diagnosis" in told


def test_the_denominator_is_fixed_and_each_update_is_clipped(tmp_path: Path) -> None:
    grid = AppGrid(app(added(1e3)), 8, silent={100, 101, 102, 103})
    found = values(central(tmp_path, rounds=1).start(grid, model(), 1).arrays)
    assert found["b"] == pytest.approx(0.5 + 0.5 / math.sqrt(11), abs=1e-3)  # half of them, and a number is clipped like the rest


@pytest.mark.parametrize("kind", ["answers", "fails"])
def test_the_noise_is_as_large_as_it_says_whoever_answers(kind: str, tmp_path: Path) -> None:
    whole = arrays(w=np.zeros(4000, np.float32))
    grid = AppGrid(app(added(0.0)), 8, fails=set(range(100, 108)) if kind == "fails" else set())
    made = central(tmp_path, clip=0.5, rate=0.5, rounds=1, noise_multiplier=2.0)
    found = values(made.start(grid, whole, 1).arrays)["w"]
    assert 0.94 < found.std() / (2.0 * 0.5 / 4) < 1.06  # five standard errors
    assert abs(found.mean()) < 0.02


HOSTILE = {
    "nan": np.full((2, 3), np.nan, np.float32),
    "huge": np.full((2, 3), 1e38, np.float32),
    "shape": np.zeros(6, np.float32),
    "integers": np.full((2, 3), 7, np.int64),
    "text": np.array(["a"]),
    "large": np.zeros(10**6),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reply_counts_as_zero(name: str, tmp_path: Path) -> None:
    def train(message: Message, context: Any) -> Message:
        if context.node_id != 103:
            return added(0.0)(message, context)
        whole = {n: a.numpy() for n, a in message.content["arrays"].items()} | {"w": HOSTILE[name]}
        return answer(message, arrays(**whole), **{"num-examples": 10**9})

    found = values(central(tmp_path, rounds=1).start(AppGrid(app(train), 8), model(), 1).arrays)
    assert all(np.allclose(found[n], v, atol=1e-3) for n, v in values(model()).items())


def test_replies_that_were_not_asked_for_or_come_twice_do_not_count(tmp_path: Path) -> None:
    class Echo(AppGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
            found = super().send_and_receive(messages, timeout=timeout)
            if found and found[0].has_content() and len(found[0].content) == 2:
                for node in (100, 555):
                    extra = answer(Message(RecordDict(), dst_node_id=node, message_type="train"), arrays(**values(model())))
                    found.append(extra)
            return found

    found = values(central(tmp_path, rounds=1).start(Echo(app(added(0.1)), 8), model(), 1).arrays)
    assert found["b"] == pytest.approx(0.6, abs=1e-3)


def test_the_result_depends_on_the_seed_and_not_on_who_answers_first(tmp_path: Path) -> None:
    def train(message: Message, context: Any) -> Message:
        return added(context.node_id / 1e3)(message, context)

    results = []
    for i, (seed, order) in enumerate([(1, 0), (1, 5), (2, 0), (None, 0)]):
        made = CentralDP(FedAdam(), **{**CLEAR, "rate": 0.5, "noise_multiplier": 1.0, "out": tmp_path / str(i), "seed": seed})
        results.append(values(made.start(AppGrid(app(train), 8, seed=order), model(), 2).arrays)["w"].tolist())
        warned = "simulation only" in (tmp_path / str(i) / "statement.md").read_text()
        assert warned == (seed is not None)
    assert results[0] == results[1]
    assert len({str(result) for result in results}) == 3


def test_a_round_beyond_the_plan_is_not_sent_out(tmp_path: Path) -> None:
    made, grid = central(tmp_path, rounds=1), AppGrid(app(), 8)
    made.start(grid, model(), 1)
    from flwr.app import ConfigRecord

    with pytest.raises(BudgetExhausted, match="the 1 rounds that the noise is for are spent"):
        made.configure_train(2, model(), ConfigRecord(), grid)
    with pytest.raises(ConfigError, match="was not sent out"):
        made.aggregate_train(2, [])
    assert len(rows(tmp_path)) == 1


def test_runs_share_a_lifetime_budget(tmp_path: Path) -> None:
    path = tmp_path / "budget.sqlite"
    budget = create_budget(path, 10.0, 1e-2, Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE))
    promised: dict[str, Any] = {"budget": path, "epsilon": 8.0, "noise_multiplier": None}
    central(tmp_path, **promised).start(AppGrid(app(), 8), model(), 2)
    assert fv.verification(tmp_path / "run").outcome == "verified"
    assert 7.99 < spending(budget).epsilon <= 8.0
    grid = AppGrid(app(), 8)
    with pytest.raises(BudgetExhausted, match=r"privacy\.budget"):
        central(tmp_path, **promised, out=tmp_path / "second").start(grid, model(), 2)
    assert grid.asked == []
    assert not (tmp_path / "second").exists()


def test_clients_evaluate_only_when_asked_and_every_page_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedveil"):
        result = central(tmp_path).start(grid := AppGrid(app(), 8), model(), 2)
    assert result.evaluate_metrics_clientapp == {}
    assert [len(nodes) for nodes in grid.asked] == [8, 0, 8, 0]
    assert "asks no client to evaluate" in caplog.text
    named = "clients evaluate, and what they answer (metrics) leaves without clip or noise"
    page = " ".join((tmp_path / "run" / "flower.md").read_text().split())
    assert "CentralDP asks no client to evaluate. What the app asks clients outside this strategy" in page
    assert named not in (tmp_path / "run" / "statement.md").read_text()
    assert "asks its clients nothing outside its strategy" in (tmp_path / "run" / "statement.md").read_text()
    asked = central(tmp_path, out=tmp_path / "asked", evaluate=True).start(AppGrid(app(), 8), model(), 2)
    assert asked.evaluate_metrics_clientapp[1]["loss"] == 1.0
    assert "**Clients evaluate" in (tmp_path / "asked" / "flower.md").read_text()
    assert "clients evaluate: what they answer leaves without clip or noise" in caplog.text
    publish(tmp_path / "asked", tmp_path / "public")
    for folder in ("asked", "public"):
        found = fv.verification(tmp_path / folder)
        assert found.outcome == "verified"
        assert [f.text[:17] for f in found.findings if (f.kind, f.subject) == ("trust", "evaluation")] == ["clients evaluate:"]
        assert (tmp_path / folder / "flower.md").is_file()
        assert named in json.loads((tmp_path / folder / "statement.json").read_text())["warnings"][0]
        assert named in (tmp_path / folder / "statement.md").read_text()


def warned(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("fedveil") and r.levelno >= logging.WARNING)


def prefixed(message: Message, context: Any) -> Message:
    """The names of a wrapped model."""
    reply = added(0.1)(message, context)
    return answer(message, arrays(**{f"_module.{name}": value for name, value in values(reply.content["arrays"]).items()}))


def adapters(message: Message, context: Any) -> Message:
    return answer(message, arrays(b=np.float32(0.6)))


def in_two_records(message: Message, context: Any) -> Message:
    reply = added(0.1)(message, context)
    reply.content["more"] = arrays(b=np.float32(0.6))
    return reply


def of_another_shape(message: Message, context: Any) -> Message:
    whole = values(added(0.1)(message, context).content["arrays"])
    return answer(message, arrays(**(whole | {"w": np.zeros((3, 3), np.float32)})))


@pytest.mark.parametrize(
    ("train", "names"),
    [
        (prefixed, "['w', 'b', 'v'] were sent, and {'arrays': ['_module.w', '_module.b'"),
        (adapters, "{'arrays': ['b']} came back (without ['w', 'v'])"),
        (in_two_records, "'more': ['b']} came back"),
        (of_another_shape, "another shape than they had, or no floats: ['w']"),
    ],
)
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_run_whose_replies_do_not_fit_ends_before_it_is_charged(
    rate: float, train: Any, names: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, grid = central(tmp_path, rate=rate, rounds=9, seed=1), AppGrid(app(train), 8)
    result = made.start(grid, model(), 9)
    assert not result.arrays
    assert rows(tmp_path) == []
    assert sum(map(bool, grid.asked)) == 1
    assert names in warned(caplog)
    assert "no reply of round" in warned(caplog)
    assert fv.verification(tmp_path / "run").outcome == "verified"
    public = "".join(p.read_text() for p in (tmp_path / "run").iterdir() if p.suffix in (".csv", ".json", ".md", ".toml"))
    assert "has the arrays of the model" in public
    assert "_module" not in public


def test_replies_of_which_some_fit_go_on_and_extra_arrays_or_another_order_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(message: Message, context: Any) -> Message:
        if context.node_id < 104:
            return prefixed(message, context)
        whole = values(added(0.1)(message, context).content["arrays"])
        return answer(message, arrays(more=np.ones(3), **dict(reversed(whole.items()))))

    found = values(central(tmp_path).start(AppGrid(app(train), 8), model(), 2).arrays)
    assert found["b"] == pytest.approx(0.5 + 2 * 0.1 / 2, abs=1e-3)
    assert "a reply that does not fit counts as zero" in warned(caplog)


def test_values_that_cannot_leave_end_no_run_whatever_others_answer(tmp_path: Path) -> None:
    """Its client has the arrays of the model, and what it put into them depends on its data."""

    def train(message: Message, context: Any) -> Message:
        return (added(np.nan) if context.node_id == 103 else prefixed)(message, context)

    central(tmp_path).start(AppGrid(app(train), 8), model(), 2)
    assert len(rows(tmp_path)) == 2


def by_round(first: Any, later: Any, begin: int = 2) -> Any:
    """A train function that becomes another one."""

    def train(message: Message, context: Any) -> Message:
        return (later if message.content["config"]["server-round"] >= begin else first)(message, context)

    return train


@pytest.mark.few(4)
@pytest.mark.parametrize("later", [prefixed, adapters, in_two_records, of_another_shape])
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_a_run_whose_replies_fit_no_more_ends_before_the_next_charge(
    rate: float, later: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = AppGrid(app(by_round(added(0.1), later, 4)), 8)
    central(tmp_path, rate=rate, rounds=9, seed=1).start(grid, model(), 9)
    assert [row.round for row in rows(tmp_path)] == [0, 1, 2]
    assert sum(map(bool, grid.asked)) == 4
    assert "no reply of round 4 has the arrays of the model: the run ends" in warned(caplog)
    assert fv.verification(tmp_path / "run").outcome == "verified"


def failing(message: Message, context: Any) -> Message:
    raise ValueError("a lesion")


def filled(message: Message, context: Any) -> Message:
    return answer(message, arrays(**(values(added(0.1)(message, context).content["arrays"]) | {"mask": np.zeros(2)})))


@pytest.mark.parametrize("later", [failing, added(np.nan), added(1e9), filled], ids=["fails", "nan", "large", "filled"])
def test_failures_and_values_end_no_run_in_later_rounds_either(later: Any, tmp_path: Path) -> None:
    whole = arrays(**values(model()), mask=np.array([0, -np.inf]))

    def train(message: Message, context: Any) -> Message:
        found = values(added(0.1)(message, context).content["arrays"])
        return answer(message, arrays(**(found | {"mask": np.array([0, -np.inf])})))

    central(tmp_path, rounds=4).start(AppGrid(app(by_round(train, later)), 8), whole, 4)
    assert [row.round for row in rows(tmp_path)] == [0, 1, 2, 3]


def test_whether_one_client_fails_ends_no_run_whose_others_fit_no_more(tmp_path: Path) -> None:
    """Its data decide over that, and the others may know what theirs is."""

    def train(message: Message, context: Any) -> Message:
        return (failing if context.node_id == 103 else prefixed)(message, context)

    central(tmp_path, rounds=4).start(AppGrid(app(by_round(added(0.1), train)), 8), model(), 4)
    assert len(rows(tmp_path)) == 4
    here = tmp_path / "once"
    train = by_round(by_round(added(0.1), train), prefixed, 3)
    central(here, rounds=4).start(AppGrid(app(train), 8), model(), 4)
    assert [row.round for row in rows(here)] == [0, 1]


def test_one_client_with_another_app_ends_no_run_when_it_is_drawn_alone(tmp_path: Path) -> None:
    def train(message: Message, context: Any) -> Message:
        return (prefixed if context.node_id == 103 else added(0.1))(message, context)

    grid = AppGrid(app(train), 8)
    central(tmp_path, rate=0.125, rounds=40, seed=3).start(grid, model(), 40)
    assert [103] in grid.asked
    assert len(rows(tmp_path)) == 40


def test_nobody_who_can_be_used_is_said_and_charged_like_any_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That replies fail, or are too large, depends on data: a run may not end by it."""
    central(tmp_path).start(AppGrid(app(added(1e9)), 8), model(), 2)
    assert len(rows(tmp_path)) == 2
    assert warned(caplog).count("no reply can be used, so that noise alone moves the model") == 2


class Silent(FedAvg):
    """A strategy that makes nothing of its replies, but metrics."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        return None, super().aggregate_train(server_round, replies)[1]


class Halved(FedAvg):
    """A strategy that loses an array."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        record, metrics = super().aggregate_train(server_round, replies)
        assert record is not None
        del record["w"]
        return record, metrics


@pytest.mark.parametrize("strategy", [Bulyan(num_malicious_nodes=1), Silent(), Halved()])
def test_a_strategy_that_makes_no_model_ends_the_run_after_its_first_round(
    strategy: Strategy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = AppGrid(app(), 8)
    central(tmp_path, strategy, rounds=3).start(grid, model(), 3)
    assert [row.round for row in rows(tmp_path)] == [0]
    assert sum(map(bool, grid.asked)) == 1
    assert f"{type(strategy).__name__} makes " in warned(caplog)
    assert "Traceback" not in warned(caplog)
    assert fv.verification(tmp_path / "run").outcome == "verified"
    assert f"{type(strategy).__name__} makes " in json.loads((tmp_path / "run" / "summary.json").read_text())["ended"]


class Asks(FedAvg):
    """A strategy with a choice of its own of whom it asks."""

    def __init__(self, choice: slice, twice: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.choice, self.twice = choice, twice

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Iterable[Message]:
        made = list(super().configure_train(server_round, arrays, config, grid))[self.choice]
        return made * (1 + self.twice)


class Own(FedAvg):
    """A strategy that asks a node by itself, and never looks at the grid."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Iterable[Message]:
        return [Message(RecordDict({"arrays": arrays, "config": config}), dst_node_id=100, message_type="train")]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Asks(slice(None, None, 2)), "Asks asks 4 of 8 connected nodes"),
        (Own(), "Own asks 1 of 8 connected nodes"),
        (Asks(slice(None), twice=True), "sends 16 messages to 8 nodes"),
    ],
)
def test_what_a_strategy_asks_is_counted(strategy: Strategy, words: str, tmp_path: Path) -> None:
    grid = AppGrid(app(), 8)
    with pytest.raises(ConfigError, match=words):
        central(tmp_path, strategy).start(grid, model(), 2)
    assert grid.asked == []
    assert not (tmp_path / "run").exists()


def test_a_fraction_that_asks_everybody_is_none(tmp_path: Path) -> None:
    made = central(tmp_path, FedAvg(fraction_train=0.5, min_train_nodes=8)).start(AppGrid(app(), 8), model(), 2)
    assert values(made.arrays)["b"] == pytest.approx(0.7, abs=1e-3)


def test_a_node_that_connects_while_the_strategy_asks_is_no_choice_of_its_own(tmp_path: Path) -> None:
    class Growing(AppGrid):
        def get_node_ids(self) -> Iterable[int]:
            self.nodes = min(len(self.contexts), self.nodes + 1)
            return list(self.contexts)[: self.nodes]

    grid = Growing(app(), 12)
    grid.nodes = 6
    central(tmp_path, clients=12).start(grid, model(), 2)
    assert len(rows(tmp_path)) == 2


def test_a_mask_of_infinite_values_stays_and_one_that_is_trained_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = arrays(w=np.zeros(4, np.float32), mask=np.array([0, -np.inf, np.nan], np.float32))

    def train(message: Message, context: Any) -> Message:
        return answer(message, arrays(**(values(message.content["arrays"]) | {"w": np.full(4, 0.1, np.float32)})))

    found = values(central(tmp_path).start(AppGrid(app(train), 8), whole, 2).arrays)
    assert np.array_equal(found["mask"], np.array([0, -np.inf, np.nan], np.float32), equal_nan=True)
    assert found["w"].mean() == pytest.approx(0.1, abs=1e-3)
    central(tmp_path / "other").start(AppGrid(app(added(0.1)), 8), whole, 2)
    assert rows(tmp_path / "other") == []
    assert "NaN or infinite values in ['mask'], and training changed" in warned(caplog)


def test_a_model_that_diverged_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Diverges(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            return arrays(**(values(model()) | {"w": np.full((2, 3), np.nan)})), None

    central(tmp_path, Diverges(), rounds=4).start(AppGrid(app(), 8), model(), 4)
    assert len(rows(tmp_path)) == 1
    assert "NaN or infinite values in ['w'], which it did not have before" in warned(caplog)
    assert fv.verification(tmp_path / "run").outcome == "verified"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"w": np.zeros(2, np.float32), "s": np.zeros(2, np.complex64)}, r"complex parameters are not released: \['s'\]"),
        (
            {"w": np.zeros(2, np.float32), "s": np.array(["a", "b"])},
            r"a model may hold only arrays of numbers, and these are not: \['s'\]",
        ),
        ({"w": np.zeros((0, 3), np.float32)}, r"no array of finite floating-point numbers to release; it has \['w'\]"),
    ],
    ids=["complex", "text", "empty"],
)
def test_models_that_cannot_be_released_are_refused_before_a_charge(model: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        central(tmp_path).start(AppGrid(app(), 8), arrays(**model), 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("multiplier", "loud"), [(1e-4, False), (8.0, True)])
def test_the_norm_of_the_noise_is_said_beside_the_clip(
    multiplier: float, loud: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    central(tmp_path, noise_multiplier=multiplier, clip=0.5).start(AppGrid(app(), 8), model(), 2)
    said = "the noise of each round has norm 1.66 on the mean of updates, each of which has at most 0.5, the clip"
    assert (said in warned(caplog)) == loud  # 8 x 0.5 / 8 x sqrt(11)


class OwnStart(FedAvg):
    def start(self, *args: Any, **options: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rate": 0.3}, "not a whole number of clients"),
        ({"rate": 0.0}, "rate = 0.0 is not possible"),
        ({"rate": 1.5}, "not a whole number of clients"),
        ({"rate": math.nan}, "rate = nan is not possible"),
        ({"clients": 8.0}, "clients = 8.0 is not possible"),
        ({"epsilon": 1.0}, "give epsilon, or a noise_multiplier"),
        ({"noise_multiplier": None}, "give epsilon, or a noise_multiplier"),
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0.0 is not possible"),
        ({"noise_multiplier": -1.0}, "noise_multiplier = -1.0 is not possible"),
        ({"clip": 0.0}, "clip = 0.0 is not possible"),
        ({"clip": math.inf}, "clip = inf is not possible"),
        ({"rounds": 0}, "rounds = 0 is not possible"),
        ({"delta": 1.0}, "privacy.delta"),
        ({"out": "here"}, "absolute path"),
        ({"strategy": FedAvg(fraction_train=0.5)}, "fraction_train = 0.5"),
    ],
)
def test_impossible_numbers_are_refused_at_once(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        central(tmp_path, changed.pop("strategy", None), **changed)


def test_what_cannot_be_promised_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    grid = AppGrid(app(), 8)
    with pytest.raises(ConfigError, match="num_rounds = 3"):
        central(tmp_path).start(grid, model())
    with pytest.raises(ConfigError, match="OwnStart has a start of its own"):
        central(tmp_path, OwnStart()).start(grid, model(), 2)
    with pytest.raises(ConfigError, match="delta"):
        central(tmp_path, delta=0.5).start(grid, model(), 2)
    with pytest.raises(ConfigError, match="clients = 4, and FedAvg asks 8 nodes"):
        central(tmp_path, clients=4).start(grid, model(), 2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(ConfigError, match="not empty"):
        central(tmp_path, out=tmp_path / "full").start(grid, model(), 2)
    assert grid.asked == []


def test_a_metric_of_clients_is_not_in_the_public_part(tmp_path: Path) -> None:
    central(tmp_path, rate=0.5).start(AppGrid(app(), 8), model(), 2)
    public = "".join(p.read_text() for p in (tmp_path / "run").iterdir() if p.suffix in (".csv", ".json", ".md", ".toml"))
    assert "train_loss" not in public
    assert "participants" not in (tmp_path / "run" / "history.csv").read_text()
    assert MetricRecord not in map(type, private(tmp_path))


class Polling(FedAvg):
    """Asks its clients while it configures a round."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        grid.send_and_receive([])
        return super().configure_train(server_round, arrays, config, grid)


@pytest.mark.parametrize(
    ("strategy", "words"), [(QFedAvg(client_learning_rate=0.1), "nothing was charged"), (Polling(), "grid.send_and_receive")]
)
def test_a_strategy_that_needs_more_than_the_mean_is_refused_before_any_charge(
    strategy: Strategy, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        central(tmp_path, strategy).start(AppGrid(app(), 8), model(), CLEAR["rounds"])
    assert not (tmp_path / "run").exists()


def test_a_run_that_broke_off_is_not_started_again(tmp_path: Path) -> None:
    def breaks(server_round: int, arrays: Any) -> None:
        if server_round == 1:
            raise OSError("the disk is full")

    run, grid = central(tmp_path), AppGrid(app(), 8)
    with pytest.raises(OSError, match="the disk is full"):
        run.start(grid, model(), CLEAR["rounds"], evaluate_fn=breaks)
    with pytest.raises(ConfigError, match="has begun its run"):
        run.start(grid, model(), CLEAR["rounds"])
    assert len(rows(tmp_path)) == 1
    assert fv.verification(tmp_path / "run").exit_status != 1


def test_a_loop_of_ones_own_closes_and_verifies(tmp_path: Path) -> None:
    run, grid, arrays = central(tmp_path), AppGrid(app(), 8), model()
    for i in range(1, CLEAR["rounds"] + 1):
        arrays, _ = run.aggregate_train(i, grid.send_and_receive(run.configure_train(i, arrays, ConfigRecord(), grid)))
    assert run.close() == run.close() != ""
    assert fv.verification(tmp_path / "run").exit_status == 0


def test_a_node_more_is_left_out_and_fewer_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid, run = AppGrid(app(), 8), central(tmp_path)

    def joins(server_round: int, arrays: Any) -> None:
        if server_round == 1:
            grid.contexts[50] = context(50, 50)
            grid.nodes = 9

    run.start(grid, model(), CLEAR["rounds"], evaluate_fn=joins)
    assert len(rows(tmp_path)) == CLEAR["rounds"]
    assert all(50 not in asked for asked in grid.asked)
    assert "the 1 that joined last are left out" in warned(caplog)
    (tmp_path / "few").mkdir()
    central(tmp_path / "few", clients=16).start(AppGrid(app(), 8), model(), CLEAR["rounds"])
    assert "8 nodes are connected, and clients = 16" in warned(caplog)


def test_it_is_a_drop_in_for_the_strategy_inside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = central(tmp_path, FedAvg(min_available_nodes=3), clients=np.int64(8), clip=np.float32(1))
    assert run.min_available_nodes == 3
    run.start(AppGrid(app(), 8), model(), CLEAR["rounds"], 60.0)
    assert "closing digest" in warned(caplog)
