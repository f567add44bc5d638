"""`fedveil net demo`: a server and its clients on one machine, as they would be on several; all but the run is removed again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from fedveil.accounting.types import View
from fedveil.configuration.config import Config
from fedveil.configuration.public_setting import population_of
from fedveil.errors import ConfigError
from fedveil.network.certificates import make_client_key
from fedveil.network.network_folder import NetworkFolder, make_network
from fedveil.network.programs import free_port
from fedveil.network.serve import Serving, serve
from fedveil.statement.certify import certify_config

if TYPE_CHECKING:
    from fedveil.federation.history import Record
    from fedveil.run.result import Result

_LOOK = 0.2
_GRACE = 30.0
"""Seconds that a client has to end."""


def demo(config: Config, out: Path, tell: Callable[[str], None], on_round: Callable[[Record], None] | None = None) -> Result:
    """Train as configured, each client in a process of its own, with TLS, keys, consent and ledgers.

    Raises:
        FedveilError: as `serve`.
    """
    clients = population_of(config).clients
    with tempfile.TemporaryDirectory(prefix="fedveil-demo-") as folder:
        network = make_network(Path(folder) / "server", "127.0.0.1", free_port())
        for number in range(clients):
            (Path(folder) / f"client-{number}").mkdir(mode=0o700)
            make_client_key(Path(folder) / f"client-{number}" / "key")
            network.admit(Path(folder) / f"client-{number}" / "key.pub")
        with _joining(network, config, clients, tell) as join:
            return serve(config, Serving(network, out, wait=clients, tell=tell, on_round=on_round, on_up=join))


def with_clients(config: Config, clients: int | None) -> Config:
    """The configuration with that many clients in its partition.

    Raises:
        ConfigError: its partition has a number of its own.
    """
    if clients is None:
        return config
    if config.data.partition.get("kind") == "users" or config.data.source is not None:
        raise ConfigError(f"--clients {clients}: the clients of these data are its users; leave --clients out")
    partition = {**config.data.partition, "clients": clients}
    return config.model_copy(update={"data": config.data.model_copy(update={"partition": partition})})


@contextmanager
def _joining(network: NetworkFolder, config: Config, clients: int, tell: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """What starts the clients' processes, each with a consent to just what is configured; they end with the block.

    They are started when the server is up, and as many at a time as there are cores: each loads its libraries for seconds, and
    many at once would let all their connections time out. `tell` hears of those that ended too early.
    """
    processes: list[subprocess.Popen[bytes]] = []
    ended = threading.Event()

    def busy() -> int:
        """Clients that have neither answered the offer nor ended."""
        logs = [network.path.parent / f"client-{number}" / "log" for number in range(len(processes))]
        return sum(p.poll() is None and b"\nrun " not in log.read_bytes() for p, log in zip(processes, logs, strict=True))

    def start() -> None:
        for number in range(clients):
            while busy() >= (os.cpu_count() or 1) and not ended.wait(_LOOK):
                pass
            if ended.is_set():
                return
            folder = network.path.parent / f"client-{number}"
            (folder / "consent.toml").write_text(tomli_w.dumps(_consent(config, number)), encoding="utf-8")
            command = [sys.executable, "-m", "fedveil", "join", f"127.0.0.1:{network.port}", "--ca", str(network.authority)]
            command += ["--key", str(folder / "key"), "--consent", str(folder / "consent.toml"), "--dir", str(folder / "state")]
            with open(folder / "log", "wb") as log:
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))

    starter = threading.Thread(target=start, daemon=True)
    try:
        yield starter.start
    finally:
        ended.set()
        if starter.is_alive():
            starter.join()
        for number, process in enumerate(processes):
            if process.poll() is not None:
                tell(ended_early(number, process.returncode, network.path.parent / f"client-{number}" / "log"))
            process.terminate()
        for process in processes:
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:  # Python may lose a signal that comes while it collects garbage
                process.kill()
                process.wait()


def ended_early(number: int, status: int, log: Path) -> str:
    """What is said of a client's process that has ended before it was told to: how, and the end of what it printed."""
    how = f"by signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"with exit status {status}"
    said = " | ".join(line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
    return f"client {number} ended {how} before the run did: {said or 'it printed nothing'}"


def _consent(config: Config, number: int) -> dict[str, object]:
    view, proven = config.privacy.view, certify_config(config).proven
    own = View.AGGREGATE if view is View.FINAL else view
    lifetime = {"epsilon": proven.epsilon * 1.001, "delta": proven.delta}
    return {
        "data": {"part": number},
        "lifetime": {str(own): lifetime},
        "unit": str(config.privacy.unit),
        "adjacency": str(config.privacy.adjacency),
        "seeded_noise": config.run.seeded_noise,
        "limits": dict.fromkeys(("parameters", "rounds", "clients", "steps", "seconds"), 10**12),
    }
