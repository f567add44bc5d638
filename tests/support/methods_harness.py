"""Small runs for the tests of methods, and the swap test that every proven method must pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedveil.accounting.types import Gaussian, View
from fedveil.configuration.config import Config, calibrated_setting, parse
from fedveil.engines.inline import Inline
from fedveil.federation.clients import Clients
from fedveil.federation.fit import fit
from fedveil.federation.progress import Federation, Progress, start
from fedveil.federation.round import Context
from fedveil.ledger.ledger import Entry
from fedveil.papers.paper_files import paper_files
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.release.plan import Plan, same_plan
from fedveil.run.assembly import Prepared, build_model, prepare
from method_kit import shares_swapped, with_first_client


@dataclass
class Book:
    """A ledger in memory."""

    entries: list[Entry] = field(default_factory=list)

    def charge(self, entry: Entry) -> int:
        self.entries.append(entry)
        return len(self.entries)

    def mu2(self, client: int) -> float:
        """Sum of mu^2 of one client's rows (-1: the sums)."""
        events = [e.event for e in self.entries if e.client == client]
        assert all(isinstance(event, Gaussian) for event in events), events
        return math.fsum(event.count * event.mu**2 for event in events if isinstance(event, Gaussian))


def digits(method: dict[str, Any], *overrides: str, clients: int = 6, rounds: int = 4, partition: Any = None) -> Config:
    """Digits dealt to a few clients, a linear model, seeded noise."""
    return parse(
        {
            "data": {"partition": partition or {"kind": "iid", "clients": clients}},
            "model": {"name": "linear"},
            "method": method,
            "training": {"rounds": rounds, "batch_size": 32, "sampling": "fixed", "optimizer": {"name": "sgd", "lr": 0.1}},
            "privacy": {"epsilon": 8.0, "delta": 1e-3},
            "run": {"seeded_noise": True},
        },
        overrides,
    )


def assemble(config: Config, prepared: Prepared | None = None) -> Federation:
    """The federation of a configuration, with its ledger in memory."""
    prepared = prepared or prepare(config)
    method, s = calibrated_setting(config, prepared.population)
    model, randomness = build_model(config, prepared), Randomness(config.run.seed, config.run.seeded_noise)
    door = Door(model.layout, s.scope, "run", Book(), randomness, s.rate if s.sampling == "poisson" else None)
    summed = s.scope.view is not View.SERVER
    objective, policy = method.objective(s), method.policy(s)
    context = Context(model, prepared.clients, s.local, objective, policy, door, randomness, summed, model.buffers())
    return Federation(s, method, context, prepared.test, prepared.client_tests, public=prepared.public)


def book(job: Federation) -> Book:
    """The ledger of an assembled run."""
    ledger = job.context.door.ledger
    assert isinstance(ledger, Book)
    return ledger


def trained(job: Federation) -> Progress:
    """The whole run; no client may fail."""
    progress = start(job)
    assert fit(job, Inline(job.context), progress) == ""
    assert not any(row["failures"] for row in progress.history), progress.history[-1]["failures"]
    return progress


class ScriptedDoor(Door):
    """Lets out a vector that does not depend on the data, with the noise and at the cost of the plan, and keeps the plans."""

    plans: list[tuple[int, int, float, Plan]]
    norms: list[float]
    script: int

    def _swap(self, update: torch.Tensor, plan: Any, client: int, round: int, weight: float) -> torch.Tensor:
        self.plans.append((round, client, weight, plan))
        self.norms.append(float(update.norm()))
        seed = 1000 * round + client + self.script
        return torch.randn(len(update), generator=torch.Generator().manual_seed(seed)) * 0.02 * (1 + seed % 3)

    def upload(self, update: torch.Tensor, plan: Any, client: int, round: int, weight: float = 1.0, *rest: Any) -> Any:
        return super().upload(self._swap(update, plan, client, round, weight), plan, client, round, weight, *rest)

    def seal(self, update: torch.Tensor, plan: Any, client: int, round: int, weight: float = 1.0, *rest: Any) -> Any:
        return super().seal(self._swap(update, plan, client, round, weight), plan, client, round, weight, *rest)


def plans_of(
    job: Federation, share: float | None = None, script: int = 0
) -> tuple[list[tuple[int, int, float, Plan]], list[float]]:
    """All plans of a run, with round, client and weight, and the norms of the private updates.

    With a `share`, client 0 holds quite other data, that share of as many as it had. What leaves is scripted, hence equal in
    both worlds; another `script` is other uploads.
    """
    if share is not None:
        job = replace(job, context=replace(job.context, clients=swapped(job.context.clients, share)))
    door = ScriptedDoor(**vars(job.context.door))
    for name, value in (("plans", []), ("norms", []), ("script", script)):
        object.__setattr__(door, name, value)
    job = replace(job, context=replace(job.context, door=door))
    trained(job)
    return door.plans, door.norms


def check_plans_read_only_uploads(config: Config) -> None:
    """The swap test: one client's whole data replaced, all uploads and noise kept, then every plan is the same.

    The new data are as many as the old, then half as many, unless sizes are public; the nominal number, |D| / N, is public and
    kept. Other uploads must give other plans, or this would test nothing.
    """
    plans, norms = plans_of(assemble(config))
    for share in shares_swapped(assemble(config)):
        others, other_norms = plans_of(assemble(config), share)
        assert norms[0] != other_norms[0], "the swap must change what client 0 computes"
        assert len(plans) == len(others) > 0
        assert all(a[:3] == b[:3] and same_plan(a[3], b[3]) for a, b in zip(plans, others, strict=True)), share
    moved, _ = plans_of(assemble(config), script=77)
    assert not all(same_plan(a[3], b[3]) for a, b in zip(plans, moved, strict=True))


def swapped(clients: Clients, share: float = 1.0) -> Clients:
    """The same clients, the first with that share of its examples, negated and shifted, and other labels."""
    x, y = clients.examples(0)
    return with_first_client(clients, 1.0 - x.flip(0), (y + 3) % 10, share)


def presets(folder: str) -> Sequence[Path]:
    """The shipped configurations of one method."""
    return [path for name, path in paper_files("presets").items() if name.startswith(f"{folder}/")]
