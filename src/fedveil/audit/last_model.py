"""Whole runs of which only the last model is seen (final view), in two worlds.

One client drives the model along a fixed direction as far as its clip allows, or the other way (replace-one), or not at all
(zero-out); all others add noise only. For local SGD on clipped gradients that is a loss linear in the model, which is L-smooth
for every L. Policy, door, aggregation and the server's optimiser are the run's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedveil.accounting.types import Audit
from fedveil.audit.adapter import Case, first_plan, gaussian_run, worst_pair
from fedveil.audit.structural import FALSE_CONSTANT, structural
from fedveil.audit.subject import Floats, Output
from fedveil.audit.two_world import Repeats, many_runs
from fedveil.errors import ConfigError
from fedveil.federation.round import observed
from fedveil.federation.server_step import server_step
from fedveil.mechanism.plan import LocalDpSgd, Plan, Released
from fedveil.methods.parts import Mean


@dataclass(frozen=True)
class Runs:
    """Whole runs of a case whose plans do not read the data; one client takes part in the last rounds it may be in."""

    case: Case
    pair: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, case: Case) -> Runs:
        """The runs of the pair that is worst for the first round's plan."""
        plan = first_plan(case)
        if not isinstance(plan, Plan) or isinstance(plan, LocalDpSgd) or not case.summed:
            raise ConfigError(
                "whole runs are audited where plans do not read the data, noise is at the door and updates are summed"
            )
        return cls(case, worst_pair(plan, case))

    @property
    def gaussian(self) -> bool:
        """Whether the last model is Gaussian with the same covariance in both worlds."""
        s, rng = self.case.setting, np.random.default_rng(0)
        linear = s.server.name == "sgd" and type(self.case.method.server(s)) is Mean
        return linear and gaussian_run(self.case, min(s.rounds, 10), rng)

    def last(self, world: int, rng: np.random.Generator, /) -> torch.Tensor:
        """The last model [d] of one run."""
        case, s = self.case, self.case.setting
        state, served, previous = case.policy.start(), dict[str, Any](), None
        vector, server = case.model.clone(), s.server.build()
        for t in range(s.rounds):
            model = vector.clone()
            released = Released(t, model, previous, 0.5)
            plan = case.policy.plan(released, state)
            joins = t >= s.rounds - s.participations and case.joins(rng)
            update = self.pair[world] if joins else torch.zeros_like(model)
            release = case.release(update, plan, t, rng, denominator=s.cohort)
            state = case.policy.observe(state, observed(release, released))
            served, step = server_step(case.method, s, served, [release], model)
            server.step(vector, -step)
            previous = model
        return vector

    def score(self) -> Callable[[int, np.random.Generator], float]:
        """(world, rng) -> how far the last model lies along the difference of the worlds."""
        direction = (self.pair[1] - self.pair[0]).double()

        def run(world: int, rng: np.random.Generator, /) -> float:
            return float((self.last(world, rng).double() - self.case.model) @ direction)

        return run


def audit_last_model(case: Case, rng: np.random.Generator, *, n: int = 1000, delta: float = 1e-5, alpha: float = 0.05) -> Audit:
    """A lower bound for an adversary who sees the last model and nothing else.

    Args:
        case: of a run in the final view. rng: source of all randomness.
        n: tested runs per world. delta, alpha: of the test.
    """
    runs, scope = Runs.of(case), case.setting.scope

    def vector(world: int, rng: np.random.Generator, /) -> Output:
        return Output(_numbers(runs.last(world, rng)))

    structure = structural(vector, rng, confirm=min(n, 100))
    if structure.leak:
        return Audit(float("inf"), delta, scope, "last model, structural", 1 - FALSE_CONSTANT, 200, note=str(structure))
    note = f"last model of {case.setting.rounds} rounds, driven along one direction, d = {case.setting.layout.dimension}"
    return many_runs(runs.score(), scope, rng, Repeats.of(n, delta, alpha), gaussian=runs.gaussian, note=note)


def _numbers(model: torch.Tensor) -> Floats:
    return np.asarray(model.numpy(), dtype=np.float64)
