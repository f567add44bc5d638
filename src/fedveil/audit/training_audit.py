"""Methods whose clip and noise act inside local training, or follow the private update: audited through the real objective.

The neighbours are two small data sets with linear losses <w, x>: all examples but one have the gradient `common`, the last one
has a gradient of its own in each world (at client level: all of them have). Everything from the training loop to the door is the
method's own code. Several consecutive rounds of the client are one subject, since its private state carries over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.audit.adapter import Case
from fedveil.audit.linear import LinearLoss, linear_model
from fedveil.audit.subject import Floats, Output, Subject
from fedveil.mechanism.plan import Plan, Raw, Released
from fedveil.release.bare_release import clipped
from fedveil.training.local import Client, Local, State, train
from fedveil.training.params import FlatModel, Layout

PILOTS = 16
EXAMPLES = 16


@dataclass(frozen=True)
class Neighbours:
    """Two data sets with linear losses: gradients of the differing examples in each world, and of the common ones.

    Each is [d], or [rounds, d] where the losses' gradients change from round to round, as the global model does.
    """

    name: str
    common: Tensor
    own: tuple[Tensor, Tensor]


def pairs(case: Case, rounds: int) -> list[Neighbours]:
    """Neighbours that show the weak places, two for each unit of privacy.

    Records: opposite gradients among common ones, and one gradient among flat losses; each outweighs all others of its batch.
    Clients: opposite gradients (or none against some), and a small layer whose norm grows from round to round or does not.
    """
    s, layout = case.setting, case.setting.layout
    generator = torch.Generator().manual_seed(1)
    scale = s.local.batch_clip or 1.0
    common, own = (v * (scale / v.norm()) for v in torch.randn(2, layout.dimension, generator=generator).unbind())
    flat = torch.zeros(layout.dimension)
    if s.scope.unit is Unit.RECORD:
        own = own * min(s.records, EXAMPLES)
        return [Neighbours("opposite gradients", common, (-own, own)), Neighbours("others flat", flat, (flat, own))]
    one_sided = s.scope.adjacency is Adjacency.ZERO_OUT
    grows, shrinks = (_moving_layer(own, layout, rounds, grows=up) for up in (True, False))
    return [
        Neighbours("no gradients against some" if one_sided else "opposite gradients", flat, (flat if one_sided else -own, own)),
        Neighbours("a growing layer", flat, (flat if one_sided else shrinks, grows)),
    ]


def _moving_layer(own: Tensor, layout: Layout, rounds: int, *, grows: bool) -> Tensor:
    """`own` in each round [rounds, d] with the share of the smallest layer growing or shrinking, the others' the other way."""
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
        """The network that every client of these runs trains, one after the other."""
        return linear_model(self.case.setting.layout)

    @cached_property
    def objective(self) -> Client:
        """What local training does."""
        return self.case.method.client(self.case.setting)

    def __call__(self, world: int, rng: np.random.Generator, /, quiet: bool = False) -> Output:
        """All rounds, one after the other; `quiet` takes all noise, inside training and at the door, to be 0."""
        released = [self._client(self.neighbours.own[world], self.neighbours.common, rng, quiet)]
        flat = torch.zeros_like(self.case.model)
        released += [self._client(flat, flat, rng, quiet) for _ in range(self.peers)]
        vector = torch.stack([vector for vector, _ in released]).sum(0)
        return Output(vector.numpy(), None if self.scope.view is not View.SERVER else released[0][1])

    def _client(self, own: Tensor, common: Tensor, rng: np.random.Generator, quiet: bool) -> tuple[Tensor, np.ndarray]:
        private: State = {}
        state, vectors, masks = self.case.policy.start(), [], []
        noise = torch.Generator().manual_seed(int(rng.integers(2**62)))
        normal = (lambda k: torch.zeros(k)) if quiet else (lambda k: torch.randn(k, generator=noise))
        for t in range(self.rounds):
            plan = self.case.policy.plan(Released(t, self.case.model, None, 0.5), state)
            update, private = self.train(own, common, t, private, normal)
            vector, support = self._release(update, plan, t, rng, quiet)
            vectors.append(vector)
            masks.append(torch.ones(len(update), dtype=torch.bool) if support is None else support)
        return torch.cat(vectors), torch.cat(masks).numpy()

    def train(
        self, own: Tensor, common: Tensor, round: int, private: State, normal: Callable[[int], Tensor]
    ) -> tuple[Tensor, State]:
        """The update [d] and the private state after a round of training on a world's gradients, with noise from `normal`."""
        s = self.case.setting
        n = min(s.records, EXAMPLES)
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
        self, update: Tensor, plan: Plan | Raw, round: int, rng: np.random.Generator, quiet: bool
    ) -> tuple[Tensor, Tensor | None]:
        if quiet:
            made = plan.make(update) if isinstance(plan, Raw) else plan
            return clipped(update, made, self.case.setting.layout), made.support
        upload = self.case.door(rng).upload(update, plan, 0, round)
        return upload.vector, upload.support


def _in_round(gradient: Tensor, round: int) -> Tensor:
    return gradient[round] if gradient.dim() == 2 else gradient


def training_subject(case: Case, neighbours: Neighbours, rng: np.random.Generator, *, rounds: int, peers: int = 0) -> Subject:
    """The client's first rounds as one release; means and layer-wise noise stds are fitted to pilot runs.

    Args:
        rounds: consecutive rounds in one release. peers: further clients in a sum (aggregate view); 0 for the server view.

    The stds only sharpen the score: any score is sound.
    """
    scope = Scope(case.setting.scope.unit, Adjacency.REPLACE_ONE, View.SERVER)
    if case.setting.scope.unit is Unit.CLIENT and case.setting.scope.adjacency is Adjacency.ZERO_OUT:
        scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.SERVER)
    if peers:
        scope = Scope(scope.unit, scope.adjacency, View.AGGREGATE)
    trainer = Trainer(case, neighbours, rounds, scope, peers)
    means, stds = [], []
    for world in (0, 1):
        pilots = np.stack([trainer(world, rng).vector.astype(np.float64) for _ in range(PILOTS)])
        quiet = trainer(world, rng, quiet=True).vector.astype(np.float64)
        noise = pilots.std(axis=0)
        still = noise == 0
        means.append(np.where(still, pilots[0], quiet))
        stds.append(_by_layer(noise, case.setting.layout, rounds))
    return Subject(f"{case.method.name}, {neighbours.name}", trainer, scope, (means[0], means[1]), (stds[0], stds[1]))


def _by_layer(noise: Floats, layout: Layout, rounds: int) -> Floats:
    """The rms of each layer's noise on its noisy coordinates; 0 stays 0."""
    out = noise.copy()
    edges = np.cumsum([0, *layout.sizes * rounds])
    for start, end in pairwise(edges):
        part = out[start:end]
        noisy = part > 0
        if noisy.any():
            part[noisy] = np.sqrt(np.mean(part[noisy] ** 2))
    return out
