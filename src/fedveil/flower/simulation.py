"""`run.engine = "flower"`: the clients of a run as nodes of Flower's simulation, on Ray, in processes of their own.

Each node knows its own number, keeps its client's states on disk, and goes through the same messages as on another machine.
"""

from __future__ import annotations

import logging
import pickle
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, Self

import torch

from fedveil.errors import ConfigError, FedveilError
from fedveil.flower.client_node import ClientNode
from fedveil.flower.client_states import ClientStates
from fedveil.flower.flower_messages import parts_of, record
from fedveil.flower.grid_engine import GridEngine, GridExchange
from fedveil.flower.quiet import environment, require_flower
from fedveil.flower.round_messages import read_task
from fedveil.flower.wire_format import WireError
from fedveil.ledger.owner_only import owner_only
from fedveil.release.release_row import NullLedger

if TYPE_CHECKING:
    from fedveil.federation.round import ClientTask, Context, Outcome

_START = 120.0
"""Seconds that Ray has to come up."""


class FlowerSimulation:
    """The engine.

    Args:
        context: with all clients' examples, which the simulation hands to its processes.
        folder: where the clients keep their states, one folder each. timeout: as in `GridExchange`.
    """

    def __init__(self, context: Context, folder: Path, timeout: float | None = None) -> None:
        self.context, self.folder, self.timeout = context, folder, timeout

    def __enter__(self) -> Self:
        require_flower()
        self._stack = ExitStack()
        shared = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fedveil-")))
        self._stack.enter_context(environment(FLWR_HOME=str(shared)))
        # all of the run is charged to the one ledger of the run directory
        own = replace(self.context, door=replace(self.context.door, ledger=NullLedger(), memory=None))
        with open(shared / "context", "wb", opener=owner_only) as file:
            _pickled(own, file)
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
        """As `GridEngine.map`."""
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
    """The answer of a simulated client, in a process of Ray."""
    if len(parts) != 2:
        raise WireError("a message to a client has two parts")
    torch.set_num_threads(1)
    task = read_task(parts[1])
    held = _context(context)
    node = ClientNode(held, held.door.run, task.client, ClientStates(Path(folder) / str(task.client)), 2**62)
    return node.answer(*parts)


@lru_cache(maxsize=1)
def _context(path: str) -> Context:
    """What the engine handed over to its own processes."""
    with open(path, "rb") as file:
        found: Context = pickle.load(file)
    return found


def _pickled(context: Context, file: Any) -> None:
    from ray import cloudpickle

    try:
        cloudpickle.dump(context, file)
    except Exception as error:
        raise ConfigError(
            f"run.engine = 'flower' hands the run to processes of its own, and a part of it cannot be pickled: "
            f"{type(error).__name__}: {error}; leave it out of the model, the task or the method, or set run.engine = 'inline'"
        ) from error
