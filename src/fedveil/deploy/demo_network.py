"""Command `fedveil net demo`: a server and its clients on one machine, as they would be on several."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

import fedveil.experiment.run_directory as rundir
from fedveil.accounting.accountant import bound
from fedveil.accounting.types import Gaussian, Unbounded
from fedveil.data.own.data_source import TableSource
from fedveil.deploy.consent import Consent, Limits, check_offer
from fedveil.deploy.deployed_data import public_part
from fedveil.deploy.network_folder import NetworkFolder, make_client_key, make_network
from fedveil.deploy.offers import offer_of
from fedveil.deploy.programs import ends_with_parent, free_port
from fedveil.deploy.serve import Serving, serve
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.experiment.resolve import resolve
from fedveil.experiment.run_directory import locked
from fedveil.experiment.shared_budget import affordable, planned_charges
from fedveil.ledger.files import owner_only_folder
from fedveil.ledger.filters import best_order

if TYPE_CHECKING:
    from fedveil.experiment.result import Result
    from fedveil.federation.history import Row

BESIDE = ".fedveil-demo"
"""Suffix of the folder of all machines, after the name of the run directory."""
_LOOK = 0.2
_GRACE = 30.0
"""Seconds that a client gets to end."""


def demo(config: Config, out: Path, tell: Callable[[str], None], on_round: Callable[[Row], None] | None = None) -> Result:
    """Train as configured, each client in a separate process, with TLS, keys, consent and ledgers.

    Raises:
        ConfigError, LedgerError, BudgetExhausted: the run is impossible over several machines, or exceeds privacy.budget; no
            process was started. FedveilError: as `serve`.
    """
    experiment = resolve(config)
    clients = experiment.population.clients
    public_part(experiment)
    affordable(experiment, "demo")
    consents = [consent_to(config, number) for number in range(clients)]
    with _machines(out) as folder:
        network = make_network(folder / "server", "127.0.0.1", free_port())
        for number in range(clients):
            key = owner_only_folder(folder / f"client-{number}") / f"key-{number}"
            make_client_key(key)
            network.admit(key.with_name(f"{key.name}.pub"))
        for number, consent in enumerate(consents):
            if "roster" in consent:
                consent["roster"] = network.roster.digest.hex()
            (folder / f"client-{number}" / "consent.toml").write_text(tomli_w.dumps(consent), encoding="utf-8")
        with _joining(network, clients, tell) as join:
            return serve(config, Serving(network, out, wait=clients, tell=tell, on_round=on_round, on_up=join))


@contextmanager
def _machines(out: Path) -> Iterator[Path]:
    """Yield a folder next to the run directory, with keys and states of all machines, and remove it afterwards.

    A killed demonstration leaves it behind, and perhaps a run directory without any release: the next one at this place removes
    both. A run directory without a release is removed together with the folder.
    """
    run = out.resolve()
    run.parent.mkdir(parents=True, exist_ok=True)
    folder = owner_only_folder(run.with_name(run.name + BESIDE))
    with locked(folder):
        try:
            if any(folder.iterdir()):
                _remove_unreleased(run)
                for machine in folder.iterdir():
                    _remove(machine)
            rundir.create(out)
            try:
                yield folder
            except BaseException:
                _remove_unreleased(run)
                raise
        finally:
            _remove(folder)


def _remove_unreleased(run: Path) -> None:
    if rundir.holds_no_release(run):
        shutil.rmtree(run)


def _remove(folder: Path) -> None:
    """Remove a folder in which ending processes may still write for a moment."""
    end = time.monotonic() + _GRACE
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(_LOOK)


def consent_to(config: Config, number: int) -> dict[str, Any]:
    """Return a client's consent to exactly this run, as in `consent.toml`.

    Raises:
        ConfigError: no client can consent to it.
    """
    offered = offer_of("demo", number, config).parsed()
    experiment = resolve(config)
    method, setting, proven = experiment.method, experiment.setting, experiment.statement.proven
    if setting.cohort > setting.clients:
        raise ConfigError(f"training.clients_per_round = {setting.cohort} is more than the {setting.clients} clients")
    if not math.isfinite(proven.epsilon):
        raise ConfigError(
            f"nothing is proven of this run ({proven.reason or 'epsilon is infinite'}), and clients on machines of their own "
            f"consent to no such run: set privacy.epsilon, and a method or variant that proves it (method.variant = 'proven')"
        )
    planned, adjacency = planned_charges(method, setting.of(number)), setting.scope.adjacency
    bounded = [event for event in planned if not isinstance(event, Unbounded)]
    sampled = not all(isinstance(event, Gaussian) for event in bounded)
    cost = bound(planned, proven.delta, accountant="rdp" if sampled else "gdp", adjacency=adjacency)[0]
    lifetime = {"epsilon": max(cost, proven.epsilon) * 1.001, "delta": proven.delta}
    if sampled:
        lifetime["order"] = best_order(lifetime["epsilon"], proven.delta, bounded, adjacency)
    consent = {
        "data": {"part": number, **_own_table(config)},
        "lifetime": {str(config.privacy.view): lifetime},
        "unit": str(config.privacy.unit),
        "adjacency": str(adjacency),
        "seeded_noise": config.run.seeded_noise,
        "limits": Limits.none(setting.layout.dimension).model_dump(exclude_none=True),
    }
    if setting.secure_aggregation == "on":
        consent |= {"secure_aggregation": "required", "roster": "0" * 64}  # until the keys have been made
    check_offer(Consent.model_validate(consent), offered)
    return consent


def _own_table(config: Config) -> dict[str, Any]:
    """Return the client's section of the consent for user-defined tables: the file and its columns."""
    source = config.data.source
    if not isinstance(source, TableSource):
        return {}
    named = [*source.features, *source.targets, *([] if source.client is None else [source.client])]
    return {"file": str(source.main.absolute()), "columns": list(dict.fromkeys(named))}


def with_clients(config: Config, clients: int | None) -> Config:
    """Return the configuration with that many clients in its partition.

    Raises:
        ConfigError: the data determine the number of clients.
    """
    if clients is None:
        return config
    if config.data.partition.get("kind") == "users" or config.data.source is not None:
        raise ConfigError(f"--clients {clients}: {config.data.name} names its own clients; omit --clients")
    partition = {**config.data.partition, "clients": clients}
    return config.model_copy(update={"data": config.data.model_copy(update={"partition": partition})})


@contextmanager
def _joining(network: NetworkFolder, clients: int, tell: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Yield a function that starts the clients' processes; they end with the block.

    It is called when the server is up. As many clients as cores start at a time: each loads libraries for seconds, and many at
    once would let all connections time out. `tell` is called for those that ended too early.
    """
    processes: list[subprocess.Popen[bytes]] = []
    ended = threading.Event()

    def busy() -> int:
        """Return the number of clients that have neither answered the offer nor ended."""
        logs = [network.path.parent / f"client-{number}" / "log" for number in range(len(processes))]
        return sum(p.poll() is None and b"\nrun " not in log.read_bytes() for p, log in zip(processes, logs, strict=True))

    def start() -> None:
        for number in range(clients):
            while busy() >= (os.cpu_count() or 1) and not ended.wait(_LOOK):
                pass
            if ended.is_set():
                return
            folder = network.path.parent / f"client-{number}"
            command = [sys.executable, "-m", "fedveil", "join", f"127.0.0.1:{network.port}", "--ca", str(network.authority)]
            command += ["--key", str(folder / f"key-{number}"), "--consent", str(folder / "consent.toml")]
            command += ["--dir", str(folder / "state")]
            with open(folder / "log", "wb") as log:
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                processes.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, env=environment, preexec_fn=ends_with_parent()
                    )
                )
        ended.wait()  # the system kills them when the thread that started them ends

    starter = threading.Thread(target=start, daemon=True)
    try:
        yield starter.start
    finally:
        for number, process in enumerate(processes):
            if process.poll() is not None:
                tell(ended_early(number, process.returncode, network.path.parent / f"client-{number}" / "log"))
        ended.set()
        if starter.ident is not None:
            starter.join()
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:  # Python may lose a signal that arrives during garbage collection
                process.kill()
                process.wait()


def ended_early(number: int, status: int, log: Path) -> str:
    """Describe how a client's process ended before it was told to, with the end of its output."""
    how = f"by signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"with exit status {status}"
    output = " | ".join(line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
    return f"client {number} ended {how} before the run did: {output or 'it printed nothing'}"
