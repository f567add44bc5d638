"""Client canaries in a real training run: some clients upload random directions, and the models' movements are searched for them.

The canaries take the place of clients of the run: population, sampling, policy, clip, noise, aggregation and the server's
optimiser stay the configured ones, and so do the other clients' data. What comes out is an estimate (`one_shot`).
Source: Andrew, Kairouz, Oh, Oprea, McMahan & Suriyakumar 2024, Algorithms 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.types import Audit, Unit
from fedveil.audit import one_shot
from fedveil.audit.subject import Floats
from fedveil.errors import ConfigError
from fedveil.federation.engine import Engine
from fedveil.federation.final_model import final_model
from fedveil.federation.fit import fit
from fedveil.federation.progress import Federation, Progress, start
from fedveil.federation.round import Context
from fedveil.mechanism.noise_memory import NoiseMemory
from fedveil.mechanism.plan import LocalDpSgd, Plan, Released
from fedveil.release.noise import Randomness
from fedveil.training.local import Client, HasMetrics, HasPersonalModel, Local, Remembering, State

UNSEEN = 1000
"""Directions of canaries that never join, from which the largest cosine over rounds gets its distribution."""
AT_ONCE = 50


@dataclass(frozen=True)
class Canaries(Remembering):
    """Any objective, with the update of each client whose private state says `canary` replaced by that canary's direction.

    Args:
        seed: of the directions. norm: of a canary's update, far above every clip.
    """

    inner: Client
    seed: int
    norm: float

    def direction(self, canary: int, d: int) -> Tensor:
        """The canary's direction [d], uniform on the unit sphere; any whole number from 0 names one."""
        drawn: Tensor = torch.randn(d, generator=Randomness(self.seed).generator("canary", canary))
        return drawn.div_(drawn.norm())

    def begin(self, local: Local) -> None:
        self.inner.begin(local)

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        return self.inner.step(local, x, y)

    def finish(self, local: Local) -> Tensor:
        """The inner objective's update, or a canary's direction at `norm`."""
        update = self.inner.finish(local)
        canary = local.state.get("canary")
        return update if canary is None else self.norm * self.direction(canary, len(update)).to(update.device)

    def personal(self, model: Tensor, state: State) -> Tensor:
        """That of the inner objective; the global model where it has none."""
        return self.inner.personal(model, state) if isinstance(self.inner, HasPersonalModel) else model

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        return self.inner.measures(state) if isinstance(self.inner, HasMetrics) else {}


@dataclass(frozen=True)
class Seen:
    """What a run with k canaries showed: cosines with the whole movement [k], the largest ones over rounds [k], the latter of
    canaries that never joined, and the number of coordinates."""

    final: Floats
    rounds: Floats
    unseen: Floats
    d: int
    canaries: int
    trained: int

    def audits(self, delta: float) -> list[Audit]:
        """The estimates for one who sees the last model only, and for one who sees the model of every round."""
        note = f"{self.canaries} canaries among the clients of a real run of {self.trained} rounds, d = {self.d}"
        found = [one_shot.estimate(self.final, delta, d=self.d), one_shot.estimate(self.rounds, delta, unseen=self.unseen)]
        return [replace(audit, note=f"{note}; {audit.note}") for audit in found]


def run_with_canaries(
    federation: Federation,
    make: Callable[[Context], Engine],
    k: int,
    rng: np.random.Generator,
    on_round: Callable[[int], None] | None = None,
) -> Seen:
    """Train a federation to its end with k of its clients, drawn at random, replaced by canaries.

    Args:
        federation: not yet started. make: the engine of a context. k: canaries, from 2 up to the number of clients.
        rng: draws the canaries and their directions. on_round: told how many rounds are done.

    Raises:
        ConfigError: too few clients, records protected, or a method whose clip and noise follow the private update.
    """
    check(federation, k)
    context = federation.context
    marked = Canaries(context.objective, int(rng.integers(2**31)), 0.5 * context.door.max_norm)
    door = replace(context.door, memory=NoiseMemory())  # noise correlated over the rounds begins anew with each run
    context = replace(context, objective=marked, door=door)
    federation = replace(federation, context=context, evaluate_every=federation.setting.rounds)
    progress = start(federation)
    for canary, client in enumerate(rng.choice(federation.setting.clients, size=k, replace=False)):
        progress.privates[int(client)] = {"canary": canary}
    models = [progress.model]

    def after(done: Progress) -> None:
        models.append(done.model)
        if on_round is not None:
            on_round(done.round)

    fit(federation, make(federation.context), progress, after)
    steps = [(after - before).double().numpy() for before, after in pairwise(models) if not torch.equal(before, after)]
    if not steps:
        raise ConfigError("no round of this run moved the model, so there is nothing to search for canaries")
    moved = np.stack(steps)
    d = moved.shape[1]

    def largest(canaries: range) -> Floats:
        parts = [range(i, min(i + AT_ONCE, canaries.stop)) for i in range(canaries.start, canaries.stop, AT_ONCE)]
        return np.concatenate([one_shot.round_scores(directions(marked, part, d), moved) for part in parts])

    whole = (final_model(progress) - models[0]).double().numpy()
    final = one_shot.final_scores(directions(marked, range(k), d), whole)
    return Seen(final, largest(range(k)), largest(range(k, k + UNSEEN)), d, k, progress.round)


def directions(marked: Canaries, canaries: range, d: int) -> Floats:
    """Their directions [k, d]."""
    return np.stack([marked.direction(canary, d).double().numpy() for canary in canaries])


def check(federation: Federation, k: int) -> None:
    """Whether client canaries can say something about this run."""
    s, context = federation.setting, federation.context
    if not 2 <= k <= s.clients:
        raise ConfigError(f"from 2 to {s.clients} of this run's {s.clients} clients can be canaries, got {k}")
    if s.scope.unit is not Unit.CLIENT:
        raise ConfigError("client canaries estimate what protects clients: set privacy.unit = 'client', or leave --canaries out")
    plan = context.plan(Released(0, context.model.vector.cpu(), None, 0.5), context.policy.start())
    if (
        not isinstance(plan, Plan)
        or isinstance(plan, LocalDpSgd)
        or not (math.isfinite(plan.clip) or plan.layer_clip is not None)
    ):
        raise ConfigError(
            f"client canaries upload at the clip; {federation.method.name} fixes no clip before it sees the update: "
            "leave --canaries out, or audit a variant that is proven"
        )
