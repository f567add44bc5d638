"""A server and clients that have joined, all in this process, with the messages of the wire and without Flower in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation_runs import config
from fedveil.deploy.consent import Consent
from fedveil.deploy.deployed_data import public_part
from fedveil.deploy.grid_engine import GONE, GridEngine
from fedveil.deploy.join import JoinedClient
from fedveil.deploy.masked_rounds import engine_for
from fedveil.deploy.offers import ConsentingClients, offer_of
from fedveil.deploy.wire_format import WireError
from fedveil.experiment.config import Config, configure
from fedveil.experiment.receipts import ServerReceipts
from fedveil.experiment.resolve import resolve, resolve_here
from fedveil.experiment.run import Result, train
from fedveil.federation.progress import Federation
from fedveil.ledger.ledger import Ledger
from fedveil.secure_aggregation.roster import Roster, RosterClient

_log = logging.getLogger(__name__)
KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([number + 1]) * 32) for number in range(50)]
"""The clients' signing keys."""
ROSTER = Roster(tuple(RosterClient(i, f"client {i}", key.public_key().public_bytes_raw()) for i, key in enumerate(KEYS[:4])))
"""Of runs with secure aggregation, which have four clients."""
SIZES = (30, 50, 40)
"""Rows of the clients' tables."""


def table(path: Path, rows: int, seed: int, client: str = "") -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 2)).round(3)
    lines = [f"{a},{b},{int(a + b > 0)}{',' + client if client else ''}" for a, b in x]
    path.write_text("\n".join([f"a,b,ill{',who' if client else ''}", *lines]) + "\n")


def files(folder: Path) -> None:
    """A table for each client, a public one, and all of them together."""
    for number, rows in enumerate(SIZES):
        table(folder / f"{number}.csv", rows, number)
    table(folder / "public.csv", 60, 9)
    parts = []
    for number, rows in enumerate(SIZES):
        table(folder / "part.csv", rows, number, f"c{number}")
        parts += (folder / "part.csv").read_text().splitlines()[1:]
    (folder / "together.csv").write_text("\n".join(["a,b,ill,who", *parts]) + "\n")


def configuration(folder: Path, file: str, **source: Any) -> Any:
    """A run of clients with such tables."""
    named = {"file": str(folder / file), "test_file": str(folder / "public.csv"), "features": ["a", "b"], "target": "ill"}
    facts = {"classes": 2, "client": "who", "clients": 3, "train_examples": sum(SIZES)}
    return configure(
        data={"source": named | facts | source},
        model={"name": "linear"},
        method={"name": "dp-fedavg", "clip": 1.0},
        training={"rounds": 2, "local_steps": 2, "batch_size": 10},
        privacy={"epsilon": 8.0, "delta": 0.01, "view": "server"},
        run={"seeded_noise": True, "engine": "inline"},
    )


def consent(part: int, **changes: Any) -> Consent:
    """To everything that the tests' runs ask for, unless told otherwise."""
    lifetime = {view: {"epsilon": 8.001, "delta": 0.01} for view in ("server", "aggregate")}
    return Consent.model_validate({"data": {"part": part}, "lifetime": lifetime, "seeded_noise": True, **changes})


@dataclass
class Machines:
    """Clients, each with a folder of its own; a client that is asked comes up anew each time, as after a restart."""

    folder: Path
    consents: dict[int, Consent]
    lines: list[str] = field(default_factory=list)
    off: set[int] = field(default_factory=set)
    restarts: bool = True
    _running: dict[int, JoinedClient] = field(default_factory=dict)

    @property
    def online(self) -> Collection[int]:
        return self.consents.keys() - self.off

    def client(self, number: int) -> JoinedClient:
        if self.restarts or number not in self._running:
            folder, signing = self.folder / str(number), KEYS[number]
            self._running[number] = JoinedClient(folder, self.consents[number], self.lines.append, signing=signing)
        return self._running[number]

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> dict[int, bytes | str]:
        found: dict[int, bytes | str] = {}
        for number, parts in messages.items():
            try:
                found[number] = GONE if number in self.off else self.client(number).answer(list(parts))
            except WireError as problem:
                found[number] = str(problem)
        return found


class Nobody(Exception):
    """No client of a round answers."""


def gives_up(seconds: float) -> None:
    raise Nobody


def served(
    config: Config, out: Path, machines: Machines, *, sleep: Callable[[float], None] = gives_up, **more: Any
) -> tuple[Result, list[str]]:
    """The run as the server makes it, and the lines that it printed.

    Args:
        sleep: called while a round waits for its first answer.
    """
    config = config.model_copy(update={"run": config.run.model_copy(update={"engine": "flower"})})
    lines: list[str] = []

    receipts: ServerReceipts | None = None

    def consenting(run: str) -> Callable[[Federation], GridEngine]:
        nonlocal receipts
        receipts = ServerReceipts.of(resolve(config).setting, out, run, Ed25519PrivateKey.from_private_bytes(bytes(32)))
        roster = ROSTER if config.run.secure_aggregation == "on" else None
        offered = partial(offer_of, run, config=config, receipt_key=receipts.key if receipts else "", roster=roster)
        exchange = ConsentingClients(machines, offered, number, lines.append, sleep)
        return partial(engine_for, exchange=exchange, run=run, folder=out, receipts=receipts, tell=_log.warning)

    data, resumed = public_part(resolve(config)), out if more.get("resume") else None
    number = data.population.clients
    result = train(resolve_here(config, data.population, resumed), data, out, clients=consenting, **more)
    if receipts is not None:
        receipts.issue(None, result.model.vector.numpy().tobytes())
    return result, lines


THREE: dict[str, Any] = {
    "data": {"partition": {"kind": "iid", "clients": 3}},
    "training": {"clients_per_round": 3, "local_steps": 1, "rounds": 2},
}


def small(view: str = "server", method: dict[str, Any] | None = None, **more: Any) -> Any:
    """A run of three clients."""
    sections = {**THREE, **more, "training": {**THREE["training"], **more.get("training", {})}}
    return config(method or {"name": "dp-fedavg"}, view, **sections)


def machines(folder: Path, **changes: Any) -> Machines:
    """Three clients that consent to everything but the changes."""
    return Machines(folder, {number: consent(number, **changes) for number in range(3)})


def rows(path: Path) -> list[Any]:
    """The entries of a ledger."""
    with Ledger.open(path) as ledger:
        return [entry for _, _, entry in ledger.entries()]
