"""Interception: what the run's own door lets out of the attacked examples, as an attacker reads it.

The attacked client runs `client_round` as in training: the method's policy, local objective and door, with its clip, noise and
mask. It differs in its data alone: it holds as many examples as the attack says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from fedveil.attacks.intercept import clip_of, intercepted
from fedveil.attacks.types import Knowledge, LocalSpec, Noise, Upload
from fedveil.errors import ConfigError, FedveilError
from fedveil.federation.clients import Clients
from fedveil.federation.fit import sample
from fedveil.federation.round import Context, Task, client_round
from fedveil.local import Plain
from fedveil.privacy.types import View
from fedveil.release import plan as release
from fedveil.release.cost import per_layer
from fedveil.release.door import Contribution, Door, clipped

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.experiment.attack_scene import Scene
    from fedveil.local import LocalSpec as Training
    from fedveil.release.noise import Randomness

AUXILIARY = 500


@dataclass(frozen=True)
class Victim:
    """A client and the examples that it holds in the attacked round. x: (n, *shape) in the model's units. y: (n,)."""

    client: int
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Interception:
    """One release, read by an attacker.

    Args:
        upload: what was let out. known: what the attacker may be told of it. victims: whose examples are behind it.
    """

    upload: Upload
    known: Knowledge
    victims: tuple[Victim, ...]

    @property
    def x(self) -> Tensor:
        """All attacked examples, in the model's units."""
        return torch.cat([v.x for v in self.victims])

    @property
    def y(self) -> Tensor:
        """Their labels."""
        return torch.cat([v.y for v in self.victims])


@dataclass(frozen=True)
class Watched:
    """The run's door, with a note of each clipped update before its noise, for the record alone."""

    door: Door
    clean: list[Tensor] = field(default_factory=list)

    def upload(
        self, update: Tensor, plan: release.Plan | release.Raw, client: int, round: int, weight: float, buffers: Tensor | None
    ) -> release.Upload:
        """As the door's."""
        sent = self.door.upload(update, plan, client, round, weight, buffers)
        self.clean.append(clipped(update, sent.plan, self.door.layout))
        return sent

    def seal(
        self, update: Tensor, plan: release.Plan | release.Raw, client: int, round: int, weight: float, buffers: Tensor | None
    ) -> Contribution:
        """As the door's."""
        sealed = self.door.seal(update, plan, client, round, weight, buffers)
        self.clean.append(clipped(update, sealed.plan, self.door.layout))
        return sealed


@dataclass(frozen=True)
class Silent:
    """The run's randomness with every noise at zero: what a client would send if nothing were added anywhere."""

    own: Randomness

    def derive(self, *key: object) -> int:
        """As the run's."""
        return self.own.derive(*key)

    def generator(self, *key: object) -> torch.Generator:
        """As the run's."""
        return self.own.generator(*key)

    def normal(self, n: int, *key: object) -> Tensor:
        """Zeros [n]."""
        return torch.zeros(n)

    def secret(self, *key: object) -> np.random.Generator:
        """As the run's."""
        return self.own.secret(*key)


def victims(scene: Scene, count: int, batch: int, rng: np.random.Generator) -> list[Victim]:
    """`count` attacked clients with `batch` of their training examples each, drawn without repetition of an example.

    Raises:
        ConfigError: the clients do not hold that many.
    """
    clients = scene.federation.context.clients
    blocks = [(c, b) for c, size in enumerate(clients.sizes().tolist()) for b in range(size // batch)]
    if len(blocks) < count:
        raise ConfigError(
            f"the clients hold {len(blocks)} blocks of {batch} examples, and {count} are to be attacked: lower --images"
        )
    shuffled = [blocks[i] for i in rng.permutation(len(blocks))]
    chosen = sorted(shuffled, key=lambda block: block[1])[:count]
    found = []
    for c, b in chosen:
        x, y = clients.examples(c)
        found.append(Victim(c, x[b * batch : (b + 1) * batch], y[b * batch : (b + 1) * batch]))
    return found


def interceptions(scene: Scene, count: int, batch: int, knows: Sequence[str], seed: int) -> Iterator[Interception]:
    """Releases of the scene's round with `batch` attacked examples a client, until `count` clients were attacked.

    Server view: one release a client. Aggregate view: one a round, of all its participants together; or, when the attacker knows
    what the others contributed, one a client again, with all the noise of the sum.

    Raises:
        ConfigError: nothing of a round is visible in the final view.
    """
    rng = np.random.default_rng(seed)
    if not scene.summed:
        for victim in victims(scene, count, batch, rng):
            yield _single(scene, victim, knows)
        return
    view = scene.federation.setting.scope.view
    if view is View.FINAL:
        raise ConfigError(
            "privacy.view = 'final' lets out the last model only, so no round can be intercepted: attack the model "
            "(--kind attribute, extraction), set privacy.view to server or aggregate, or compare with --defence none"
        )
    if "others" in knows:
        others = _others(scene)
        for victim in victims(scene, count, batch, rng):
            yield _within_known(scene, victim, others, knows)
        return
    done = 0
    while done < count:
        members = victims(scene, max(1, scene.federation.setting.cohort), batch, rng)
        yield _together(scene, members, knows)
        done += len(members)


def number(scene: Scene, count: int, knows: Sequence[str]) -> int:
    """How many releases `interceptions` gives for `count` attacked clients."""
    each = scene.federation.setting.cohort if scene.summed and "others" not in knows else 1
    return -(-count // max(1, each))


# --- one release --------------------------------------------------------------------------------------------------------


def _single(scene: Scene, victim: Victim, knows: Sequence[str]) -> Interception:
    sent, clean = _client(scene, victim, None)
    assert isinstance(sent, release.Upload)
    return _read(scene, *_with_training_noise(scene, victim, sent, clean), (victim,), knows)


def _with_training_noise(scene: Scene, victim: Victim, sent: release.Upload, clean: Tensor) -> tuple[release.Upload, Tensor]:
    """The upload with the noise that the method adds inside local training counted too, and the update without any noise.

    Who knows the method knows the size of that noise; here it is the root mean square of what silence changes in a layer.
    """
    s = scene.federation
    if isinstance(s.context.objective, Plain) and s.setting.example_clip is None:
        return sent, clean
    _, quiet = _client(scene, victim, None, silent=True)
    sizes = torch.tensor([float(n) for n in scene.layout.sizes])
    inside = scene.layout.norms(clean - quiet) / sizes.sqrt()
    return replace(sent, noise_std=(sent.noise_std.square() + inside.square()).sqrt()), quiet


def _together(scene: Scene, members: Sequence[Victim], knows: Sequence[str]) -> Interception:
    """The round's sum as the mean of its participants' updates, which nobody can tell apart."""
    plan = _common(scene)
    given = [_client(scene, victim, plan) for victim in members]
    sealed = [s for s, _ in given if isinstance(s, Contribution)]
    sent = _sum(scene, sealed, plan)
    total = sum(c.weight for c in sealed)
    factor = _denominator(scene, sealed) / total
    mean = replace(sent, vector=sent.vector * factor, noise_std=sent.noise_std * factor)
    return _read(scene, mean, torch.stack([clean for _, clean in given]).sum(0) / total, tuple(members), knows)


def _within_known(scene: Scene, victim: Victim, others: Sequence[Contribution], knows: Sequence[str]) -> Interception:
    """The round's sum less what the attacker knows: one contribution, and the noise that is left."""
    plan = _common(scene)
    own, clean = _client(scene, victim, plan)
    assert isinstance(own, Contribution)
    rest = [c for c in others if c.client != victim.client]
    sent = _sum(scene, [*rest, own], plan)
    known = torch.zeros_like(sent.vector)
    for contribution in rest:
        known += contribution.sealed
    left = (sent.vector * _denominator(scene, [*rest, own]) - known) / own.weight
    std = left.new_tensor(per_layer(sent.plan.noise_std, scene.layout)) / own.weight
    return _read(scene, replace(sent, vector=left, noise_std=std), clean, (victim,), knows)


def _others(scene: Scene) -> list[Contribution]:
    """What the participants of this round contribute, with all their own data."""
    plan = _common(scene)
    context = scene.federation.context
    found = []
    for c in sample(scene.federation, scene.progress):
        sealed, _ = _client(scene, Victim(c, *context.clients.examples(c)), plan)
        assert isinstance(sealed, Contribution)
        found.append(sealed)
    return found


def _sum(scene: Scene, sealed: Sequence[Contribution], plan: release.Plan | release.Raw) -> release.Upload:
    return scene.federation.context.door.release_sum(sealed, plan, scene.progress.round, _denominator(scene, sealed))


def _denominator(scene: Scene, sealed: Sequence[Contribution]) -> float:
    uniform = scene.federation.method.weighting == "uniform"
    return float(scene.federation.setting.cohort) if uniform else sum(c.weight for c in sealed)


def _common(scene: Scene) -> release.Plan | release.Raw:
    policy = scene.federation.context.policy
    return policy.plan(scene.released, scene.progress.common or policy.start())


def _client(
    scene: Scene, victim: Victim, plan: release.Plan | release.Raw | None, *, silent: bool = False
) -> tuple[release.Upload | Contribution, Tensor]:
    """What one client lets out, and its clipped update before the door's noise [d]; the same code as in training."""
    context, progress = scene.federation.context, scene.progress
    if silent:
        quiet = cast("Randomness", Silent(context.randomness))
        context = replace(context, randomness=quiet, door=replace(context.door, randomness=quiet))
    watched = Watched(context.door)
    held: Context = replace(context, clients=_holding(victim, len(context.clients)), door=watched)  # type: ignore[arg-type]
    state = progress.common or context.policy.start() if plan is not None else progress.policies.get(victim.client)
    task = Task(
        victim.client,
        scene.released,
        1.0,
        plan,
        state or context.policy.start(),
        progress.privates.get(victim.client, {}),
        progress.buffers,
    )
    outcome = client_round(held, task)
    if outcome.release is None:
        raise FedveilError(f"nothing was let out, so there is nothing to attack: {outcome.error}")
    return outcome.release, watched.clean[-1]


def _holding(victim: Victim, clients: int) -> Clients:
    """All clients, of whom only the victim holds anything."""
    offsets = np.where(np.arange(clients + 1) > victim.client, len(victim.y), 0).astype(np.int64)
    return Clients(victim.x, victim.y, offsets)


# --- what the attacker is told ------------------------------------------------------------------------------------------


def _read(scene: Scene, sent: release.Upload, clean: Tensor, behind: tuple[Victim, ...], knows: Sequence[str]) -> Interception:
    n = sum(len(v.y) for v in behind)
    local = local_spec(scene.federation.setting.local, len(behind[0].y), scene.progress.round)
    upload = intercepted(sent, scene.layout, n, local, float(clean.norm()))
    if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in scene.federation.context.model.module.modules()):
        upload = replace(upload, bn_mode="train")
    known = Knowledge(
        n=n,
        local=local,
        labels=torch.cat([v.y for v in behind]) if "labels" in knows else None,
        noise_std=_noise(scene, sent, upload, knows),
        mask=upload.sent_mask if "mask" in knows else None,
        clip=clip_of(sent.plan, scene.layout) if "clip" in knows and len(behind) == 1 else None,
        aux_inputs=scene.federation.test[0][:AUXILIARY] if "aux" in knows else None,
    )
    return Interception(upload, known, behind)


def _noise(scene: Scene, sent: release.Upload, upload: Upload, knows: Sequence[str]) -> Noise | None:
    """By coordinate where the mask is known, else by layer: it would give the mask away."""
    if "noise" not in knows:
        return None
    return upload.noise_std if "mask" in knows else dict(zip(scene.layout.names, sent.noise_std.tolist(), strict=True))


def local_spec(spec: Training, examples: int, round: int) -> LocalSpec:
    """The training of a client with so many examples, as an attacker simulates it."""
    steps, o = spec.steps_for(examples), spec.optimizer
    rates = tuple(spec.learning_rate(round, k, steps) for k in range(steps))
    return LocalSpec(
        steps=steps,
        lr=sum(rates) / steps,
        batch=spec.batch_size if examples > spec.batch_size else None,
        optimizer=o.name,
        momentum=o.momentum if o.name == "sgd" else 0.0,
        weight_decay=o.weight_decay if o.name == "sgd" else 0.0,
        batch_clip=spec.batch_clip,
        rates=rates if len(set(rates)) > 1 else None,
    )


def caveats(scene: Scene, batch: int) -> list[str]:
    """What the attacker does not simulate, so that the attack may be weaker than it could be."""
    context, found = scene.federation.context, []
    own, steps = context.objective, scene.federation.setting.local.steps_for(batch)
    if not isinstance(own, Plain):
        found.append(f"the attacker assumes plain local steps; the method's own ({type(own).__name__}) are not simulated")
        if scene.summed:
            found.append("r counts the noise of the door alone, none that the method adds inside local training")
    elif own.penalty is not None and steps > 1:
        found.append("the attacker does not simulate the penalty of local training, which acts from the second step on")
    if scene.federation.setting.example_clip is not None:
        found.append("the attacker does not simulate DP-SGD's clipping and sampling")
    if scene.federation.setting.local.optimizer.name == "adam" and scene.federation.setting.local.optimizer.weight_decay:
        found.append("the attacker does not simulate Adam's weight decay")
    if steps > 1 and batch > scene.federation.setting.local.batch_size:
        found.append("the attacker assumes batches in the order of the examples; the client shuffles them")
    return found
