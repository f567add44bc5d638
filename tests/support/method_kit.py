"""What the tests of methods share: small runs on the embedded digits, and runs whose releases are those of another run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.accounting.types import Adjacency, Gaussian, Scope, Unit, View
from fedveil.configuration.config import Config, configure
from fedveil.engines.inline import Inline
from fedveil.federation.clients import Clients
from fedveil.federation.fit import fit
from fedveil.federation.progress import Federation, Progress, start
from fedveil.ledger.ledger import Ledger
from fedveil.methods.base import Method, Setting
from fedveil.release.door import AGGREGATE, Contribution, Door
from fedveil.release.plan import Plan, Raw, Released, Upload, same_plan
from fedveil.run.assembly import federation, prepare
from fedveil.training.local import LocalSpec, OptimizerSpec
from fedveil.training.params import Layout

LAYOUT = Layout.of({"a": (3,), "b": (2, 2)})


def setting(view: View = View.SERVER, layout: Layout = LAYOUT, **changes: Any) -> Setting:
    """Ten clients of 100 records, four a round, 20 rounds of one epoch in batches of 25."""
    local = changes.pop("local", LocalSpec(1, None, 25, OptimizerSpec(lr=0.1)))
    scope = Scope(changes.pop("unit", Unit.CLIENT), changes.pop("adjacency", Adjacency.ZERO_OUT), view)
    base = Setting(10, 4, 20, "fixed", local, layout, 100, 2, scope, 1e-3, noise_multiplier=2.0)
    return replace(base, **changes)


def released(model: list[float], round: int = 0, previous: list[float] | None = None) -> Released:
    """What a policy may see, from plain numbers."""
    return Released(round, torch.tensor(model), None if previous is None else torch.tensor(previous))


def upload(vector: list[float], start: list[float], noise_std: float = 0.0, layout: Layout = LAYOUT) -> Upload:
    """What left, from plain numbers."""
    std = torch.full((len(layout),), noise_std)
    return Upload(0, 0, torch.tensor(vector), std, Plan(clip=1.0, noise_std=noise_std), start=torch.tensor(start))


def digits(method: dict[str, Any], **sections: Any) -> Config:
    """A seeded run of a linear model on the embedded digits; sections replace or extend the defaults."""
    training = {"rounds": 3, "clients_per_round": 6, "sampling": "fixed", "batch_size": 20, "optimizer": {"lr": 0.1}}
    return configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 12}, **sections.get("data", {})},
        model=sections.get("model", "linear"),
        method=method,
        training={**training, **sections.get("training", {})},
        privacy={"delta": 1e-3, **sections.get("privacy", {})},
        run={"seed": 1, "seeded_noise": True},
    )


def job_of(config: Config, path: Path) -> Federation:
    """Everything of a run, with its ledger at `path`."""
    Ledger.create(path, "r", {}).close()
    return federation(config, prepare(config), path, "r")


def trained(job: Federation) -> Progress:
    """The run from start to end; every client must have succeeded."""
    progress = start(job)
    assert fit(job, Inline(job.context), progress) == ""
    assert not any(row["failures"] for row in progress.history), progress.history
    return progress


def charged_mu(path: Path) -> dict[int, float]:
    """The mu that the ledger holds for each client number (-1: sums)."""
    total: dict[int, float] = {}
    with Ledger.open(path) as ledger:
        for _, _, entry in ledger.entries():
            assert isinstance(entry.event, Gaussian), entry
            total[entry.client] = total.get(entry.client, 0.0) + entry.event.count * entry.event.mu**2
    return {client: math.sqrt(square) for client, square in total.items()}


# --- the swap test -----------------------------------------------------------------------------------------------------


@dataclass
class Replay:
    """A door that writes down each plan, and lets out what another run let out where it is given that run's door."""

    door: Door
    other: Replay | None = None
    plans: dict[tuple[int, int], Plan] = field(default_factory=dict)
    weights: dict[tuple[int, int], float] = field(default_factory=dict)
    let_out: dict[tuple[int, int], Upload] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """That of the door."""
        return self.door.layout

    def upload(self, update: Tensor, plan: Plan | Raw, client: int, round: int, weight: float = 1.0, *more: Any) -> Upload:
        """As the door's, or the other run's upload."""
        self._write_down(update, plan, client, round, weight)
        if self.other is None:
            self.let_out[client, round] = self.door.upload(update, plan, client, round, weight, *more)
        return (self.other or self).let_out[client, round]

    def seal(self, update: Tensor, plan: Plan | Raw, client: int, round: int, weight: float = 1.0, *more: Any) -> Contribution:
        """As the door's."""
        self._write_down(update, plan, client, round, weight)
        return self.door.seal(update, plan, client, round, weight, *more)

    def release_sum(self, contributions: Any, plan: Plan | Raw, round: int, denominator: float) -> Upload:
        """As the door's, or the other run's sum."""
        if self.other is None:
            self.let_out[AGGREGATE, round] = self.door.release_sum(contributions, plan, round, denominator)
        return (self.other or self).let_out[AGGREGATE, round]

    def _write_down(self, update: Tensor, plan: Plan | Raw, client: int, round: int, weight: float) -> None:
        self.plans[client, round] = plan.make(update) if isinstance(plan, Raw) else plan
        self.weights[client, round] = weight


def swapped_plans(config: Config, folder: Path) -> list[tuple[Plan, Plan]]:
    """The plans of two runs that let out the same vectors although one client's data are all different in the second.

    Then the same with another number of examples, unless sizes are public: neither plans nor weights may follow it.
    """
    first = job_of(config, folder / "0.sqlite")
    one, pairs = Replay(first.context.door), []
    trained(replace(first, context=replace(first.context, door=one)))  # type: ignore[arg-type]
    assert (0, config.training.rounds - 1) in one.plans, "the swapped client must take part in the last round"
    for share in shares_swapped(first):
        second = job_of(config, folder / f"{share}.sqlite")
        clients = second.context.clients
        x = torch.randn(clients.examples(0)[0].shape, generator=torch.Generator().manual_seed(9)) * 5
        clients = with_first_client(clients, x, torch.full((len(x),), 3), share)
        two = Replay(second.context.door, one)
        trained(replace(second, context=replace(second.context, door=two, clients=clients)))  # type: ignore[arg-type]
        assert one.plans.keys() == two.plans.keys()
        assert one.weights == two.weights, "the weight of a client shows how many examples it has"
        pairs += [(one.plans[key], two.plans[key]) for key in one.plans]
    return pairs


def shares_swapped(job: Federation) -> tuple[float, ...]:
    """How many examples the swapped client may have for its own: as many, or half of them as well.

    Sizes are public by declaration where the method's assumptions say so, and published variants weigh by them.
    """
    public = "each client's number of examples is public" in job.method.assumptions(job.setting)
    return (1.0,) if public or getattr(job.method, "variant", "proven") == "published" else (1.0, 0.5)


def with_first_client(clients: Clients, x: Tensor, y: Tensor, share: float) -> Clients:
    """The same clients, the first with the first `share` of these examples; the others keep theirs."""
    size, own = clients.size(0), math.ceil(share * len(y))
    offsets = clients.offsets.copy()
    offsets[1:] += own - size
    return Clients(torch.cat([x[:own], clients.x[size:]]), torch.cat([y[:own], clients.y[size:]]), offsets)


def all_same(pairs: list[tuple[Plan, Plan]]) -> bool:
    """Whether the plans are the same in each pair."""
    return all(same_plan(a, b) for a, b in pairs)


def method_releases_mu(method: Method, s: Setting) -> float:
    """mu of everything that a run releases in its own view, all releases being Gaussian."""
    events = [e for e in method.releases(s, s.scope.view) if isinstance(e, Gaussian)]
    return math.sqrt(sum(e.count * e.mu**2 for e in events))
