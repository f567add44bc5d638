"""DP-SGD clients audited at the door: gradients are crafted; sampling, clip, noise, local training and release are the real ones.

Two worlds: one example is there or not (zero-out), or has opposite gradients (replace-one), and many runs are told apart. One
run: m examples with orthogonal gradients enter by coin flips (Steinke, Nasr & Jagielski 2023). The adversary sees what leaves:
one update a round, which is the sum of its noisy steps.
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
from fedveil.audit.two_world import Repeats, many_runs, many_sampled_runs
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
TALL = 10.0
"""Crafted gradients have this multiple of the clip as their norm, so that a clip that does not hold shows."""


@dataclass(frozen=True)
class DpSgdClient:
    """A client whose local training is DP-SGD, in every one of `rounds` rounds; alone in its sum where uploads are summed."""

    case: Case
    rounds: int

    @property
    def step(self) -> DpSgd:
        """What each step does."""
        plan = first_plan(self.case)
        if not isinstance(plan, LocalDpSgd):
            raise ConfigError(f"{self.case.method.name} does not train with DP-SGD here: set training.local = 'dp-sgd'")
        return plan.step

    @property
    def offset(self) -> float:
        """Where the other world's example lies along the canary's gradient, in clips: absent 0, opposite -1."""
        return 0.0 if self.case.setting.scope.adjacency is Adjacency.ZERO_OUT else -1.0

    @property
    def steps(self) -> int:
        """Noisy steps in all rounds."""
        return self.step.steps * self.rounds

    @property
    def event(self) -> SampledGaussian:
        """What the accountant charges for these rounds."""
        step = self.step
        multiplier = step.noise_multiplier / self.case.setting.scope.adjacency.factor
        return SampledGaussian(step.rate, multiplier, self.steps)

    def alike(self) -> bool:
        """Whether the steps of every round have the rate and the noise of the first, in one run on no examples."""
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
        """What leaves in each round [d], when the client's examples are these rows [n, d]."""
        case, s, model = self.case, self.case.setting, linear_model(self.case.setting.layout)
        objective, state = case.method.client(s), case.policy.start()
        private: State = {}
        labels = torch.zeros(len(examples), dtype=torch.int64)
        for t in range(self.rounds):
            released = case.released(t)
            plan = case.policy.plan(released, state)
            assert isinstance(plan, LocalDpSgd)
            noise = Randomness(int(rng.integers(2**62)), seeded_noise=True)
            step = replace(plan.step, cap=max(plan.step.cap, len(examples)))  # all canaries may join
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
        """A released update [d] in units of what one clipped example moves it in one step of plain SGD."""
        s, step = self.case.setting, self.step
        rate = sum(s.local.learning_rate(0, k, step.steps) for k in range(step.steps)) / step.steps
        return np.asarray(vector.double().numpy() * (step.expected / (rate * step.clip)), dtype=np.float64)

    def ratio(self, x: Floats) -> float:
        """log-likelihood ratio of the rounds' movements along the canary [T]: it took part in Binomial(K, q) steps of each."""
        step = self.step
        joined = np.arange(step.steps + 1)
        weight = binom.logpmf(joined, step.steps, step.rate)
        variance = step.steps * max(step.noise_multiplier, 1e-9) ** 2

        def density(shift: float) -> Floats:
            gap = x[:, None] - shift * joined
            return np.asarray(np.logaddexp.reduce(weight - gap**2 / (2 * variance), axis=1), dtype=np.float64)

        return float(np.sum(density(1.0) - density(self.offset)))


def crafted(module: torch.nn.Module, x: Tensor, y: Tensor) -> tuple[list[Block], Tensor]:
    """Linear losses without automatic differentiation: the gradient of example x is -x, as that of `linear_model`."""
    return [Dense(-x)], x.new_zeros(len(x))


# --- two worlds --------------------------------------------------------------------------------------------------------


def run_score(client: DpSgdClient, bystanders: int = 3) -> Callable[[int, np.random.Generator], float]:
    """(world, rng) -> log-likelihood ratio of a run in which one example among `bystanders` common ones differs."""
    step, d = client.step, client.case.setting.layout.dimension
    own = torch.full((d,), TALL * step.clip / math.sqrt(d))
    other = torch.zeros(d)
    other[::2] = TALL * step.clip / math.sqrt(d)
    other[1::2] = -TALL * step.clip / math.sqrt(d)  # orthogonal to the canary: common examples tell nothing
    direction = own.double().numpy() / float(own.double().norm())

    def run(world: int, rng: np.random.Generator, /) -> float:
        examples = torch.stack([own if world else client.offset * own, *[other] * bystanders])
        x = [client.along(vector) @ direction for vector in client.uploads(examples, rng, crafted)]
        return client.ratio(np.array(x))

    return run


def audit_two_worlds(
    client: DpSgdClient, rng: np.random.Generator, *, n: int = 1000, delta: float = 1e-5, alpha: float = 0.05
) -> Audit:
    """Tell two neighbouring data sets of one client apart in n runs each.

    The bound goes through the Gaussian curve at rate 1, through the accountant's own curve where every round is one sampled step
    of the same rate and noise (what leaves is then exactly what was charged), and through Clopper-Pearson else: where steps are
    hidden in a sum, and where rounds differ, whose curve is not that of equal ones.
    """
    check_level(alpha)
    run, scope, step = run_score(client), client.case.scope, client.step
    repeats = Repeats.of(n, delta, alpha)
    note = f"one example of a DP-SGD client, {client.rounds} of {client.case.setting.rounds} rounds, {client.steps} steps"
    known = step.noise_multiplier > 0 and client.alike()
    if known and step.rate < 1 and step.steps == 1:
        return many_sampled_runs(run, client.event, scope, rng, repeats, note=note)
    gaussian = known and step.rate == 1
    return many_runs(run, scope, rng, repeats, gaussian=gaussian, note=note)


# --- one run -----------------------------------------------------------------------------------------------------------


def canary_scores(client: DpSgdClient, rng: np.random.Generator) -> tuple[Floats, Sequence[bool]]:
    """One run in which example i has its gradient along coordinate i, or as in the other world, by a fair coin.

    Returns:
        Scores [d], larger where the canary looks present, and the coins. Gradients are those of automatic differentiation.
    """
    d, step = client.case.setting.layout.dimension, client.step
    coins = rng.random(d) < 0.5
    tall = TALL * step.clip * np.where(coins, 1.0, client.offset)
    examples = torch.diag(torch.from_numpy(tall).float())
    x = [
        client.along(vector)
        for vector in client.uploads(examples, rng, partial(per_example_gradients, losses_of=Classification().losses))
    ]
    return np.sum(x, axis=0), coins.tolist()


def simulated_scores(client: DpSgdClient, m: int, rng: np.random.Generator) -> tuple[Floats, Sequence[bool]]:
    """The same scores as the charged mechanism would give them, for m canaries."""
    step = client.step
    coins = rng.random(m) < 0.5
    joined = rng.binomial(client.steps, step.rate, m) * np.where(coins, 1.0, client.offset)
    return joined + math.sqrt(client.steps) * step.noise_multiplier * rng.standard_normal(m), coins.tolist()


def audit_canaries(client: DpSgdClient, rng: np.random.Generator, *, delta: float = 1e-5, alpha: float = 0.05) -> Audit:
    """A bound from one run with as many canary examples as the layout has coordinates; guesses fixed by a simulation."""
    check_level(alpha)
    m, scope = client.case.setting.layout.dimension, client.case.scope
    gaussian = client.step.rate == 1 and client.alike()

    def worth(found: Guesses) -> float:
        return mu_bound(found, alpha) if gaussian else epsilon_bound(found, delta, alpha)

    k = choose_guesses(lambda g: simulated_scores(client, m, g), symmetric_grid(m), worth, rng, runs=10)
    found = guess(*canary_scores(client, rng), *k)
    note = f"canary examples of a DP-SGD client, {client.rounds} of {client.case.setting.rounds} rounds"
    return (audit_one_run_gdp if gaussian else audit_one_run)(found, delta, scope, alpha, note=note)
