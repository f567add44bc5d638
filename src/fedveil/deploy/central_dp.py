"""Central differential privacy around any Flower strategy: replies are clipped and summed here, and noise is added once.

Unknown facts about an app, such as how clients train and on what data, are left out of `config.toml`. `data.json` has the number
of clients, and states that its other entries are placeholders. `flower.md` states what the statement cannot, which is that of the
matching configuration.

    strategy = CentralDP(FedAvg(), clip=1.0, clients=100, rate=0.1, rounds=30, epsilon=8.0, delta=1e-3, out="run")

The inner strategy makes the instructions and takes the server's step. It never gets a client's reply: each round it gets one
reply, the noisy mean. The server itself sees every update before the noise; an assumption of the statement says so.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w

import fedveil.experiment.run_directory as rundir
from fedveil.data.catalogue import Info
from fedveil.deploy.app_arrays import UNTOUCHED, AppArrays, Misfit, not_constant, unfit
from fedveil.deploy.dp_mod import absolute_path
from fedveil.deploy.wire_format import printable
from fedveil.errors import BudgetExhausted, ConfigError, UpdateRefused
from fedveil.experiment.config import Config, parse
from fedveil.experiment.data_card import CARD, FORMAT, new_salt
from fedveil.experiment.model_section import HANDED_OVER
from fedveil.experiment.public_setting import FLOWER_APP, Population
from fedveil.experiment.resolve import resolve
from fedveil.experiment.run_directory import append_history, new_run_id
from fedveil.experiment.shared_budget import budgets, plans, shared_budget
from fedveil.experiment.spending import EpsilonSpent
from fedveil.experiment.verification import conclude, opening
from fedveil.federation.history import Record, Row
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.population_budget import PopulationBudget
from fedveil.methods.base import gaussian_plan
from fedveil.platforms.releaser import AGGREGATE, positive_number, whole_number
from fedveil.release.array_door import ArrayDoor
from fedveil.release.noise import Randomness
from fedveil.statement.statement_layout import to_dict, to_markdown
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedveil.deploy.app_arrays import Floats, Kinds
    from fedveil.methods.base import Method, Setting
    from fedveil.statement.statement import Statement


@dataclass
class FittingClients:
    """Clients whose last reply had the model's arrays, and clients whose last reply had not.

    A client may fail because of its data, so a failed client keeps its earlier status: no run ends because it failed. Nor does a
    run end because of who was drawn: not if some round had replies of both kinds and a fitting client is left, and not by fewer
    misfits than fitting clients.
    """

    _fitting: set[int] = field(default_factory=set)
    _others: set[int] = field(default_factory=set)
    _mixed: bool = False

    def none_left(self, drawn: Collection[int], fitting: Collection[int], others: Collection[int]) -> bool:
        """Return whether, judging by a round's replies, the app now answers with other arrays.

        Args:
            drawn: clients that were asked. fitting, others: clients whose reply has the model's arrays, or has not; the rest
                failed.
        """
        self._mixed |= bool(fitting) and bool(others)
        self._fitting = self._fitting.union(fitting).difference(others)
        self._others = self._others.union(others).difference(fitting)
        left = self._fitting if self._mixed else self._fitting.intersection(drawn)
        return bool(others) and not left and len(self._others) >= len(self._fitting)


DATA = Info(
    FLOWER_APP, "", (1,), 1, 0, 0, 0, "the clients of a Flower app; fedveil has not seen them", False, (0.0,), (1.0,), 1.0
)
"""Placeholder for data about which fedveil knows nothing."""
_CLASSES = {"flower": "Flower app", "nvflare": "NVFlare job"}
_UNKNOWN = (
    "of this program fedveil knows the number of clients and the shapes of the model; examples, labels, sizes and normalisation "
    "below stand for nothing"
)


def matching_configuration(
    sections: Mapping[str, Mapping[str, Any]], clients: int, layout: Layout, *, evaluate: bool = False, data: Info = DATA
) -> Config:
    """Return the fedveil configuration whose releases match those of a program that fedveil does not run.

    Args:
        sections: known values of method, training, privacy and run. evaluate: whether clients evaluate, in addition to the
            releases. data: placeholder that names the kind of program, by default a Flower app.

    Raises:
        ConfigError: a value is impossible.
    """
    shapes = dict(zip(layout.names, map(list, layout.shapes), strict=True))
    kind = data.name.partition("-")[0]
    partition = {"kind": kind, "clients": clients, **({"evaluate": True} if evaluate else {})}
    section = {"name": data.name, "handed_over": ["data", "partition"], "partition": partition}
    model = {"name": HANDED_OVER, "recorded": {"class": _CLASSES[kind], "shapes": shapes}}
    return parse({"data": section, "model": model, **{name: dict(section) for name, section in sections.items()}})


@dataclass
class AppRun:
    """Run directory that is being written.

    Args:
        statement: of the run. door: charges the ledger of the directory. shared: the budget in which it has reserved its plan.
    """

    path: Path
    run: str
    statement: Statement
    method: Method
    setting: Setting
    door: ArrayDoor
    shared: PopulationBudget | None = None
    history: list[Record] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(cls, path: Path, config: Config, clients: int, page: str, data: Info = DATA) -> AppRun:
        """Write what a run writes before training, its ledger last.

        Args:
            page: the text of `flower.md` or `nvflare.md`. data: as in `matching_configuration`.

        Raises:
            ConfigError: `path` exists, or the numbers are impossible (delta >= 1 / clients, for one).
            BudgetExhausted: the planned cost does not fit into the shared budget.
        """
        experiment = resolve(config, Population(data, clients, 0))
        method, setting, statement = experiment.method, experiment.setting, experiment.statement
        run, shared = new_run_id(), shared_budget(experiment)
        if shared is not None:
            shared.reserve(plans(experiment), run)
        rundir.create(path)
        rundir.write_versions(path / "versions.json")
        rundir.write_text(path / "config.toml", _written(experiment.written))
        rundir.write_json(path / "statement.json", to_dict(statement))
        rundir.write_text(path / "statement.md", to_markdown(statement))
        new_salt(path)
        rundir.write_json(path / CARD, _card(data, clients))
        rundir.write_text(path / f"{data.name.partition('-')[0]}.md", page)
        Ledger.create(path / "ledger.sqlite", run, opening(path, method.name)).close()
        population = None if shared is None else shared.ledger(run)
        ledger = BudgetedLedger(path / "ledger.sqlite", budgets(method, setting), experiment.seeded_noise, population=population)
        rate = setting.rate if setting.amplified else None
        randomness = Randomness(experiment.seed, experiment.seeded_noise)
        clip = method.clip_norm(setting)
        assert clip is not None
        door = ArrayDoor(gaussian_plan(setting, clip), setting.layout, setting.scope, run, ledger, randomness, rate)
        return cls(path, run, statement, method, setting, door, shared)

    def __post_init__(self) -> None:
        assert isinstance(self.door.ledger, BudgetedLedger)
        self._spent = EpsilonSpent(self.door.ledger, self.method, self.setting, self.statement)

    @property
    def noise_norm(self) -> float:
        """Return the expected L2 norm of the noise on a round's mean."""
        assert isinstance(self.door.plan.noise_std, float)
        return self.door.plan.noise_std / self.setting.cohort * math.sqrt(self.setting.layout.dimension)

    def release(self, round: int, updates: Sequence[Floats], failures: Mapping[int, str]) -> Floats:
        """Release and charge the noisy mean [d] of a round, and write its record.

        Args:
            round: from 0. updates: of all drawn clients, [d] each. failures: reasons why some of these are zero; stored in the
                private part of the directory.
        """
        mean = self.door.release_mean([self.door.encode(update) for update in updates], round, self.setting.cohort)
        public: Row = {"round": round, "update_norm": float(np.linalg.norm(mean)), "noise_norm": self.noise_norm}
        participants = {"participants": len(updates)}
        secret = self.setting.sampling == "poisson"
        public |= {} if secret else participants
        private: Row = participants if secret else {}
        private |= {"failed": len(failures), "seconds": time.monotonic() - self._started, "failures": dict(failures)}
        self._started = time.monotonic()
        self.history.append(Record(public | self._spent.after(round), private))
        append_history(self.path, self.history, self.setting.layout)
        return mean

    def end(self, early: str = "") -> str:
        """Close the run directory and return the closing digest.

        Args:
            early: the reason if it ends before its last round, or an empty string; it is public.
        """
        self.close()
        if not self.history:
            rundir.write_text(self.path / "history.csv", "round\n")
        last = self.history[-1].public if self.history else {}
        done = {"run": self.run, "rounds": len(self.history), "ended": early or "after its last round", "final": last}
        summary = rundir.json_text(done)
        closing = conclude(self.path, len(self.history), early, {"summary.json": summary.encode()})
        rundir.write_text(self.path / "summary.json", summary)
        return closing

    def close(self) -> None:
        """Close the connection to the ledger, and give back what the run has reserved and not spent."""
        assert isinstance(self.door.ledger, BudgetedLedger)
        self.door.ledger.close()
        if self.shared is not None:
            self.shared.give_back(self.run)

    def admits(self) -> bool:
        """Return whether the budget has room for one more round."""
        return self.door.admits(AGGREGATE)


def _written(config: Mapping[str, Any]) -> str:
    """Return the known keys as TOML; local training is left out, since its defaults could be untrue."""
    whole = rundir.present(config)
    training = {
        key: whole["training"][key] for key in ("rounds", "clients_per_round", "sampling", "local") if key in whole["training"]
    }
    data = {key: whole["data"][key] for key in ("name", "handed_over", "partition")}
    run = {key: whole["run"][key] for key in ("seed", "seeded_noise")}
    recorded = {name: whole[name] for name in ("model", "method", "privacy")}
    return tomli_w.dumps({"data": data, **recorded, "training": training, "run": run})


def _card(data: Info, clients: int) -> dict[str, Any]:
    card = {
        "name": data.name,
        "source": data.source,
        "unknown": _UNKNOWN,
        "examples": {"shape": list(data.input_shape)},
        "labels": {"shape": [], "dtype": "int64", "classes": data.classes},
        "train_examples": 0,
        "test_examples": 0,
        "normalisation": {"scale": data.scale, "mean": list(data.mean), "std": list(data.std)},
        "clients": clients,
        "nominal_examples_per_client": 0,
    }
    return {"format": FORMAT, **json.loads(rundir.json_text(card)), "treated_as_public": ["clients"]}


_log = logging.getLogger(__name__)


class _NoAnswer(UpdateRefused):
    """Raised for a client that failed, so that its arrays are unknown."""


@dataclass(frozen=True)
class _Round:
    """A round in progress: its model, the drawn clients by position among all nodes, and a message of the round."""

    arrays: AppArrays
    drawn: dict[int, int]
    message: Any


@dataclass(frozen=True)
class _NodesAlone:
    """Grid of a strategy that configures a round: it lists the nodes, and sends them nothing."""

    get_node_ids: Callable[[], list[int]]

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"the strategy uses grid.{name} while it configures a round: inside CentralDP it may only ask for the "
            f"nodes (grid.get_node_ids), because what it asks a client itself would be answered without noise"
        )


@dataclass
class CentralDP:
    """Flower strategy with differential privacy for whole clients, in the aggregate view.

    Args:
        strategy: of Flower; it must ask every connected node once, since clients are drawn here.
        clip: C, L2 bound on a client's update. clients: N, public. rate: chance of each client to take part in a round; N x rate
            is a whole number, by which every sum is divided. rounds: T.
        delta: below 1 / N. epsilon: target that calibrates the noise; or noise_multiplier, from which epsilon follows.
        out: the run directory, which must be new: an absolute path or one that begins with ~.
        seed: makes noise and sampling reproducible, for simulations only: nobody is protected, and the statement says so. By
            default they are secret.
        evaluate: let clients evaluate; their answers reach the strategy without clip or noise, and the statement says so.
        budget: of a population, from `fedveil budget create`: the run charges it, and is refused if it does not fit.
        untouched: as in `AppArrays`.

    Raises:
        ConfigError: a number is impossible.
    """

    strategy: Any
    _: KW_ONLY
    clip: float
    clients: int
    rate: float
    rounds: int
    delta: float
    out: str | Path
    epsilon: float | None = None
    noise_multiplier: float | None = None
    seed: int | None = None
    evaluate: bool = False
    budget: str | Path | None = None
    untouched: Sequence[str] = UNTOUCHED

    def __post_init__(self) -> None:
        for key in ("clip", "delta", "rate", "epsilon", "noise_multiplier"):
            if (value := getattr(self, key)) is not None:
                setattr(self, key, positive_number(key, value))
        for key in ("clients", "rounds"):
            setattr(self, key, whole_number(key, getattr(self, key)))
        _check_strategy(self.strategy)
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ConfigError(f"give epsilon, or a noise_multiplier > 0; got {self.epsilon} and {self.noise_multiplier}")
        fraction, least = getattr(self.strategy, "fraction_train", 1.0), getattr(self.strategy, "min_train_nodes", 0)
        if fraction < 1 and least < self.clients:  # an early check; the nodes it really asks are checked in `_asked`
            raise ConfigError(
                f"fraction_train = {fraction}: CentralDP draws clients itself, of all nodes: set it to 1.0, and give rate"
            )
        self._path = absolute_path("out", self.out)
        cohort = round(self.rate * self.clients)
        if not (1 <= cohort <= self.clients and math.isclose(self.rate * self.clients, cohort, rel_tol=1e-9)):
            raise ConfigError(
                f"rate = {self.rate} of clients = {self.clients} is not a whole number of clients from 1 to {self.clients}: "
                f"give a rate such as {max(cohort, 1)} / {self.clients}"
            )
        self._cohort = cohort
        self._config(Layout(("model",), ((1,),)))  # refuses impossible numbers early
        self._run: AppRun | None = None
        self._sent: dict[int, _Round] = {}
        self._first: list[Kinds] = []
        self._fitting = FittingClients()
        self._ended, self._warned, self._closing = "", False, ""
        self._nodes: list[int] = []
        self._connected = self.clients

    def start(self, grid: Any, initial_arrays: Any, num_rounds: int = 3, *more: Any, **options: Any) -> Any:
        """Run as `Strategy.start` of Flower does, with the same arguments, then close the run directory.

        The run ends early, with a warning, if no reply has the model's arrays (any more), if the strategy produces no such
        arrays, or if the model has diverged. The remaining rounds then do nothing and cost nothing.

        Raises:
            ConfigError: num_rounds is not `rounds`, the inner strategy overrides `start`, which sees every reply, or this run has
                begun before.
        """
        from flwr.serverapp.strategy import Strategy

        if self._run is not None:
            raise ConfigError(
                f"out = '{self.out}': this CentralDP has begun its run, and what was released there counts: to train again, make "
                f"another CentralDP with a new folder for out",
                key="out",
            )
        if getattr(type(self.strategy), "start", None) != Strategy.start:
            raise ConfigError(
                f"{type(self.strategy).__name__} has a start of its own, which sees the clients' replies before the noise: use "
                f"the start of Flower's Strategy"
            )
        if num_rounds != self.rounds:
            raise ConfigError(f"num_rounds = {num_rounds}, and the noise is for rounds = {self.rounds}: give both the same")
        if not self.evaluate:
            _log.warning(
                "CentralDP asks no client to evaluate: the answers would leave without noise (CentralDP(evaluate=True) asks)"
            )
        try:
            result = Strategy.start(self, grid, initial_arrays, num_rounds, *more, **options)
        except BaseException:
            self._disconnect()
            raise
        self.close()
        return result

    def _disconnect(self) -> None:
        """Close the connection to the ledger, and leave the run directory without a closing."""
        if self._run is not None:
            self._run.close()

    def close(self) -> str:
        """Close the run directory and return the closing digest, empty if no round was begun.

        `start` does so itself; a loop that calls `configure_train` and `aggregate_train` closes at its end.
        """
        if self._run is not None and not self._closing:
            done, early = len(self._run.history), f"closed after {len(self._run.history)} of {self.rounds} rounds"
            self._ended = self._ended or (early if done < self.rounds else "")
            self._closing = self._run.end(self._ended)
            _log.warning("closing digest of %s: %s (pin it with fedveil verify --pin)", self.out, self._closing)
        return self._closing

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner strategy, such as a setting that an app reads."""
        if name.startswith("_") or name == "strategy":
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def summary(self) -> None:
        """Log the guarantee and the inner strategy."""
        cost = f"epsilon = {self.epsilon:g}" if self.epsilon is not None else f"noise multiplier {self.noise_multiplier:g}"
        _log.warning(
            "central DP: %s, delta = %g, clip %g, %d rounds, recorded in %s", cost, self.delta, self.clip, self.rounds, self.out
        )
        self.strategy.summary()

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
        """Return the strategy's messages to the clients drawn for this round."""

        if self._ended:
            return []
        try:
            start_arrays = AppArrays.of(arrays, self.untouched, self._first)
        except ConfigError as problem:
            if self._run is None:
                raise
            return self._end(f"the model of round {server_round} cannot be trained", str(problem))
        messages = self._messages_by_node(server_round, arrays, config, grid)
        if self._run is None:
            self._rehearse(start_arrays, next(iter(messages.values())), server_round)
        run = self._begun(start_arrays)
        if not run.admits():
            raise BudgetExhausted(f"round {server_round}: the {self.rounds} rounds that the noise is for are spent")
        nodes = list(messages)
        chosen = run.door.randomness.coins(run.setting.rate, self.clients, "clients", server_round - 1)
        drawn = {nodes[place]: place for place in chosen.tolist() if place < len(nodes)}
        self._sent[server_round] = _Round(start_arrays, drawn, messages[nodes[0]])
        return [messages[node] for node in drawn]

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        """Return the strategy's step from the noisy mean of the replies' updates."""

        if self._ended:
            return None, None
        run, sent = self._run, self._sent.pop(server_round, None)
        if run is None or sent is None:
            raise ConfigError(f"round {server_round} was not sent out: configure_train comes before aggregate_train")
        updates, failures = _usable_updates(run, sent, replies)
        kinds = {node: type(failures.get(place)) for node, place in sent.drawn.items()}
        others = [node for node, kind in kinds.items() if kind is Misfit]
        fitting = [node for node, kind in kinds.items() if kind not in (Misfit, _NoAnswer)]
        misfit = str(failures[sent.drawn[others[0]]]) if others else ""
        if self._fitting.none_left(kinds, fitting, others):
            self._end(f"no reply of round {server_round} has the arrays of the model", misfit)
            return None, None
        if misfit:
            _log.warning("round %d: a reply that does not fit counts as zero: %s", server_round, printable(misfit))
        elif sent.drawn and not updates:
            _log.warning(
                "round %d: no reply can be used, so that noise alone moves the model: private/failures.csv", server_round
            )
        drawn = [updates.get(place, sent.arrays.nothing) for place in sent.drawn.values()]
        mean = run.release(server_round - 1, drawn, {place: printable(p) for place, p in failures.items()})
        stepped, metrics = self.strategy.aggregate_train(server_round, [self._reply(sent.arrays, sent.message, mean)])
        missing = [name for name in sent.arrays.layout.names if stepped is None or name not in stepped]
        if stepped is None or missing:
            made = "nothing" if stepped is None else f"a model without {missing[:6]}"
            self._end(
                f"{type(self.strategy).__name__} makes {made} of the one reply that it gets",
                "a strategy that compares clients has nothing to compare here: take FedAvg, FedProx, FedAdam or FedAvgM",
            )
            return None, metrics
        return sent.arrays.as_sent(stepped), metrics

    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
        """Return the strategy's messages if clients may evaluate, else none."""
        if not self.evaluate or self._ended:
            return []
        asked = list(self.strategy.configure_evaluate(server_round, arrays, config, grid))
        if asked and not self._warned:
            self._warned = True
            _log.warning("clients evaluate: what they answer leaves without clip or noise, and no epsilon of this run covers it")
        return asked

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        """Return the strategy's result if clients may evaluate, else None."""
        return self.strategy.aggregate_evaluate(server_round, replies) if self.evaluate and not self._ended else None

    def _messages_by_node(self, server_round: int, arrays: Any, config: Any, grid: Any) -> dict[int, Any]:
        """Return the strategy's message to each node.

        Raises:
            ConfigError: it asks more nodes than there are clients, some of them twice, or not all of them.
        """
        connected: list[int] = []

        def nodes() -> list[int]:
            node_ids = list(grid.get_node_ids())
            connected.append(len(set(node_ids)))
            return node_ids

        made = list(self.strategy.configure_train(server_round, arrays, config, _NodesAlone(nodes)))
        messages = {message.metadata.dst_node_id: message for message in made}
        name = type(self.strategy).__name__
        if not messages or (self._run is None and len(messages) > self.clients):
            raise ConfigError(f"clients = {self.clients}, and {name} asks {len(messages)} nodes")
        if not connected:
            nodes()
        if len(messages) < min(connected):  # nodes may have joined in the meantime
            raise ConfigError(
                f"{name} asks {len(messages)} of {min(connected)} connected nodes, and CentralDP draws clients itself, of all "
                f"nodes, by rate = {self.rate:g}: let the strategy ask all of them (fraction_train = 1.0)"
            )
        if len(made) > len(messages):
            raise ConfigError(f"{name} sends {len(made)} messages to {len(messages)} nodes: a client answers once per round")
        return self._of_clients(messages)

    def _of_clients(self, messages: dict[int, Any]) -> dict[int, Any]:
        """Return the messages to at most `clients` nodes, those that were asked first; log when their number changes."""
        self._nodes = list(dict.fromkeys([*self._nodes, *sorted(messages)]))
        asked = [node for node in self._nodes if node in messages]
        if len(asked) != self.clients and len(asked) != self._connected:
            more = "the mean divides by clients x rate, so that updates shrink: give their number as clients"
            if len(asked) > self.clients:
                more = f"the {len(asked) - self.clients} that joined last are left out"
            _log.warning("%d nodes are connected, and clients = %d: %s", len(asked), self.clients, more)
        self._connected = len(asked)
        return {node: messages[node] for node in asked[: self.clients]}

    def _rehearse(self, arrays: AppArrays, message: Any, server_round: int) -> None:
        """Let a copy of the inner strategy step from a mean of zero, before anything is charged.

        Raises:
            ConfigError: it needs more than a mean, such as metrics of the clients.
        """
        try:
            copied = deepcopy(self.strategy)
        except Exception:  # it holds what cannot be copied, such as a connection
            return
        try:
            copied.aggregate_train(server_round, [self._reply(arrays, message, arrays.nothing)])
        except Exception as problem:
            raise ConfigError(
                f"{type(self.strategy).__name__} cannot take a step from the mean update alone, and CentralDP gives it no more "
                f"({problem}): take FedAvg, FedProx, FedAdam or FedAvgM; nothing was charged"
            ) from problem

    def _reply(self, arrays: AppArrays, message: Any, step: Floats) -> Any:
        """Return the one reply that the inner strategy gets: the model after a step [d]."""
        from flwr.app import Message, MetricRecord, RecordDict

        weight = getattr(self.strategy, "weighted_by_key", "num-examples")
        name = getattr(self.strategy, "arrayrecord_key", "arrays")
        return Message(RecordDict({name: arrays.moved(step), "metrics": MetricRecord({weight: 1})}), reply_to=message)

    def _end(self, why: str, details: str) -> list[Any]:
        """End the run; the details are only logged."""
        self._ended = why
        _log.warning("%s: the run ends, and nothing more is released or charged. %s", why, printable(details))
        return []

    def _begun(self, arrays: AppArrays) -> AppRun:
        if self._run is None:
            self._run = run = AppRun.begin(self._path, self._config(arrays.layout), self.clients, self._page())
            self._first = [arrays.kinds]
            norm = run.noise_norm
            _log.log(
                logging.WARNING if norm > self.clip else logging.INFO,
                "the noise of each round has norm %.3g on the mean of updates, each of which has at most %g, the clip",
                norm,
                self.clip,
            )
            if arrays.caveat:
                _log.warning("%s", arrays.caveat)
        if self._run.setting.layout != arrays.layout:
            raise ConfigError(f"the model has other arrays than in the first round: {list(arrays.layout.names)[:6]}")
        return self._run

    def _config(self, layout: Layout) -> Config:
        budget = None if self.budget is None else str(absolute_path("budget", self.budget))
        privacy: dict[str, Any] = {"delta": self.delta, "view": "aggregate", "budget": budget}
        privacy |= {"epsilon": self.epsilon} if self.epsilon is not None else {"noise_multiplier": self.noise_multiplier}
        sections: dict[str, dict[str, Any]] = {
            "method": {"name": "dp-fedavg", "clip": self.clip},
            "training": {"rounds": self.rounds, "clients_per_round": self._cohort},
            "privacy": privacy,
            "run": {"seed": self.seed or 0, "seeded_noise": self.seed is not None},
        }
        return matching_configuration(sections, self.clients, layout, evaluate=self.evaluate)

    def _page(self) -> str:
        """Return the text that is particular to this run; its digest is in the ledger's first row."""
        evaluation = "CentralDP asks no client to evaluate."
        if self.evaluate:
            evaluation = (
                "**Clients evaluate, and what they answer reaches the strategy, its result and its log without clip or noise: "
                "the guarantee does not cover it.**"
            )
        return f"""\
# A run of a Flower app

Strategy: {type(self.strategy).__name__}, inside fedveil's CentralDP. It was shown the noisy mean of each round and no reply of a
client. The metrics of clients' training are dropped. {evaluation}

What the app asks clients outside this strategy, such as queries or evaluation by the grid, before, between or after its rounds,
fedveil does not see: what they answer there leaves without clip or noise, and the guarantee does not cover it.

The server saw every update before the noise, and who took part: the statement assumes that it is trusted with both. One node is
one client; a client that runs several nodes is protected as a group. Updates were clipped by the server.

How clients train, and on what, fedveil does not know.
"""


def _usable_updates(run: AppRun, sent: _Round, replies: Iterable[Any]) -> tuple[dict[int, Floats], dict[int, Exception]]:
    """Return updates by the node's position, and for the other nodes the reasons why there are none."""
    answers: dict[int, Any] = {}
    for reply in replies:
        answers.setdefault(reply.metadata.src_node_id, reply)
    updates: dict[int, Floats] = {}
    failures: dict[int, Exception] = {}
    for node, place in sent.drawn.items():
        try:
            updates[place] = _usable(run, sent, answers.get(node))
        except Exception as problem:
            failures[place] = problem
    return updates, failures


def _check_strategy(strategy: object) -> None:
    """Refuse a strategy that Flower would call by other methods than those that add the noise.

    Raises:
        ConfigError: it is not one of the message API.
    """
    from flwr.serverapp.strategy import Strategy

    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"{type(strategy).__module__}.{type(strategy).__name__} is not a strategy of flwr.serverapp.strategy, and CentralDP "
            f"takes these alone: an app of NumPyClient with a server_fn gets noise at each client (dp_mod), or another server"
        )


def _usable(run: AppRun, sent: _Round, reply: Any) -> Floats:
    """Return the update of a reply; raise if it has none that may be released."""
    if reply is None or reply.has_error():
        raise _NoAnswer("no reply" if reply is None else f"an error: {reply.error.reason}")
    update = sent.arrays.update(reply.content)
    if names := sent.arrays.refilled(reply.content):  # depends on values: it must end no charged run
        raise (UpdateRefused if run.history else Misfit)(str(not_constant(names)))
    if problem := unfit(update):
        raise UpdateRefused(problem)
    return update
