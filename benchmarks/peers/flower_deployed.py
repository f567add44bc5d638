"""Rounds of plain Flower in its deployment, on one machine, with TLS and node authentication, for `benchmarks/flower.py`.

SuperLink and SuperNodes run as Flower runs them by default, where each message starts a process; the app is in `flower_app`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tomli_w

from fedveil.deploy.flower_api import Control, Endpoint
from fedveil.deploy.network_folder import NetworkFolder, make_client_key, make_network, public_key_of
from fedveil.deploy.programs import QUIET, Program, environment, free_port, running

APP = Path(__file__).parent / "flower_app"
PATIENCE = 600.0


def superlink(network: NetworkFolder, log: Path) -> Program:
    """The server's side, with a process of its own for the app."""
    certificate, key = network.certificates
    command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(network.port), "--enable-supernode-auth"]
    command += ["--ssl-ca-certfile", str(network.authority), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    return Program([*command, "--database", str(network.path / "superlink.db")], network.path / "flower", log)


def supernode(network: NetworkFolder, folder: Path, part: int, parts: int) -> Program:
    """A client's side."""
    command = ["flower-supernode", "--superlink", f"127.0.0.1:{network.port}", "--root-certificates", str(network.authority)]
    command += ["--auth-supernode-private-key", str(folder / "key"), "--host", "127.0.0.1", "--port", str(free_port())]
    return Program([*command, "--node-config", f"partition-id={part} num-partitions={parts}"], folder / "flower", folder / "log")


def deployed(clients: int, rounds: int, look: Callable[[], None]) -> list[dict[str, Any]]:
    """Seconds and answers of each round.

    Args:
        look: called each second while rounds are made.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        network, log = make_network(Path(folder) / "server", "127.0.0.1", free_port()), Path(folder) / "rounds"
        log.touch()
        told = {"PLAIN_ROUNDS": str(rounds), "PLAIN_NODES": str(clients), "PLAIN_LOG": str(log)}
        stack.enter_context(environment(**told))
        stack.enter_context(running(superlink(network, Path(folder) / "superlink.log"), print, 1.0)).wait_for(network.port)
        control = Control(Endpoint(f"127.0.0.1:{network.port}", network.authority.read_bytes(), b""))
        for part in range(clients):
            own = Path(folder) / f"client-{part}"
            own.mkdir()
            make_client_key(own / "key")
            control.register(public_key_of(own / "key.pub"), f"client-{part}")
            stack.enter_context(running(supernode(network, own, part, clients), print, 10.0))
        control.close()
        _start(network, Path(folder) / "cli")
        end = time.monotonic() + PATIENCE
        while len(lines := log.read_text().splitlines()) < rounds:
            if time.monotonic() > end:
                raise RuntimeError(f"{len(lines)} of {rounds} rounds within {PATIENCE:g} s")
            look()
            time.sleep(1)
        return [json.loads(line) for line in lines]


def _start(network: NetworkFolder, home: Path) -> None:
    """`flwr run`, as a user of Flower would."""
    home.mkdir()
    address = {"address": f"127.0.0.1:{network.port}", "root-certificates": str(network.authority)}
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"tls": address}}))
    flwr = Path(sys.executable).with_name("flwr")
    subprocess.run([flwr, "run", APP, "tls"], env={**os.environ, **QUIET, "FLWR_HOME": str(home)}, check=True)
