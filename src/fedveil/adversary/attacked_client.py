"""The attacked client: whose examples it holds, and its round, run by the same code as in training."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.errors import ConfigError, FedveilError
from fedveil.federation.clients import Clients
from fedveil.federation.round import ClientTask, Context, client_round
from fedveil.mechanism.plan import Plan, Raw, Upload
from fedveil.release.bare_release import clipped
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.release.plan_terms import Terms
from fedveil.release.sealed import Contribution, SealedUpload

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.adversary.snapshot import Snapshot


@dataclass(frozen=True)
class Victim:
    """A client and the examples that it holds in the attacked round, each `copies` times.

    x: (n, *shape) in the model's units. y: (n,).
    """

    client: int
    x: Tensor
    y: Tensor
    copies: int = 1


def victims(snapshot: Snapshot, count: int, batch: int, rng: np.random.Generator) -> list[Victim]:
    """`count` attacked clients with `batch` of their training examples each, drawn without repetition of an example.

    Raises:
        ConfigError: the clients do not hold that many.
    """
    clients = snapshot.federation.context.clients
    blocks = [(c, b) for c, size in enumerate(clients.sizes().tolist()) for b in range(size // batch)]
    if len(blocks) < count:
        lower = "--images" if blocks else "--batch"
        raise ConfigError(
            f"the clients hold {len(blocks)} blocks of {batch} examples, and {count} are to be attacked: lower {lower}"
        )
    shuffled = [blocks[i] for i in rng.permutation(len(blocks))]
    chosen = sorted(shuffled, key=lambda block: block[1])[:count]
    found = []
    for c, b in chosen:
        x, y = clients.examples(c)
        found.append(Victim(c, x[b * batch : (b + 1) * batch], y[b * batch : (b + 1) * batch]))
    return found


def owners(snapshot: Snapshot) -> list[Victim]:
    """All clients that hold examples, with all that they hold."""
    clients = snapshot.federation.context.clients
    return [Victim(c, *clients.examples(c)) for c in range(len(clients)) if clients.size(c)]


def holders_of_test_images(snapshot: Snapshot, count: int) -> list[Victim]:
    """Clients in turn, each with one of the first test images, in as many copies as a client has examples.

    Raises:
        ConfigError: there are not that many test images.
    """
    (x, y), s = snapshot.federation.test, snapshot.federation.setting
    if count > len(y):
        raise ConfigError(f"{count} test images are to be attacked, and {snapshot.info.name} has {len(y)}: lower --images")
    return [Victim(i % s.clients, x[i : i + 1], y[i : i + 1], s.records) for i in range(count)]


@dataclass(frozen=True)
class RecordingDoor(Door):
    """The run's door, with a note of each clipped update before its noise, for the record alone."""

    clean: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, door: Door) -> RecordingDoor:
        return cls(**{f.name: getattr(door, f.name) for f in fields(Door)})

    def seal_upload(self, update: Tensor | None, plan: Plan | Raw | Terms, client: int, round: int, **more: Any) -> SealedUpload:
        plan = plan.source if isinstance(plan, Terms) else plan
        sealed = super().seal_upload(update, plan, client, round, **more)
        self._note(update, sealed.upload.plan)
        return sealed

    def seal(self, update: Tensor | None, plan: Plan | Raw | Terms, client: int, round: int, **more: Any) -> Contribution:
        plan = plan.source if isinstance(plan, Terms) else plan
        sealed = super().seal(update, plan, client, round, **more)
        self._note(update, sealed.plan if isinstance(plan, Raw) else plan)
        return sealed

    def _note(self, update: Tensor | None, plan: Plan | None) -> None:
        assert plan is not None
        self.clean.append(clipped(torch.zeros(self.layout.dimension) if update is None else update, plan, self.layout))


class WithoutNoise(Randomness):
    """The run's randomness with every noise at zero: what a client would send if nothing were added anywhere."""

    def integers(self, std: float | NDArray[np.float64], n: int, *name: object, threads: int | None = None) -> NDArray[np.int64]:
        """Zeros [n]."""
        return np.zeros(n, dtype=np.int64)


def client_release(
    snapshot: Snapshot, victim: Victim, plan: Plan | Raw | None, *, noise: bool = True
) -> tuple[Upload | Contribution, Tensor]:
    """What one client releases, and its clipped update before the door's noise [d]; the same code as in training."""
    context, progress = snapshot.federation.context, snapshot.progress
    if not noise:
        quiet = WithoutNoise(**vars(context.randomness))
        context = replace(context, randomness=quiet, door=replace(context.door, randomness=quiet))
    recording = RecordingDoor.of(context.door)
    held: Context = replace(context, clients=holding(victim, len(context.clients)), door=recording)
    state = progress.common or context.policy.start() if plan is not None else progress.policies.get(victim.client)
    task = ClientTask(
        victim.client,
        snapshot.released,
        1.0,
        plan,
        state or context.policy.start(),
        progress.privates.get(victim.client, {}),
        progress.buffers,
    )
    outcome = client_round(held, task)
    if outcome.release is None:
        raise FedveilError(f"nothing was released, so there is nothing to attack: {outcome.error}")
    sealed = outcome.release
    return recording.release_uploads([sealed])[0] if isinstance(sealed, SealedUpload) else sealed, recording.clean[-1]


def holding(victim: Victim, clients: int) -> Clients:
    """All clients, of whom only the victim holds anything."""
    x, y = (part.repeat_interleave(victim.copies, 0) for part in (victim.x, victim.y))
    offsets = np.where(np.arange(clients + 1) > victim.client, len(y), 0).astype(np.int64)
    return Clients(x, y, offsets)
