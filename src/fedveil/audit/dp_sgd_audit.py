"""Audits of DP-SGD clients: gradients are crafted; sampling, clip, noise, local training and release are the real ones.

In the two-world audit one example is present or absent (zero-out), or has opposite gradients (replace-one), over many runs. In
the one-run audit m examples with orthogonal gradients are included by coin flips (Steinke, Nasr & Jagielski 2023). The adversary
sees one update per round, the sum of its noisy steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from fedveil.accounting.types import Adjacency, Audit, SampledGaussian
from fedveil.audit.adapter import Case, first_plan, linear_model
from fedveil.audit.canaries import (
    Guesses,
    audit_one_run,
    audit_one_run_gdp,
    choose_guesses,
    epsilon_bound,
    guess,
    mu_bound,
    symmetric_grid,
)
from fedveil.audit.subject import Floats, check_level
from fedveil.audit.two_world import Repeats, Run, many_runs, many_sampled_runs
from fedveil.errors import ConfigError
from fedveil.federation.round import observed
from fedveil.gradients.gradient_blocks import Block, Dense
from fedveil.gradients.per_example import per_example_gradients
from fedveil.mechanism.plan import DpSgd, LocalDpSgd
from fedveil.release.dpsgd import PerExampleGradient
from fedveil.release.noise import Randomness
from fedveil.tasks.classification import Classification
from fedveil.training.local import Local, State, train

GradientOf = Callable[[torch.nn.Module, Tensor, Tensor], tuple[list[Block], Tensor]]
_TALL = 10.0
"""Norm of crafted gradients, in units of the clip: large, so that a missing clip is detected."""


@dataclass(frozen=True)
class DpSgdClient:
    """A client that trains with DP-SGD in each of `rounds` rounds; it is alone in its sum if uploads are summed."""

    case: Case
    rounds: int

    @property
    def step(self) -> DpSgd:
        """Return the DP-SGD step of the first plan."""
        plan = first_plan(self.case)
        if not isinstance(plan, LocalDpSgd):
            raise ConfigError(f"{self.case.method.name} does not train with DP-SGD here: set training.local = 'dp-sgd'")
        return plan.step

    @property
    def offset(self) -> float:
        """Return the position of the other world's example along the canary's gradient, in clips: absent 0, opposite -1."""
        return 0.0 if self.case.setting.scope.adjacency is Adjacency.ZERO_OUT else -1.0

    @property
    def steps(self) -> int:
        """Return the number of noisy steps in all rounds."""
        return self.step.steps * self.rounds

    @property
    def event(self) -> SampledGaussian:
        """Return the event that the accountant charges for these rounds."""
        step = self.step
        multiplier = step.noise_multiplier / self.case.setting.scope.adjacency.factor
        return SampledGaussian(step.rate, multiplier, self.steps)

    def alike(self) -> bool:
        """Return whether every round's steps have the first round's rate and noise, in one run without examples."""
        case, first, rng, state = self.case, self.step, np.random.default_rng(0), self.case.policy.start()
        for t in range(self.rounds):
            released = case.released(t)
            plan = case.policy.plan(released, state)
            assert isinstance(plan, LocalDpSgd)
            one = plan.step
            if one.rate != first.rate or not math.isclose(one.noise_multiplier, first.noise_multiplier, rel_tol=1e-3):
                return False
            state = case.policy.observe(state, observed(case.release(torch.zeros_like(case.model), plan, t, rng), released))
        return True

    def uploads(self, examples: Tensor, rng: np.random.Generator, gradients: GradientOf) -> Iterator[Tensor]:
        """Yield each round's release [d], for a client with these examples [n, d]."""
        case, s, model = self.case, self.case.setting, linear_model(self.case.setting.layout)
        objective, state = case.method.client(s), case.policy.start()
        private: State = {}
        labels = torch.zeros(len(examples), dtype=torch.int64)
        for t in range(self.rounds):
            released = case.released(t)
            plan = case.policy.plan(released, state)
            assert isinstance(plan, LocalDpSgd)
            noise = Randomness(int(rng.integers(2**62)), seeded_noise=True)
            step = replace(plan.step, cap=max(plan.step.cap, len(examples)))  # because all canaries may be sampled
            source = PerExampleGradient(step, noise, (t, 0), gradients)
            batches = torch.Generator().manual_seed(t)
            local = Local(model, released.model, s.local, source, batches, round=t, support=plan.support, state=private)
            update, _ = train(local, examples, labels, objective)
            private = local.state
            door = case.door(rng)
            if case.summed:
                release = door.release_sum([door.seal(update, plan, 0, t)], plan, t, 1.0)
            else:
                release = door.upload(update, plan, 0, t)
            state = case.policy.observe(state, observed(release, released))
            yield release.vector

    def along(self, vector: Tensor) -> Floats:
        """Return a released update [d] in units of the movement that one clipped example causes in one step of plain SGD."""
        s, step = self.case.setting, self.step
        rate = sum(s.local.learning_rate(0, k, step.steps) for k in range(step.steps)) / step.steps
        return np.asarray(vector.double().numpy() * (step.expected / (rate * step.clip)), dtype=np.float64)

    def ratio(self, x: Floats) -> float:
        """Return the log-likelihood ratio of the movements along the canary [T], sampled in Binomial(K, q) steps per round."""
        step = self.step
        joined = np.arange(step.steps + 1)
        weight = binom.logpmf(joined, step.steps, step.rate)
        variance = step.steps * max(step.noise_multiplier, 1e-9) ** 2

        def density(shift: float) -> Floats:
            gap = x[:, None] - shift * joined
            return np.asarray(np.logaddexp.reduce(weight - gap**2 / (2 * variance), axis=1), dtype=np.float64)

        return float(np.sum(density(1.0) - density(self.offset)))


def crafted(module: torch.nn.Module, x: Tensor, y: Tensor) -> tuple[list[Block], Tensor]:
    """Return linear losses' gradients in closed form: that of example x is -x, as for `linear_model`."""
    return [Dense(-x)], x.new_zeros(len(x))


# --- two worlds --------------------------------------------------------------------------------------------------------


def run_score(client: DpSgdClient, bystanders: int = 3) -> Callable[[int, np.random.Generator], float]:
    """Return a function (world, rng) -> log-likelihood ratio of a run in which one example among `bystanders` others differs."""
    step, d = client.step, client.case.setting.layout.dimension
    own = torch.full((d,), _TALL * step.clip / math.sqrt(d))
    other = torch.zeros(d)
    other[::2] = _TALL * step.clip / math.sqrt(d)
    # orthogonal to the canary, so that the other examples do not affect the score
    other[1::2] = -_TALL * step.clip / math.sqrt(d)
    direction = own.double().numpy() / float(own.double().norm())

    def run(world: int, rng: np.random.Generator, /) -> float:
        examples = torch.stack([own if world else client.offset * own, *[other] * bystanders])
        x = [client.along(vector) @ direction for vector in client.uploads(examples, rng, crafted)]
        return client.ratio(np.array(x))

    return run


def audit_two_worlds(
    client: DpSgdClient,
    rng: np.random.Generator,
    *,
    n: int = 1000,
    delta: float = 1e-5,
    alpha: float = 0.05,
    counted: Callable[[Run, int], Run] = lambda run, total: run,
) -> Audit:
    """Distinguish two neighbouring data sets of one client in n runs each.

    The bound uses the Gaussian curve at rate 1. It uses the accountant's own curve if every round is one sampled step with the
    same rate and noise, because the release is then exactly what was charged. Otherwise it uses Clopper-Pearson: if steps are
    hidden in a sum, or if rounds differ.

    Args:
        counted: returns the given run, which may tell its progress among the given number of runs.
    """
    check_level(alpha)
    scope, step, repeats = client.case.scope, client.step, Repeats.of(n, delta, alpha)
    run = counted(run_score(client), repeats.total)
    note = f"one example of a DP-SGD client, {client.rounds} of {client.case.setting.rounds} rounds, {client.steps} steps"
    equal_rounds = step.noise_multiplier > 0 and client.alike()
    if equal_rounds and step.rate < 1 and step.steps == 1:
        return many_sampled_runs(run, client.event, scope, rng, repeats, note=note)
    gaussian = equal_rounds and step.rate == 1
    return many_runs(run, scope, rng, repeats, gaussian=gaussian, note=note)


# --- one run -----------------------------------------------------------------------------------------------------------


def canary_scores(client: DpSgdClient, rng: np.random.Generator) -> tuple[Floats, Sequence[bool]]:
    """Return scores and coins of one run in which a fair coin decides whether example i has its gradient along coordinate i.

    Returns:
        Scores [d], larger if the canary looks present, and the coins. Gradients come from automatic differentiation.
    """
    d, step = client.case.setting.layout.dimension, client.step
    coins = rng.random(d) < 0.5
    tall = _TALL * step.clip * np.where(coins, 1.0, client.offset)
    examples = torch.diag(torch.from_numpy(tall).float())
    x = [
        client.along(vector)
        for vector in client.uploads(examples, rng, partial(per_example_gradients, losses_of=Classification().losses))
    ]
    return np.sum(x, axis=0), coins.tolist()


def simulated_scores(client: DpSgdClient, m: int, rng: np.random.Generator) -> tuple[Floats, Sequence[bool]]:
    """Return scores and coins for m canaries, simulated under the charged mechanism."""
    step = client.step
    coins = rng.random(m) < 0.5
    joined = rng.binomial(client.steps, step.rate, m) * np.where(coins, 1.0, client.offset)
    return joined + math.sqrt(client.steps) * step.noise_multiplier * rng.standard_normal(m), coins.tolist()


def audit_canaries(client: DpSgdClient, rng: np.random.Generator, *, delta: float = 1e-5, alpha: float = 0.05) -> Audit:
    """Audit one run that has a canary example for each coordinate; a simulation chooses how many canaries to guess."""
    check_level(alpha)
    m, scope = client.case.setting.layout.dimension, client.case.scope
    gaussian = client.step.rate == 1 and client.alike()

    def worth(guesses: Guesses) -> float:
        return mu_bound(guesses, alpha) if gaussian else epsilon_bound(guesses, delta, alpha)

    k = choose_guesses(lambda g: simulated_scores(client, m, g), symmetric_grid(m), worth, rng, runs=10)
    guesses = guess(*canary_scores(client, rng), *k)
    note = f"canary examples of a DP-SGD client, {client.rounds} of {client.case.setting.rounds} rounds"
    return (audit_one_run_gdp if gaussian else audit_one_run)(guesses, delta, scope, alpha, note=note)
