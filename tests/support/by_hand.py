"""Federations small enough to compute by hand: two features, two classes, one linear layer that starts at zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedveil.accounting.types import Adjacency, Gaussian, Scope, Unit, View
from fedveil.federation.clients import Clients
from fedveil.federation.progress import Federation
from fedveil.federation.round import Context
from fedveil.ledger.ledger import Entry
from fedveil.mechanism.mechanisms import NoiseMemory
from fedveil.methods.method import Method, participation_of
from fedveil.methods.run_cost import Planner
from fedveil.methods.setting import Setting
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.training.local import LocalSpec, OptimizerSpec
from fedveil.training.params import FlatModel

ONE = ([[1.0, 0.0], [0.0, 2.0]], [0, 1])
TWO = ([[1.0, 1.0]], [1])


@dataclass
class Book:
    """A ledger in memory."""

    entries: list[Entry] = field(default_factory=list)

    def charge_all(self, entries: Sequence[Entry]) -> None:
        self.entries += entries

    def charge_once(self, entry: Entry, *, digest: str) -> None:
        self.charge_all([entry])

    def mu2(self, client: int) -> float:
        """Sum of mu^2 of one client's rows (-1: the sums)."""
        events = [e.event for e in self.entries if e.client == client]
        assert all(isinstance(event, Gaussian) for event in events), events
        return math.fsum(event.count * event.mu**2 for event in events if isinstance(event, Gaussian))


def federation(
    method: Method,
    parts: list[tuple[Any, Any]],
    *,
    view: View = View.AGGREGATE,
    spec: LocalSpec | None = None,
    rounds: int = 1,
    z: float | None = None,
    cohort: int | None = None,
    sampling: str = "fixed",
    module: torch.nn.Module | None = None,
    book: Any = None,
    seed: int = 0,
    **more: Any,
) -> Federation:
    """One client for each of `parts`, (features [n, 2], labels [n])."""
    x = np.concatenate([np.asarray(p[0], np.float32).reshape(-1, 2) for p in parts])
    y = np.concatenate([np.asarray(p[1], np.int64) for p in parts])
    cuts = np.cumsum([len(p[1]) for p in parts])
    clients = Clients.of(x, y, np.split(np.arange(len(y)), cuts[:-1]))
    if module is None:
        module = torch.nn.Linear(2, 2)
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
    model = FlatModel(module)
    scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, view)
    n = cohort or len(parts)
    local = spec or LocalSpec(batch_size=100, optimizer=OptimizerSpec(lr=0.5))
    setting = Setting(len(parts), n, rounds, sampling, local, model.layout, 2, 2, scope, 1e-3, noise_multiplier=z, **more)  # type: ignore[arg-type]
    randomness = Randomness(seed, True)
    rate = setting.rate if sampling == "poisson" else None
    shapes, memory = method.extras(setting), NoiseMemory()
    door = Door(model.layout, scope, "r", book or Book(), randomness, rate, extras=shapes, memory=memory)
    summed = view is not View.SERVER
    context = Context(
        model,
        clients,
        local,
        method.client(setting),
        Planner.of(method.release(setting), setting),
        door,
        randomness,
        summed,
        model.buffers(),
    )
    return Federation(
        setting, method, context, (clients.x, clients.y), randomness, participation=participation_of(method, setting)
    )


def gradient(w: NDArray[np.float64], part: Any) -> NDArray[np.float64]:
    """Of the mean cross-entropy of softmax(W x + b): weights [2, 2] row by row, then the bias."""
    x, y = np.array(part[0], dtype=np.float64), np.array(part[1])
    logits = x @ w[:4].reshape(2, 2).T + w[4:]
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return np.concatenate([(p.T @ x).reshape(-1), p.sum(axis=0)]) / len(y)
