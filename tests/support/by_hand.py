"""Federations small enough to compute by hand: two features, two classes, one linear layer that starts at zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import fedveil as fv
from fedveil.accounting.types import Gaussian
from fedveil.data.partition import ClientIndices, Partition
from fedveil.experiment.assembly import federation as assembled
from fedveil.experiment.config import Config
from fedveil.experiment.resolve import opened
from fedveil.federation.progress import Federation
from fedveil.ledger.ledger import Entry
from fedveil.mechanism.mechanisms import NoiseMemory
from fedveil.methods.method import Method
from fedveil.training.local import Client

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


def in_memory(config: Config, *data: Any, book: Any = None) -> Federation:
    """The federation of a configuration, on its data or these, with a ledger in memory and without a budget."""
    made = assembled(*opened(config, *data), Path("ledger"), "r")
    door = replace(made.context.door, ledger=book or Book(), memory=NoiseMemory())
    return replace(made, context=replace(made.context, door=door))


def with_client(job: Federation, client: Client) -> Federation:
    """The federation, its clients trained by another part than that of the method."""
    return replace(job, context=replace(job.context, objective=client))


def federation(
    method: Method,
    parts: Sequence[tuple[Any, Any]],
    *,
    view: str = "aggregate",
    z: float | None = None,
    module: torch.nn.Module | None = None,
    book: Any = None,
    seed: int = 0,
    training: Mapping[str, Any] | None = None,
    **more: Any,
) -> Federation:
    """One client for each of `parts`, (features [n, 2], labels [n]), which takes one step in a round."""
    spare = ([[0.0, 0.0]], [0])  # of no client: a data set has examples, even if its clients have none
    x = np.concatenate([np.asarray(p[0], np.float32).reshape(-1, 2) for p in (*parts, spare)])
    y = np.concatenate([np.asarray(p[1], np.int64) for p in (*parts, spare)])
    dealt = Partition(ClientIndices(np.arange(len(y) - 1), np.cumsum([0, *(len(p[1]) for p in parts)])), "own", 0)
    if module is None:
        module = torch.nn.Linear(2, 2)
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
    config = fv.configure(
        model=module,
        method=method,
        training={"rounds": 1, "sampling": "fixed", "batch_size": 100, "optimizer": {"lr": 0.5}, **(training or {})},
        privacy={"view": view, "delta": 1e-3, "noise_multiplier": z, **more},
        run={"seed": seed, "seeded_noise": True, "isolation": "copy"},
    )
    data = fv.from_arrays(x, y, classes=2, test=(x, y))
    return in_memory(config, data, dealt, book=book)


def gradient(w: NDArray[np.float64], part: Any) -> NDArray[np.float64]:
    """Of the mean cross-entropy of softmax(W x + b): weights [2, 2] row by row, then the bias."""
    x, y = np.array(part[0], dtype=np.float64), np.array(part[1])
    logits = x @ w[:4].reshape(2, 2).T + w[4:]
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return np.concatenate([(p.T @ x).reshape(-1), p.sum(axis=0)]) / len(y)
