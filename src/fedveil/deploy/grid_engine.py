"""Engine that reaches its clients through a Flower grid: on other machines, or in Flower's simulation.

The server makes each client's plan itself, from that client's earlier releases, and uses only the release of an answer. A client
that refuses, answers anything else, or does not answer is left out with the reason, and the round goes on.

Each node knows its own number, stores its client's states on disk, and handles the same messages as on another machine.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from fedveil.deploy.client_node import ClientNode, ClientStates
from fedveil.deploy.programs import environment, require_flower
from fedveil.deploy.round_messages import (
    RefusalMessage,
    ReleaseMessage,
    RoundMessage,
    TaskMessage,
    plan_name,
    read_reply,
    read_task,
    received_contribution,
    received_upload,
    release_bounds,
    round_bytes,
    task_bytes,
)
from fedveil.deploy.wire_format import WireError, content_of, instruction, parts_of, record
from fedveil.errors import ConfigError, FedveilError, UpdateRefused
from fedveil.experiment.receipts import Answer, Answers
from fedveil.federation.round import ClientTask, Context, Outcome, planned
from fedveil.ledger.files import owner_only
from fedveil.mechanism.plan import Plan
from fedveil.release.release_layout import NullLedger

if TYPE_CHECKING:
    from fedveil.experiment.receipts import ServerReceipts

_log = logging.getLogger(__name__)


class MessageGrid(Protocol):
    """Part of `flwr.serverapp.Grid` that the engine uses."""

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]: ...


class Exchange(Protocol):
    """Transport of messages to the clients of a round, and of their answers to the server."""

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> Mapping[int, bytes | str]:
        """Return each client's reply, or an error string.

        Args:
            messages: parts of each client's message.
        """
        ...


GONE = "no machine has joined as this client, or it was lost and did not come back in time"
"""Error string for a client that has no node."""
_LOST = 5
"""Flower's error code for a message whose node is gone."""


@dataclass(frozen=True)
class GridExchange:
    """Exchange through a grid of Flower.

    A client whose machine is lost is asked again when it is back: it answers from its disk with the same bits.

    Args:
        grid: of Flower. nodes: returns the current node of each client. timeout: seconds to wait for an answer, or None.
        poll: seconds between two checks. absence: seconds that a machine may be gone.
    """

    grid: MessageGrid
    nodes: Callable[[], Mapping[int, int]]
    timeout: float | None = None
    poll: float = 0.05
    absence: float = 120.0

    @property
    def online(self) -> Collection[int]:
        """Return the clients that have a node."""
        return self.nodes().keys()

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> dict[int, bytes | str]:
        """Return each client's first reply, or an error string; see `Exchange.answers`."""
        begin = time.monotonic()
        results: dict[int, bytes | str] = {}
        waiting: dict[str, int] = {}
        missed = dict.fromkeys(messages, begin)  # start of the absence
        while (waiting or missed) and (self.timeout is None or time.monotonic() < begin + self.timeout):
            if missed:
                waiting |= self._pushed(messages, missed)
            for answer in self.grid.pull_messages(list(waiting)):
                client = waiting.pop(answer.metadata.reply_to_message_id, None)
                if client is not None and answer.has_error() and answer.error.code == _LOST:
                    missed[client] = time.monotonic()
                elif client is not None:
                    results[client] = content_of(answer)
            for client in [c for c, since in missed.items() if time.monotonic() > since + self.absence]:
                results[client] = GONE
                del missed[client]
            if waiting or missed:
                time.sleep(self.poll)
        late = "" if self.timeout is None else f"no answer within {self.timeout:g} seconds"
        return results | dict.fromkeys(waiting.values(), late) | dict.fromkeys(missed, GONE)

    def _pushed(self, messages: Mapping[int, tuple[bytes, ...]], missed: dict[int, float]) -> dict[str, int]:
        """Send their messages to the missed clients whose machines are online."""
        nodes = self.nodes()
        online = [client for client in missed if client in nodes]
        for client in online:
            del missed[client]
        pushed = self.grid.push_messages([instruction(nodes[client], messages[client]) for client in online]) if online else ()
        return dict(zip(pushed, online, strict=True))


class GridEngine:
    """Engine over an `Exchange`.

    Args:
        context: of the server; the clients' data in it are not used. run: the name of the run on the wire.
        tell: called with a line for each client that is left out of a round, only once in a row for the same reason.
        again: called with the clients of a round in which none took part, and how often they were asked before; waits, and
            returns whether to ask them again. None: the clients are simulated, so such a client has failed.
        receipts: of the run, which clients get with the next round; None: they get none.
    """

    def __init__(
        self,
        context: Context,
        run: str,
        exchange: Exchange,
        tell: Callable[[str], None] = _log.warning,
        *,
        again: Callable[[Set[int], int], bool] | None = None,
        receipts: ServerReceipts | None = None,
    ) -> None:
        self.context, self.run, self.exchange, self.tell, self.again = context, run, exchange, tell, again
        self.receipts = receipts
        self._left_out: dict[int, str] = {}

    def __enter__(self) -> Self:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(self, *exc: object) -> None:
        torch.set_num_threads(self._threads)

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        """Send all tasks, wait for the answers, and check them in task order; clients that are left out come last."""
        todo = list(tasks)
        if not todo:
            return
        plans = {task.client: planned(self.context, task) for task in todo}
        names = {client: plan_name(plan, self.context.door.layout) for client, plan in plans.items()}
        first = todo[0]
        common = self.round_bytes(first)
        asked = {task.client: TaskMessage(self.run, task.released.round, task.client, task.weight) for task in todo}
        messages, tries = {client: (common, task_bytes(task)) for client, task in asked.items()}, 0
        while True:
            answers, left_out, used = self.exchange.answers(messages), list[Outcome](), list[Answer]()
            for task in todo:
                client = task.client
                plan, answer = plans[client], answers[client]
                assert isinstance(plan, Plan)
                try:
                    if isinstance(answer, str):
                        raise WireError(answer)
                    message = self._message(answer, asked[client], names[client], plan)
                    outcome = self._outcome(task, plan, message)
                    self._left_out.pop(client, None)
                    used.append(Answer(client, hashlib.sha256(answer).hexdigest()))
                    yield outcome
                except (WireError, UpdateRefused) as problem:
                    left_out.append(self._without(task, str(problem)))
            if len(left_out) < len(todo) or self.again is None or not self.again(asked.keys(), tries):
                break
            tries += 1
        if self.receipts is not None:
            self.receipts.record(Answers(first.released.round, tuple(used)))
        yield from left_out

    def round_bytes(self, task: ClientTask) -> bytes:
        """Return the message of a round to all its clients, of which `task` is the part of one."""
        released, state = task.released, task.policy_state if self.context.summed else {}
        receipt = "" if self.receipts is None else self.receipts.issue(released.round, released.model.numpy().tobytes())
        return round_bytes(RoundMessage(self.run, released, state, task.buffers, receipt))

    def _without(self, task: ClientTask, problem: str) -> Outcome:
        """Return the outcome of a client that is left out; the same reason is told only once in a row."""
        if self._left_out.get(task.client) != problem:
            self.tell(f"round {task.released.round}: client {task.client} is left out: {problem}")
        self._left_out[task.client] = problem
        return Outcome(task.client, None, task.policy_state, {}, error=problem, remote=self.again is not None)

    def _message(self, answer: bytes, asked: TaskMessage, name: str, plan: Plan) -> ReleaseMessage:
        door = self.context.door
        message = read_reply(answer, asked, door.parts.dimension, release_bounds(door, plan) or None)
        if isinstance(message, RefusalMessage):
            raise WireError(f"refused: {message.reason}")
        if message.plan != name:
            raise WireError("it made another plan than the server: one of them has lost its state, or another version of fedveil")
        return message

    def _outcome(self, task: ClientTask, plan: Plan, message: ReleaseMessage) -> Outcome:
        door, state = self.context.door, task.policy_state
        if self.context.summed:
            contribution = received_contribution(door, plan, message)
            return Outcome(task.client, contribution, state, {}, remote=True)
        upload = received_upload(door, plan, message)
        state = self.context.policy.observe(state, self.context.observed(upload.upload, task.released))
        return Outcome(task.client, upload, state, {}, remote=True)


_START = 120.0
"""Seconds that Ray gets to start."""


class FlowerSimulation:
    """Engine `flower` without other machines: Flower's simulation.

    Args:
        context: with all clients' examples, which are passed to the simulation's processes.
        folder: for the clients' states, one folder each. timeout: as in `GridExchange`.
    """

    def __init__(self, context: Context, folder: Path, timeout: float | None = None) -> None:
        self.context, self.folder, self.timeout = context, folder, timeout

    def __enter__(self) -> Self:
        require_flower()
        self._stack = ExitStack()
        shared = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fedveil-")))
        self._stack.enter_context(environment(FLWR_HOME=str(shared)))
        # the whole run is charged to the one ledger of the run directory
        client_context = replace(self.context, door=replace(self.context.door, ledger=NullLedger(), memory=None))
        with open(shared / "context", "wb", opener=owner_only) as file:
            _pickled(client_context, file)
        self._stop, grids = threading.Event(), Queue[Any]()
        self._thread = threading.Thread(target=self._simulate, args=(shared, grids), daemon=True)
        self._thread.start()
        started = grids.get(timeout=_START)
        if isinstance(started, BaseException):
            raise FedveilError(f"the simulation of Flower did not start: {started}") from started
        nodes = dict(enumerate(sorted(started.get_node_ids())))
        self._engine = GridEngine(self.context, self.context.door.run, GridExchange(started, lambda: nodes, self.timeout))
        self._engine.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine.__exit__(*exc)
        self._stop.set()
        self._thread.join()
        self._stack.close()

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        """Run the tasks; see `GridEngine.map`."""
        return self._engine.map(tasks)

    def _simulate(self, shared: Path, grids: Queue[Any]) -> None:
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation

        logging.getLogger("flwr").setLevel(logging.ERROR)
        server, client = ServerApp(), ClientApp()
        folder = str(self.folder.absolute())

        def serve(grid: Any, context: Any) -> None:
            while len(list(grid.get_node_ids())) < len(self.context.clients):
                self._stop.wait(0.05)
            grids.put(grid)
            self._stop.wait()

        def answer(message: Any, context: Any) -> Any:
            from flwr.app import Message

            return Message(record([_answer(str(shared / "context"), folder, parts_of(message.content))]), reply_to=message)

        quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
        backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": quiet}
        server.main()(serve)
        client.train()(answer)
        try:
            run_simulation(server, client, num_supernodes=len(self.context.clients), backend_config=backend)
        except BaseException as problem:
            grids.put(problem)


def _answer(context: str, folder: str, parts: list[bytes]) -> bytes:
    """Return the answer of a simulated client, in a process of Ray."""
    if len(parts) != 2:
        raise WireError("a message to a client has two parts")
    torch.set_num_threads(1)
    task = read_task(parts[1])
    client_context = _context(context)
    node = ClientNode(client_context, client_context.door.run, task.client, ClientStates(Path(folder) / str(task.client)), 2**62)
    return node.answer(*parts)


@lru_cache(maxsize=1)
def _context(path: str) -> Context:
    """Return the context that the engine has passed to its own processes."""
    with open(path, "rb") as file:
        context: Context = pickle.load(file)
    return context


def _pickled(context: Context, file: Any) -> None:
    from ray import cloudpickle

    try:
        cloudpickle.dump(context, file)
    except Exception as error:
        raise ConfigError(
            f"run.engine = 'flower' hands the run to processes of its own, and a part of it cannot be pickled: "
            f"{type(error).__name__}: {error}; leave it out of the model, the task or the method, or set run.engine = 'inline'"
        ) from error
