"""Methods whose clip and noise act inside local training, or follow the private update: audited through the real objective.

The neighbours are two small data sets with linear losses <w, x>: all examples but one have the gradient `common`, the last one
has a gradient of its own in each world (at client level: all of them have). Everything from the training loop to the door is the
method's own code. Several consecutive rounds of the client are one subject, since its private state carries over.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedveil.audit.adapter import Case
from fedveil.audit.linear import LinearLoss, linear_model
from fedveil.audit.mechanism import Floats, Subject, Upload
from fedveil.local import Local, State, train
from fedveil.params import Layout
from fedveil.privacy.types import Adjacency, Scope, Unit, View
from fedveil.release.plan import Released

PILOTS = 64
EXAMPLES = 16


@dataclass(frozen=True)
class Neighbours:
    """Two data sets with linear losses: gradients [d] of the differing examples in each world, and of the common ones."""

    name: str
    common: Tensor
    own: tuple[Tensor, Tensor]


def pairs(case: Case) -> list[Neighbours]:
    """Neighbours that show the weak places: opposite gradients among common ones, and one example among flat losses."""
    layout = case.setting.layout
    d, generator = layout.dimension, torch.Generator().manual_seed(1)
    scale = case.setting.local.batch_clip or 1.0
    common, own = (v * (scale / v.norm()) for v in torch.randn(2, d, generator=generator).unbind())
    scope = case.setting.scope
    flat = torch.zeros(d)
    one_sided = scope.unit is Unit.CLIENT and scope.adjacency is Adjacency.ZERO_OUT
    opposite = (flat if one_sided else -own, own)
    return [Neighbours("opposite gradients", common, opposite), Neighbours("others flat", flat, (flat, own))]


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

    def __call__(self, world: int, rng: np.random.Generator, /, quiet: bool = False) -> Upload:
        """All rounds, one after the other; `quiet` takes all noise inside training to be 0."""
        released = [self._client(self.neighbours.own[world], self.neighbours.common, rng, quiet)]
        flat = torch.zeros_like(self.neighbours.common)
        released += [self._client(flat, flat, rng, quiet) for _ in range(self.peers)]
        vector = torch.stack([vector for vector, _ in released]).sum(0)
        return Upload(vector.numpy(), None if self.scope.view is not View.SERVER else released[0][1])

    def _client(self, own: Tensor, common: Tensor, rng: np.random.Generator, quiet: bool) -> tuple[Tensor, np.ndarray]:
        case, s = self.case, self.case.setting
        n = min(s.records, EXAMPLES)
        alone = s.scope.unit is Unit.RECORD
        rows = torch.stack([common if alone and i else own for i in range(n)])
        y, model, objective = torch.arange(n), linear_model(s.layout), case.method.objective(s)
        private: State = {}
        state, vectors, masks = case.policy.start(), [], []
        noise = torch.Generator().manual_seed(int(rng.integers(2**62)))
        for t in range(self.rounds):
            public = Released(t, case.model, None, 0.5)
            plan = case.policy.plan(public, state)
            local = Local(
                model,
                case.model,
                s.local,
                LinearLoss(rows),
                torch.Generator().manual_seed(t),
                round=t,
                state=private,
                normal=(lambda k: torch.zeros(k)) if quiet else (lambda k: torch.randn(k, generator=noise)),
            )
            update, _ = train(local, y[:, None].float(), y, objective)
            private = local.state
            upload = case.door(rng).upload(update, plan, 0, t)
            vectors.append(upload.vector)
            masks.append(torch.ones(len(update), dtype=torch.bool) if upload.support is None else upload.support)
        return torch.cat(vectors), torch.cat(masks).numpy()


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
