"""The server's process: it has the configuration, the public test set and the run directory, and reaches its clients by Flower.

It starts the SuperLink, which carries messages, and starts it again if it ends. The run itself is here, and is resumed like any
other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import FedveilError
from fedveil.flower.grid_engine import GridEngine, GridExchange
from fedveil.flower.quiet import require_flower
from fedveil.network.certificates import public_key_of
from fedveil.network.consenting_clients import ConsentingClients
from fedveil.network.deployed_data import public_part
from fedveil.network.flower_api import Control, Endpoint, TaskQueue, node_keys, server_grid
from fedveil.network.programs import Program, ended_by_signal, require_free, running
from fedveil.run.result import Result
from fedveil.run.run import run_prepared

if TYPE_CHECKING:
    from fedveil.configuration.config import Config
    from fedveil.federation.history import Record
    from fedveil.federation.progress import Federation
    from fedveil.network.network_folder import NetworkFolder

PATIENCE = 600.0
"""Seconds that the server waits for an answer where the configuration says nothing else."""
_POLL = 0.2


@dataclass(frozen=True)
class Serving:
    """What a server does.

    Args:
        network: its folder. out: run directory. resume: go on with the run there. wait: clients that must be online first.
        tell: called with a line for each thing that happens. on_round: with each row of the history.
        on_up: called when clients can connect.
    """

    network: NetworkFolder
    out: Path
    resume: bool = False
    wait: int = 1
    tell: Callable[[str], None] = lambda line: None
    on_round: Callable[[Record], None] | None = None
    on_up: Callable[[], None] = lambda: None


def serve(config: Config, serving: Serving) -> Result:
    """Train as configured with the clients of a network.

    Raises:
        FedveilError: as `run`; or the network does not come up.
    """
    require_flower()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    network, keys = serving.network, {c: public_key_of(path) for c, path in serving.network.admitted().items()}
    prepared = public_part(config)
    if prepared.population.clients > len(keys):
        raise FedveilError(
            f"data.partition or data.source has {prepared.population.clients} clients, and {len(keys)} were admitted: admit the "
            f"others with fedveil net admit KEY.pub, or set the number of clients"
        )
    config = config.model_copy(update={"run": config.run.model_copy(update={"engine": "flower"})})
    require_free(_address(network), network.port)
    with ended_by_signal(), ExitStack() as stack:
        stack.enter_context(running(_superlink(network), serving.tell, 1.0)).wait_for(network.port)
        serving.on_up()
        endpoint = Endpoint(f"127.0.0.1:{network.port}", network.authority.read_bytes(), network.secret.read_bytes())
        grid = stack.enter_context(_grid(endpoint, keys))
        timeout = config.training.client_timeout or PATIENCE

        def nodes() -> dict[int, int]:
            clients = {key: client for client, key in keys.items()}  # a node with another key is nobody
            return {clients[key]: node for node, key in node_keys(grid).items() if key in clients}

        reach = GridExchange(grid, nodes, timeout, _POLL)

        def clients(job: Federation) -> GridEngine:
            exchange = ConsentingClients(reach, job.context.door.run, config, serving.tell)
            number = prepared.population.clients
            exchange.gather(set(range(number)), min(serving.wait, number), partial(time.sleep, 1))
            return GridEngine(job.context, job.context.door.run, exchange, serving.tell)

        return run_prepared(config, prepared, serving.out, serving.on_round, resume=serving.resume, clients=clients)


def _address(network: NetworkFolder) -> str:
    """Where the SuperLink listens: on this machine alone where nobody else is meant."""
    return "0.0.0.0" if network.host not in ("127.0.0.1", "localhost") else "127.0.0.1"


def _superlink(network: NetworkFolder) -> Program:
    certificate, key = network.certificates
    command = ["flower-superlink", "--host", _address(network), "--port", str(network.port), "--enable-supernode-auth"]
    command += ["--ssl-ca-certfile", str(network.authority), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    command += ["--database", str(network.path / "superlink.db"), "--isolation", "process"]
    command += ["--superexec-auth-secret-file", str(network.secret)]
    return Program(command, network.path / "flower", network.path / "superlink.log")


def _grid(endpoint: Endpoint, keys: Mapping[int, bytes]) -> Any:
    """Admit all keys, begin a run of Flower, and take its server task."""
    control, queue = Control(endpoint), TaskQueue(endpoint, "flwr-serverapp")
    try:
        for client, key in keys.items():
            control.register(key, f"client-{client}")
        run, end = control.start_run(), time.monotonic() + PATIENCE
        while (token := queue.take(run)) is None:
            if time.monotonic() > end:
                raise FedveilError("the SuperLink does not hand over its server task: is another server using this network?")
            time.sleep(_POLL)
    finally:
        control.close()
        queue.close()
    return server_grid(endpoint, token)
