"""Audits through real training: clip and noise inside local training, whole runs by their last model, coupled runs.

The neighbours are two small data sets with linear losses <w, x>. All examples but one have the gradient `common`; the last one
has a different gradient in each world (at client level, all examples differ). Everything from the training loop to the door is
the method's code. Several consecutive rounds of the client are one subject, since its private state persists between them.

In coupled runs the client's whole data are swapped, and the noise of world 1 is chosen such that every round releases what world
0 released. A support that depends only on earlier releases is then the same in both worlds; one that depends on raw values is
not.

In audits of the last model one client moves the model along a fixed direction as far as its clip allows, or the other way
(replace-one), or not at all (zero-out); all others add only noise. For local SGD on clipped gradients this is a loss that is
linear in the model, and so L-smooth for every L. Policy, door, aggregation and the server's optimiser are the run's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.types import Adjacency, Audit, Scope, Unit, View
from fedveil.audit.adapter import Case, LinearLoss, first_plan, gaussian_run, linear_model, worst_pair
from fedveil.audit.single_upload import FALSE_CONSTANT, structural
from fedveil.audit.subject import Floats, Output, Subject
from fedveil.audit.two_world import Repeats, many_runs
from fedveil.errors import ConfigError
from fedveil.federation.round import observed
from fedveil.federation.server import server_step
from fedveil.mechanism.plan import LocalDpSgd, Plan, Raw, Released
from fedveil.methods.method import Mean
from fedveil.release.sealed import clipped
from fedveil.training.local import Client, Local, State, train
from fedveil.training.params import FlatModel, Layout

_PILOTS = 16
_EXAMPLES = 16


@dataclass(frozen=True)
class Neighbours:
    """Two data sets with linear losses: gradients of the differing examples in each world, and of the common ones.

    Each is [d], or [rounds, d] if the losses' gradients change from round to round, as the global model does.
    """

    name: str
    common: Tensor
    own: tuple[Tensor, Tensor]


def pairs(case: Case, rounds: int) -> list[Neighbours]:
    """Return neighbours that reveal typical weaknesses, two for each unit of privacy.

    Both: opposite gradients, or zero against one. Records, each of which outweighs the others in its batch: also one gradient
    among flat losses. Clients: also a small layer whose norm grows from round to round or does not.
    """
    s, layout = case.setting, case.setting.layout
    generator = torch.Generator().manual_seed(1)
    scale = s.local.batch_clip or 1.0
    common, own = (v * (scale / v.norm()) for v in torch.randn(2, layout.dimension, generator=generator).unbind())
    flat = torch.zeros(layout.dimension)
    one_sided = s.scope.adjacency is Adjacency.ZERO_OUT
    against = "no gradient against one" if one_sided else "opposite gradients"
    if s.scope.unit is Unit.RECORD:
        own = own * min(s.records, _EXAMPLES)
        return [Neighbours(against, common, (flat if one_sided else -own, own)), Neighbours("others flat", flat, (flat, own))]
    grows, shrinks = (_moving_layer(own, layout, rounds, grows=up) for up in (True, False))
    return [
        Neighbours(against, flat, (flat if one_sided else -own, own)),
        Neighbours("a growing layer", flat, (flat if one_sided else shrinks, grows)),
    ]


def _moving_layer(own: Tensor, layout: Layout, rounds: int, *, grows: bool) -> Tensor:
    """Return `own` for each round [rounds, d]; the smallest layer's share grows or shrinks, and the others' do the opposite."""
    out = own.repeat(rounds, 1)
    smallest = min(range(len(layout)), key=lambda i: layout.sizes[i])
    for t, row in enumerate(out):
        share = (0.1 + 0.8 * t / max(rounds - 1, 1)) if grows else (0.9 - 0.8 * t / max(rounds - 1, 1))
        for i, part in enumerate(layout.split(row)):
            part.mul_(float(own.norm() / part.norm()) * (share if i == smallest else (1 - share**2) ** 0.5 / len(layout)))
    return out


@dataclass(frozen=True)
class Trainer:
    """Rounds of one client in one of two worlds.

    scope: of the audit. peers: clients with flat losses whose uploads are added before anyone sees them.
    """

    case: Case
    neighbours: Neighbours
    rounds: int
    scope: Scope
    peers: int = 0

    @cached_property
    def model(self) -> FlatModel:
        """Return the network that every client of these runs trains, one after the other."""
        return linear_model(self.case.setting.layout)

    @cached_property
    def objective(self) -> Client:
        """Return the method's local objective."""
        return self.case.method.client(self.case.setting)

    def __call__(self, world: int, rng: np.random.Generator, /, noiseless: bool = False) -> Output:
        """Run all rounds, one after the other; `noiseless` sets all noise to 0, inside training and at the door."""
        released = [self._client(self.neighbours.own[world], self.neighbours.common, rng, noiseless)]
        flat = torch.zeros_like(self.case.model)
        released += [self._client(flat, flat, rng, noiseless) for _ in range(self.peers)]
        vector = torch.stack([vector for vector, _ in released]).sum(0)
        return Output(vector.numpy(), None if self.scope.view is not View.SERVER else released[0][1])

    def _client(self, own: Tensor, common: Tensor, rng: np.random.Generator, noiseless: bool) -> tuple[Tensor, np.ndarray]:
        private: State = {}
        state, vectors, masks = self.case.policy.start(), [], []
        noise = torch.Generator().manual_seed(int(rng.integers(2**62)))
        normal = (lambda k: torch.zeros(k)) if noiseless else (lambda k: torch.randn(k, generator=noise))
        for t in range(self.rounds):
            plan = self.case.policy.plan(Released(t, self.case.model, None, 0.5), state)
            update, private = self.train(own, common, t, private, normal)
            vector, support = self._release(update, plan, t, rng, noiseless)
            vectors.append(vector)
            masks.append(torch.ones(len(update), dtype=torch.bool) if support is None else support)
        return torch.cat(vectors), torch.cat(masks).numpy()

    def train(
        self, own: Tensor, common: Tensor, round: int, private: State, normal: Callable[[int], Tensor]
    ) -> tuple[Tensor, State]:
        """Return the update [d] and the private state after one round of training, with noise from `normal`."""
        s = self.case.setting
        n = min(s.records, _EXAMPLES)
        alone = s.scope.unit is Unit.RECORD
        data = (
            torch.stack([_in_round(common if alone and i else own, round) for i in range(n)]),
            torch.zeros(n, dtype=torch.int64),
        )
        batches = torch.Generator().manual_seed(round)
        local = Local(self.model, self.case.model, s.local, LinearLoss(), batches, round=round, state=dict(private), data=data)
        local.normal = normal
        update, _ = train(local, *data, self.objective)
        return update, local.state

    def _release(
        self, update: Tensor, plan: Plan | Raw, round: int, rng: np.random.Generator, noiseless: bool
    ) -> tuple[Tensor, Tensor | None]:
        if noiseless:
            made = plan.make(update) if isinstance(plan, Raw) else plan
            return clipped(update, made, self.case.setting.layout), made.support
        upload = self.case.door(rng).upload(update, plan, 0, round)
        return upload.vector, upload.support


def _in_round(gradient: Tensor, round: int) -> Tensor:
    return gradient[round] if gradient.dim() == 2 else gradient


def training_subject(case: Case, neighbours: Neighbours, rng: np.random.Generator, *, rounds: int, peers: int = 0) -> Subject:
    """Return the client's first rounds as one release; means and layer-wise noise stds are estimated in pilot runs.

    Args:
        rounds: consecutive rounds in one release. peers: further clients in a sum (aggregate view); 0 for the server view.

    The stds only sharpen the score: any score is sound.
    """
    scope = replace(case.setting.scope, view=View.AGGREGATE if peers else View.SERVER)
    trainer = Trainer(case, neighbours, rounds, scope, peers)
    means, stds = [], []
    for world in (0, 1):
        pilots = np.stack([trainer(world, rng).vector.astype(np.float64) for _ in range(_PILOTS)])
        noiseless = trainer(world, rng, noiseless=True).vector.astype(np.float64)
        noise = pilots.std(axis=0)
        constant = noise == 0
        means.append(np.where(constant, pilots[0], noiseless))
        stds.append(_by_layer(noise, case.setting.layout, rounds))
    return Subject(f"{case.method.name}, {neighbours.name}", trainer, scope, (means[0], means[1]), (stds[0], stds[1]))


def _by_layer(noise: Floats, layout: Layout, rounds: int) -> Floats:
    """Return the rms of each layer's noise on its noisy coordinates; 0 stays 0."""
    out = noise.copy()
    edges = np.cumsum([0, *layout.sizes * rounds])
    for start, end in pairwise(edges):
        part = out[start:end]
        noisy = part > 0
        if noisy.any():
            part[noisy] = np.sqrt(np.mean(part[noisy] ** 2))
    return out


@dataclass(frozen=True)
class Support:
    """Supports of two coupled runs in one round.

    sent: coordinates that world 0 sent. differs: coordinates that only one of the worlds sent. gap: largest difference between
    the two releases, relative to the largest value; rounding only, if the coupling worked.
    """

    sent: int
    differs: int
    gap: float


def supports_given_releases(trainer: Trainer, rng: np.random.Generator) -> list[Support]:
    """Return the supports of every round in two runs coupled to release the same values until then.

    Args:
        trainer: rounds of a client at client level, whose method draws its noise once per round. rng: source of the noise.

    Raises:
        ConfigError: the method draws noise more than once per round, or protects records.
    """
    if trainer.case.setting.scope.unit is not Unit.CLIENT:
        raise ConfigError("worlds are coupled at client level, where the whole data are swapped: set privacy.unit = 'client'")
    d = len(trainer.case.model)
    private: list[State] = [{}, {}]
    supports = []
    for t in range(trainer.rounds):
        drawn = torch.from_numpy(rng.standard_normal(d)).float()
        first, after = _round(trainer, 0, t, private[0], drawn)
        noiseless, _ = _round(trainer, 1, t, private[1], torch.zeros(d))
        one, _ = _round(trainer, 1, t, private[1], torch.ones(d))
        std = one - noiseless
        needed = torch.where(std > 0, (first - noiseless) / std.where(std > 0, torch.ones(())), torch.zeros(()))
        second, again = _round(trainer, 1, t, private[1], needed)
        sent = [_support(trainer, vector, t) for vector in (first, second)]
        both = sent[0] & sent[1]
        gap = float(((first - second).abs() * both).max() / first.abs().max())
        supports.append(Support(int(sent[0].sum()), int((sent[0] ^ sent[1]).sum()), gap))
        private = [after, again]
    return supports


def _round(trainer: Trainer, world: int, round: int, private: State, noise: Tensor) -> tuple[Tensor, State]:
    once = _once(noise)
    return trainer.train(trainer.neighbours.own[world], trainer.neighbours.common, round, private, once)


def _once(noise: Tensor) -> Callable[[int], Tensor]:
    unused = [noise]

    def draw(n: int) -> Tensor:
        if not unused or n != len(noise):
            raise ConfigError("coupled worlds need a method that draws noise for the whole update, once per round")
        return unused.pop()

    return draw


def _support(trainer: Trainer, update: Tensor, round: int) -> Tensor:
    policy = trainer.case.policy
    plan = policy.plan(Released(round, trainer.case.model, None, 0.5), policy.start())
    made = plan.make(update) if isinstance(plan, Raw) else plan
    assert isinstance(made, Plan)
    return torch.ones(len(update), dtype=torch.bool) if made.support is None else made.support


@dataclass(frozen=True)
class Runs:
    """Whole runs of a case whose plans do not read the data; one client takes part in its last permitted rounds."""

    case: Case
    pair: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, case: Case) -> Runs:
        """Return the runs on the pair that is worst for the first round's plan."""
        plan = first_plan(case)
        if not isinstance(plan, Plan) or isinstance(plan, LocalDpSgd) or not case.summed:
            raise ConfigError(
                "whole runs are audited where plans do not read the data, noise is at the door and updates are summed"
            )
        return cls(case, worst_pair(plan, case))

    @property
    def gaussian(self) -> bool:
        """Return whether the last model is Gaussian with the same covariance in both worlds."""
        s, rng = self.case.setting, np.random.default_rng(0)
        linear = s.server.name == "sgd" and type(self.case.method.server(s)) is Mean
        return linear and gaussian_run(self.case, min(s.rounds, 10), rng)

    def last(self, world: int, rng: np.random.Generator, /) -> torch.Tensor:
        """Return the last model [d] of one run."""
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
        """Return a function (world, rng) -> the last model's position along the difference of the worlds."""
        direction = (self.pair[1] - self.pair[0]).double()

        def run(world: int, rng: np.random.Generator, /) -> float:
            return float((self.last(world, rng).double() - self.case.model) @ direction)

        return run


def audit_last_model(case: Case, rng: np.random.Generator, *, n: int = 1000, delta: float = 1e-5, alpha: float = 0.05) -> Audit:
    """Return a lower bound for an adversary who sees only the last model.

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
