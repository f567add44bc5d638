"""The server's process: it has the configuration, the public test set and the run directory, and reaches clients by Flower.

It starts the SuperLink (`superlink`), which carries messages, and restarts it if it ends. The run itself is in this process, and
is resumed like any other.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any

from fedveil.deploy.deployed_data import public_part
from fedveil.deploy.flower_api import Control, Endpoint, TaskQueue, node_keys, require_fleet_routes, server_grid
from fedveil.deploy.grid_engine import GridExchange
from fedveil.deploy.masked_rounds import engine_for
from fedveil.deploy.membership import SeenClients, server_expiry
from fedveil.deploy.network_folder import public_key_of
from fedveil.deploy.offers import ConsentingClients, offer_of
from fedveil.deploy.programs import Program, ended_by_signal, require_free, running
from fedveil.deploy.strict_grid import LastingGrid
from fedveil.deploy.superlink import hearing
from fedveil.deploy.wire_format import printable
from fedveil.errors import FedveilError
from fedveil.experiment.receipts import ServerReceipts
from fedveil.experiment.resolve import resolve, resolve_here, with_run
from fedveil.experiment.result import Result
from fedveil.experiment.run import train
from fedveil.experiment.shared_budget import affordable
from fedveil.mechanism.mechanisms import STATE_FILE

if TYPE_CHECKING:
    from fedveil.deploy.grid_engine import GridEngine
    from fedveil.deploy.network_folder import NetworkFolder
    from fedveil.experiment.config import Config
    from fedveil.experiment.experiment import Experiment
    from fedveil.federation.history import Row
    from fedveil.federation.progress import Federation

PATIENCE = 600.0
"""Seconds that the server waits for an answer if the configuration does not say."""
_POLL = 0.2
_PATH = 100
"""Length in bytes of a socket path that every system accepts."""


@dataclass(frozen=True)
class Serving:
    """Options of a server.

    Args:
        network: its folder. out: run directory. resume: resume the run there. wait: clients that must be online first.
        tell: called with a line for each event. on_round: called with each row of the history.
        on_up: called when clients can connect. note: called with what changes in the state of the server (`Status.update`).
    """

    network: NetworkFolder
    out: Path
    resume: bool = False
    wait: int = 1
    tell: Callable[[str], None] = lambda line: None
    on_round: Callable[[Row], None] | None = None
    on_up: Callable[[], None] = lambda: None
    note: Callable[..., None] = lambda **values: None


def serve(config: Config, serving: Serving) -> Result:
    """Train as configured with the clients of a network.

    Raises:
        FedveilError: as `run`; or the network does not start.
    """
    require_fleet_routes()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    network, keys = serving.network, {c: public_key_of(path) for c, path in serving.network.admitted().items()}
    for line in server_expiry(network):
        serving.tell(line)
    experiment = resolve(config)
    prepared = public_part(experiment)
    known = len({*keys, *dict(network.removed())})
    if prepared.population.clients > known:
        raise FedveilError(
            f"data.partition or data.source has {prepared.population.clients} clients, and {known} were admitted: admit the "
            f"others with fedveil net admit KEY.pub, or set the number of clients"
        )
    roster = network.roster if experiment.setting.secure_aggregation == "on" else None
    if not serving.resume:
        affordable(experiment, "serve")
    config = with_run(config, engine="flower")
    require_free(network.address, network.port)
    _forget_earlier(network)
    with ended_by_signal(), ExitStack() as stack:
        inside = stack.enter_context(_socket(network))
        stack.enter_context(hearing(inside, serving.tell))
        link = _superlink(network, inside, answer_bytes(experiment))
        stack.enter_context(running(link, serving.tell, 1.0)).wait_for(network.port)
        serving.on_up()
        endpoint = Endpoint(inside, None, network.secret.read_bytes())
        grid = stack.enter_context(LastingGrid(lambda: _begun(endpoint, keys, link), serving.tell))
        timeout = experiment.engine.timeout or PATIENCE

        def nodes() -> dict[int, int]:
            clients = {key: client for client, key in keys.items()}  # a node with another key is no client
            online = {clients[key]: node for node, key in node_keys(grid).items() if key in clients}
            seen.note(online)
            serving.note(clients_online=len(online), clients_consented=len(versions.keys() & online.keys()))
            return online

        versions = dict[int, str]()
        seen = SeenClients(network, versions)
        reach = GridExchange(grid, nodes, timeout, _POLL)

        receipts: ServerReceipts | None = None

        def consenting(run: str) -> Callable[[Federation], GridEngine]:
            nonlocal receipts
            number = prepared.population.clients
            serving.note(run=run, rounds=experiment.setting.rounds, rounds_done=0, clients=number, state="waiting for clients")
            receipts = ServerReceipts.of(experiment.setting, serving.out, run, network.receipt_key)
            offered = partial(offer_of, run, config=config, receipt_key=receipts.key if receipts else "", roster=roster)
            exchange = ConsentingClients(reach, offered, number, serving.tell, versions=versions)
            exchange.gather(set(range(number)), min(serving.wait, number), partial(time.sleep, 1))
            return partial(engine_for, exchange=exchange, run=run, folder=serving.out, receipts=receipts, tell=serving.tell)

        with _naming_log(link):
            resolved = resolve_here(config, prepared.population, serving.out if serving.resume else None)
            result = train(resolved, prepared, serving.out, serving.on_round, resume=serving.resume, clients=consenting)
    if receipts is not None:
        receipts.issue(None, result.model.vector.numpy().tobytes())
    (serving.out / STATE_FILE).unlink(missing_ok=True)  # noiseless sums, which only an interrupted run needs
    return result


def answer_bytes(experiment: Experiment) -> int:
    """Return the largest size of a client's answer in bytes: 8 per integer, which no plan exceeds, plus overhead."""
    return 8 * experiment.setting.layout.dimension + 2**18


@contextmanager
def _socket(network: NetworkFolder) -> Iterator[Path]:
    """Yield the socket path for the SuperLink: in the network's folder, or elsewhere if that path is too long for a socket."""
    at = network.path.absolute() / "flower-superlink"
    if len(bytes(at)) < _PATH:
        try:
            yield at
        finally:
            at.unlink(missing_ok=True)
        return
    with TemporaryDirectory(prefix="fedveil-", dir=None if len(gettempdir()) < _PATH - 40 else "/tmp") as folder:
        yield Path(folder) / at.name


def _forget_earlier(network: NetworkFolder) -> None:
    """Remove the SuperLink database of fedveil 0.2, which holds what clients had sent."""
    for path in network.path.glob("superlink.db*"):
        path.unlink(missing_ok=True)


def _superlink(network: NetworkFolder, inside: Path, answer: int) -> Program:
    command = [Path(sys.executable).name, "-m", "fedveil.deploy.superlink", "--network", str(network.path)]
    command += ["--port", str(network.port), "--socket", str(inside), "--answer-bytes", str(answer)]
    return Program(command, network.path / "flower", network.path / "superlink.log", "flower-superlink")


@contextmanager
def _begun(endpoint: Endpoint, keys: Mapping[int, bytes], link: Program) -> Iterator[Any]:
    """Yield the grid of a new run of Flower, to which all keys are admitted.

    Raises:
        FedveilError: the SuperLink does not start it.
    """
    control, queue = Control(endpoint), TaskQueue(endpoint, "flwr-serverapp")
    try:
        with _naming_log(link):
            for client, key in keys.items():
                control.register(key, f"client-{client}")
            run, end = control.start_run(), time.monotonic() + PATIENCE
        while (token := queue.take(run)) is None:
            if time.monotonic() > end:
                raise FedveilError(f"the SuperLink does not hand over its server task; its log is {link.log}: {link.why()}")
            time.sleep(_POLL)
    finally:
        control.close()
        queue.close()
    with server_grid(endpoint, token) as grid:
        yield grid


@contextmanager
def _naming_log(link: Program) -> Iterator[None]:
    """Turn errors of Flower's connection into errors with Flower's own text and the location of its log.

    Raises:
        FedveilError: instead of an error of the connection or its response.
    """
    import httpx

    try:
        yield
    except httpx.HTTPError as problem:
        text = getattr(getattr(problem, "response", None), "text", "") or str(problem)
        raise FedveilError(
            f"Flower's SuperLink failed ({printable(text)}); its log is {link.log}: {link.why()}; go on with --resume"
        ) from problem
