"""`fedveil net demo`: a server and its clients on one machine, as they would be on several; all but the run is removed again."""

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
from fedveil.deploy.consent import Consent, Limits, judged
from fedveil.deploy.deployed_data import public_part
from fedveil.deploy.network_folder import NetworkFolder, make_client_key, make_network
from fedveil.deploy.offers import offer_of
from fedveil.deploy.programs import ends_with_parent, free_port
from fedveil.deploy.serve import Serving, serve
from fedveil.errors import ConfigError
from fedveil.experiment.assembly import planned_charges
from fedveil.experiment.config import Config
from fedveil.experiment.resolve import resolve
from fedveil.experiment.run_directory import claimed
from fedveil.experiment.shared_budget import affordable
from fedveil.ledger.files import owner_only_folder
from fedveil.ledger.filters import best_order

if TYPE_CHECKING:
    from fedveil.experiment.result import Result
    from fedveil.federation.history import Row

BESIDE = ".fedveil-demo"
"""Suffix of the folder of all machines, after the name of the run directory."""
_LOOK = 0.2
_GRACE = 30.0
"""Seconds that a client has to end."""


def demo(config: Config, out: Path, tell: Callable[[str], None], on_round: Callable[[Row], None] | None = None) -> Result:
    """Train as configured, each client in a process of its own, with TLS, keys, consent and ledgers.

    Raises:
        ConfigError, LedgerError, BudgetExhausted: several machines cannot do this run, or privacy.budget has no room for it; no
            process was started. FedveilError: as `serve`.
    """
    experiment = resolve(config)
    clients = experiment.population.clients
    public_part(experiment)
    affordable(experiment, "demo")
    consents = [consent_to(config, number) for number in range(clients)]
    with _machines(out) as folder:
        network = make_network(folder / "server", "127.0.0.1", free_port())
        for number, consent in enumerate(consents):
            own = owner_only_folder(folder / f"client-{number}")
            (own / "consent.toml").write_text(tomli_w.dumps(consent), encoding="utf-8")
            make_client_key(own / "key")
            network.admit(own / "key.pub")
        with _joining(network, clients, tell) as join:
            return serve(config, Serving(network, out, wait=clients, tell=tell, on_round=on_round, on_up=join))


@contextmanager
def _machines(out: Path) -> Iterator[Path]:
    """A folder beside the run directory, with keys and states of all machines; it goes with the demonstration.

    One that was killed leaves it, and a run directory in which nothing may have been released yet: the next one at this place
    removes both. Without a release, a run directory is removed with the folder, too.
    """
    run = out.resolve()
    run.parent.mkdir(parents=True, exist_ok=True)
    folder = owner_only_folder(run.with_name(run.name + BESIDE))
    with claimed(folder):
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
    """Remove a folder, in which processes that were told to end may still write for a moment."""
    end = time.monotonic() + _GRACE
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(_LOOK)


def consent_to(config: Config, number: int) -> dict[str, Any]:
    """The consent of a client to just this run, as in `consent.toml`.

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
    found = {
        "data": {"part": number, **_own_table(config)},
        "lifetime": {str(config.privacy.view): lifetime},
        "unit": str(config.privacy.unit),
        "adjacency": str(adjacency),
        "seeded_noise": config.run.seeded_noise,
        "limits": Limits.none(setting.layout.dimension).model_dump(),
    }
    judged(Consent.model_validate(found), offered)
    return found


def _own_table(config: Config) -> dict[str, Any]:
    """The file of which each client has a part, where the data are a table of one's own."""
    source = config.data.source
    if not isinstance(source, TableSource):
        return {}
    named = [*source.features, *source.targets, *([] if source.client is None else [source.client])]
    return {"file": str(source.main.absolute()), "columns": list(dict.fromkeys(named))}


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
def _joining(network: NetworkFolder, clients: int, tell: Callable[[str], None]) -> Iterator[Callable[[], None]]:
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
            command = [sys.executable, "-m", "fedveil", "join", f"127.0.0.1:{network.port}", "--ca", str(network.authority)]
            command += ["--key", str(folder / "key"), "--consent", str(folder / "consent.toml"), "--dir", str(folder / "state")]
            with open(folder / "log", "wb") as log:
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                processes.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, env=environment, preexec_fn=ends_with_parent()
                    )
                )
        ended.wait()  # the system ends them with the thread that started them

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
            except subprocess.TimeoutExpired:  # Python may lose a signal that comes while it collects garbage
                process.kill()
                process.wait()


def ended_early(number: int, status: int, log: Path) -> str:
    """What is said of a client's process that has ended before it was told to: how, and the end of what it printed."""
    how = f"by signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"with exit status {status}"
    said = " | ".join(line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
    return f"client {number} ended {how} before the run did: {said or 'it printed nothing'}"
