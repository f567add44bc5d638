"""A server and clients that have joined, all in this process, with the messages of the wire and without Flower in between."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil.configuration.config import Config
from fedveil.federation.progress import Federation
from fedveil.flower.grid_engine import GONE, GridEngine
from fedveil.flower.wire_format import WireError
from fedveil.network.consent import Consent
from fedveil.network.consenting_clients import ConsentingClients
from fedveil.network.deployed_data import public_part
from fedveil.network.joined_client import JoinedClient
from fedveil.run.run import Result, run_prepared


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
            self._running[number] = JoinedClient(self.folder / str(number), self.consents[number], self.lines.append)
        return self._running[number]

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> dict[int, bytes | str]:
        found: dict[int, bytes | str] = {}
        for number, parts in messages.items():
            try:
                found[number] = GONE if number in self.off else self.client(number).answer(list(parts))
            except WireError as problem:
                found[number] = str(problem)
        return found


def served(config: Config, out: Path, machines: Machines, **more: Any) -> tuple[Result, list[str]]:
    """The run as the server makes it, and the lines that it printed."""
    config = config.model_copy(update={"run": config.run.model_copy(update={"engine": "flower"})})
    lines: list[str] = []

    def clients(job: Federation) -> GridEngine:
        run = job.context.door.run
        return GridEngine(job.context, run, ConsentingClients(machines, run, config, lines.append))

    return run_prepared(config, public_part(config), out, clients=clients, **more), lines
