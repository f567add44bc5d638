"""Six apps of the kinds that people publish, with the lines of docs/coming-from-flower.md: what leaves beside the release.

Each app runs as it is, with noise at each client, and with noise on the sum. The grid keeps every reply as the server gets it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flwr (pip install 'fedveil[flower]')")

from flwr.app import Context, Message, RecordDict

import fedveil as fv
from fedveil.ledger.files import read_head
from flower_apps import AppGrid

APPS = Path(__file__).parent / "apps"
CLIENTS, ROUNDS = 5, 3
START = "    result = strategy.start("
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@dataclass
class Server(AppGrid):
    """A grid that keeps all replies."""

    received: list[Message] = field(default_factory=list)
    run: Any = field(default_factory=lambda: SimpleNamespace(run_id=1))

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        replies = super().send_and_receive(messages, timeout=timeout)
        self.received += replies
        return replies

    def records(self, kind: str) -> set[tuple[str, ...]]:
        """Return which records and metrics came back to messages of a kind; "refused" for an error."""
        return {_contents(reply) for reply in self.received if reply.metadata.message_type.startswith(kind)}


def _contents(reply: Message) -> tuple[str, ...]:
    if reply.has_error():
        return (reply.error.reason.partition(":")[0],)
    arrays = set(reply.content.array_records)
    return tuple(name if name in arrays else f"{name}: {', '.join(record)}" for name, record in reply.content.items())


def app(name: str, *changes: tuple[str, str]) -> ModuleType:
    """Return an app with changed lines, each of which it has once."""
    if name == "jax_quickstart":
        pytest.importorskip("jax", reason="needs jax, which is not among the packages of the tests")
    source = (APPS / f"{name}.py").read_text()
    for line, changed in changes:
        assert source.count(line) == 1, line
        source = source.replace(line, changed)
    made = ModuleType(name)
    exec(compile(source, f"{name}.py", "exec"), made.__dict__)
    return made


def ran(made: ModuleType, folder: Path) -> tuple[Server, Context]:
    """Run an app with five nodes; return what its server received, and the server's context with the final model."""
    grid = Server(made.app, CLIENTS)
    for number, node in enumerate(grid.contexts.values()):
        node.node_config.update({"dataset-path": str(folder / str(number)), "num-partitions": CLIENTS})
        node.run_config["num-server-rounds"] = ROUNDS
        (folder / str(number)).mkdir(parents=True)
        x = np.random.default_rng(number).normal(size=(30 + number, 4))
        np.save(folder / str(number) / "table.npy", np.c_[x, x @ [1.0, 2, 3, 4]])
    config = {"num-server-rounds": ROUNDS}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    made.server(grid, context)
    return grid, context


def at_the_clients(name: str, folder: Path, *changes: tuple[str, str], **more: Any) -> ModuleType:
    """Return an app with `dp_mod` first in its list."""
    total = {"clip": 1.0, "epsilon": 8.0, "delta": 1e-3, "rounds": ROUNDS, **more}
    mod = f"dp_mod(**{total!r}, ledger={str(folder / 'ledgers')!r})"
    (line,) = [line for line in (APPS / f"{name}.py").read_text().splitlines() if line.startswith("app = ClientApp(")]
    if "mods=[" in line:
        changed = line.replace("mods=[", f"mods=[{mod}, ")
    else:
        changed = line.replace(")", f"{', ' if 'client_fn' in line else ''}mods=[{mod}])")
    return app(name, ("\napp = ClientApp(", "\nfrom fedveil import dp_mod\n\napp = ClientApp("), (line, changed), *changes)


def on_the_sum(name: str, folder: Path, *changes: tuple[str, str], **more: Any) -> ModuleType:
    """Return an app with its strategy inside `CentralDP`."""
    total = {"clip": 1.0, "clients": CLIENTS, "rate": 0.6, "epsilon": 8.0, "delta": 1e-3, "out": str(folder / "run"), **more}
    line = f"    from fedveil import CentralDP\n\n    strategy = CentralDP(strategy, rounds=rounds, **{total!r})\n{START}"
    return app(name, (START, line), *changes)


def verified(folder: Path) -> int:
    """Return the number of clients' ledgers, each of which holds a release a round and verifies."""
    ledgers = list((folder / "ledgers").glob("*.sqlite"))
    assert {fv.verification(ledger).outcome for ledger in ledgers} == {"verified"}
    assert {read_head(ledger)[0] for ledger in ledgers} == {ROUNDS}
    return len(ledgers)


TRAINED = {
    "torch_quickstart": "train_loss, num-examples",
    "sklearn_logreg": "train_logloss, num-examples",
    "jax_quickstart": "train_loss, num-examples",
    "own_strategy": "train_loss, num-examples",
    "embedded_device": "num-examples, train_mse, seconds",
}
EVALUATED = {
    "torch_quickstart": {("metrics: eval_acc, num-examples",)},
    "sklearn_logreg": {("metrics: accuracy, num-examples",)},
    "jax_quickstart": set(),
    "own_strategy": {("metrics: accuracy, num-examples",)},
    "embedded_device": set(),
}
RELEASE = ("arrays", "metrics: num-examples")


@pytest.mark.parametrize("name", TRAINED)
def test_without_fedveil_metrics_and_evaluation_leave(name: str, tmp_path: Path) -> None:
    server, context = ran(app(name), tmp_path)
    assert server.records("train") == {("arrays", f"metrics: {TRAINED[name]}")}
    assert server.records("evaluate") == EVALUATED[name]
    assert context.state["final"]


@pytest.mark.parametrize("name", TRAINED)
def test_with_noise_at_the_clients_nothing_leaves_beside_the_arrays_and_weight_1(name: str, tmp_path: Path) -> None:
    server, context = ran(at_the_clients(name, tmp_path), tmp_path)
    assert server.records("train") == {RELEASE}
    assert {reply.content["metrics"]["num-examples"] for reply in server.received if not reply.has_error()} == {1}
    assert server.records("evaluate") == ({("refused",)} if EVALUATED[name] else set())
    assert server.records("query") == ({("refused",)} if name == "embedded_device" else set())
    assert context.state["final"]
    assert verified(tmp_path) == CLIENTS


@pytest.mark.parametrize("name", TRAINED)
def test_with_noise_on_the_sum_the_strategy_gets_the_mean_and_a_run_verifies(name: str, tmp_path: Path) -> None:
    server, context = ran(on_the_sum(name, tmp_path), tmp_path)
    assert server.records("evaluate") == set()
    assert context.state["final"]
    assert fv.verification(tmp_path / "run").outcome == "verified"


def test_a_query_of_the_app_leaves_beside_the_sum_and_the_page_says_so(tmp_path: Path) -> None:
    """The app asks its devices for their state, with the number of records, after the last round."""
    server, _ = ran(on_the_sum("embedded_device", tmp_path), tmp_path)
    assert server.records("query") == {("seen: rounds, records",)}
    page = " ".join((tmp_path / "run" / "flower.md").read_text().split())
    assert "such as queries or evaluation by the grid" in page
    assert "asked its clients nothing by messages of its own" in str(fv.verification(tmp_path / "run").findings)


def test_the_state_stays_at_the_client(tmp_path: Path) -> None:
    server, _ = ran(at_the_clients("embedded_device", tmp_path), tmp_path)
    assert [node.state["seen"]["rounds"] for node in server.contexts.values()] == [ROUNDS] * CLIENTS
    server, _ = ran(at_the_clients("numpy_client", tmp_path / "2"), tmp_path / "2")
    assert all("head" in node.state for node in server.contexts.values())


def test_a_strategy_that_keeps_its_best_model_by_clients_scores_keeps_none(tmp_path: Path) -> None:
    for folder, made in (("a", at_the_clients), ("b", on_the_sum)):
        _, context = ran(made("own_strategy", tmp_path / folder), tmp_path / folder)
        assert context.state["best"]["kept"] is False
    server, context = ran(on_the_sum("own_strategy", tmp_path / "c", evaluate=True), tmp_path / "c")
    assert context.state["best"]["kept"] is True
    assert server.records("evaluate") == EVALUATED["own_strategy"]
    assert "Clients evaluate" in (tmp_path / "c" / "run" / "flower.md").read_text()


def test_a_variance_of_batch_normalisation_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Noise made it negative, and the model's scores NaN, without a word."""
    caplog.set_level(logging.WARNING)
    for folder, made in (("a", at_the_clients), ("b", on_the_sum)):
        caplog.clear()
        ran(made("torch_quickstart", tmp_path / folder), tmp_path / folder)
        assert "1.running_var: noise can make a variance negative" in caplog.text
    caplog.clear()
    kept = ("num_batches_tracked", "running_mean", "running_var")
    _, context = ran(at_the_clients("torch_quickstart", tmp_path / "c", untouched=kept), tmp_path / "c")
    assert "negative" not in caplog.text
    assert (context.state["final"]["1.running_var"].numpy() == 1).all()


def test_a_numpy_client_releases_and_a_strategy_of_its_kind_is_refused_on_the_sum(tmp_path: Path) -> None:
    server, _ = ran(app("numpy_client"), tmp_path / "plain")
    rest = ("fitres.num_examples: num_examples", "fitres.metrics: train_error", "fitres.status: code, message")
    assert {frozenset(one) for one in server.records("train")} == {frozenset({"fitres.parameters", *rest})}
    server, _ = ran(at_the_clients("numpy_client", tmp_path), tmp_path)
    rest = ("fitres.num_examples: num_examples", "fitres.metrics: ", "fitres.status: code, message")
    assert server.records("train") == {("fitres.parameters", *rest)}
    assert server.records("evaluate") == {("refused",)}
    assert verified(tmp_path) == CLIENTS
    line = "    rounds = context.run_config"
    wrapped = "    from fedveil import CentralDP\n\n    strategy = CentralDP(strategy, clip=1.0, clients=5, rate=0.6, rounds=3, "
    wrapped += f"epsilon=8.0, delta=1e-3, out={str(tmp_path / 'run')!r})\n{line}"
    with pytest.raises(fv.ConfigError, match=r"is not a strategy of flwr\.serverapp\.strategy"):
        ran(app("numpy_client", (line, wrapped)), tmp_path / "sum")


def test_what_a_server_cannot_do_without_metrics_ends_its_run(tmp_path: Path) -> None:
    """At the clients after one charged round; on the sum before any charge."""
    reading = "FedAvg(train_metrics_aggr_fn=lambda replies, key: MetricRecord({'loss': replies[0]['metrics']['train_loss']}),"
    lines = ("FedAvg(fraction_train=1.0,", reading)
    made = at_the_clients("torch_quickstart", tmp_path, lines)
    with pytest.raises(KeyError, match="train_loss"):
        ran(made, tmp_path)
    assert {read_head(ledger)[0] for ledger in (tmp_path / "ledgers").glob("*.sqlite")} == {1}
    with pytest.raises(fv.ConfigError, match="nothing was charged"):
        ran(on_the_sum("torch_quickstart", tmp_path / "sum", lines), tmp_path / "sum")
    assert not (tmp_path / "sum" / "run").exists()
