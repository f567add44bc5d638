"""The interception of a release: the attacked client, the attacker's knowledge, and the upload or sum.

The attacked client runs `client_round` as in training: the method's policy, local objective and door, with its clip, noise and
mask, from the saved states of the run. Only its data differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.accounting.types import View
from fedveil.attacks.attack_types import CapturedUpload, Clip, Knowledge, KnownTraining, Noise
from fedveil.attacks.matching import BATCH_NORMS, split
from fedveil.errors import ConfigError, FedveilError
from fedveil.federation.clients import Clients
from fedveil.federation.fit import sample
from fedveil.federation.round import ClientTask, Context, client_round
from fedveil.mechanism import plan as release
from fedveil.mechanism.cost import per_layer
from fedveil.mechanism.grid import from_grid
from fedveil.mechanism.plan import Plan, Raw, Upload
from fedveil.methods.method import weighting_of
from fedveil.release.door import CompiledPlan, Door
from fedveil.release.noise import Randomness
from fedveil.release.sealed import Contribution, SealedUpload, clipped
from fedveil.training.local import Plain
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.attacks.attack_options import AttackOptions
    from fedveil.attacks.snapshot import Snapshot
    from fedveil.training.local import LocalSpec as Training


def intercepted(
    upload: release.Upload, layout: Layout, n_examples: int, local: KnownTraining, signal_norm: float | None = None
) -> CapturedUpload:
    """Convert an upload of the door (a flat change of weights) to the form that attacks read.

    The standard deviations and the support are those that the door declares; pass them in `Knowledge` for an adaptive attack.
    Coordinates that were not sent have no noise.
    signal_norm: L2 norm of the clipped update, for the record.
    """
    like = {k: torch.empty(shape) for k, shape in zip(layout.names, layout.shapes, strict=True)}
    tensors = split(upload.vector, like)
    support = None if upload.support is None else split(upload.support, like)
    stds = dict(zip(layout.names, upload.noise_std.tolist(), strict=True))
    return CapturedUpload(
        tensors=tensors,
        kind="delta",
        n_examples=n_examples,
        local=local,
        noise_std=stds if support is None else {k: std * support[k].float() for k, std in stds.items()},
        sent_mask=support,
        signal_norm=signal_norm,
    )


def clip_of(plan: release.Plan, layout: Layout) -> Clip:
    """Return the clipping bounds of a plan by parameter name."""
    if plan.layer_clip is None:
        return Clip(plan.clip)
    return Clip(plan.clip, dict(zip(layout.names, plan.layer_clip.tolist(), strict=True)))


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
    """Draw `count` attacked clients with `batch` of their training examples each; no example is drawn twice.

    Raises:
        ConfigError: the clients hold fewer examples.
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
    drawn = []
    for c, b in chosen:
        x, y = clients.examples(c)
        drawn.append(Victim(c, x[b * batch : (b + 1) * batch], y[b * batch : (b + 1) * batch]))
    return drawn


def owners(snapshot: Snapshot) -> list[Victim]:
    """Return every client that holds examples, with all its examples."""
    clients = snapshot.federation.context.clients
    return [Victim(c, *clients.examples(c)) for c in range(len(clients)) if clients.size(c)]


def holders_of_test_images(snapshot: Snapshot, count: int) -> list[Victim]:
    """Return clients in turn, each with one of the first test images, in as many copies as a client has examples.

    Raises:
        ConfigError: the test set has fewer images.
    """
    (x, y), s = snapshot.federation.test, snapshot.federation.setting
    if count > len(y):
        raise ConfigError(f"{count} test images are to be attacked, and {snapshot.info.name} has {len(y)}: lower --images")
    return [Victim(i % s.clients, x[i : i + 1], y[i : i + 1], s.records) for i in range(count)]


@dataclass(frozen=True)
class _RecordingDoor(Door):
    """The run's door, which also records each clipped update before noise; attacks never read this list."""

    clean: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, door: Door) -> _RecordingDoor:
        return cls(**{f.name: getattr(door, f.name) for f in fields(Door)})

    def seal_upload(
        self, update: Tensor | None, plan: Plan | Raw | CompiledPlan, client: int, round: int, **more: Any
    ) -> SealedUpload:
        plan = plan.source if isinstance(plan, CompiledPlan) else plan
        sealed = super().seal_upload(update, plan, client, round, **more)
        self._note(update, sealed.upload.plan)
        return sealed

    def seal(self, update: Tensor | None, plan: Plan | Raw | CompiledPlan, client: int, round: int, **more: Any) -> Contribution:
        plan = plan.source if isinstance(plan, CompiledPlan) else plan
        sealed = super().seal(update, plan, client, round, **more)
        self._note(update, sealed.plan if isinstance(plan, Raw) else plan)
        return sealed

    def _note(self, update: Tensor | None, plan: Plan | None) -> None:
        assert plan is not None
        self.clean.append(clipped(torch.zeros(self.layout.dimension) if update is None else update, plan, self.layout))


class _WithoutNoise(Randomness):
    """The run's randomness with all noise replaced by zeros."""

    def integers(self, std: float | NDArray[np.float64], n: int, *name: object, threads: int | None = None) -> NDArray[np.int64]:
        """Return zeros [n]."""
        return np.zeros(n, dtype=np.int64)


def _client_release(
    snapshot: Snapshot, victim: Victim, plan: Plan | Raw | None, *, noise: bool = True
) -> tuple[Upload | Contribution, Tensor]:
    """Run one client with the code of training; return its release, and its clipped update before the door's noise [d]."""
    context, progress = snapshot.federation.context, snapshot.progress
    if not noise:
        noiseless = _WithoutNoise(**vars(context.randomness))
        context = replace(context, randomness=noiseless, door=replace(context.door, randomness=noiseless))
    recording = _RecordingDoor.of(context.door)
    attacked_context: Context = replace(context, clients=holding(victim, len(context.clients)), door=recording)
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
    outcome = client_round(attacked_context, task)
    if outcome.release is None:
        raise FedveilError(f"nothing was released, so there is nothing to attack: {outcome.error}")
    sealed = outcome.release
    return recording.release_uploads([sealed])[0] if isinstance(sealed, SealedUpload) else sealed, recording.clean[-1]


def holding(victim: Victim, clients: int) -> Clients:
    """Return clients of whom only the victim holds examples."""
    x, y = (part.repeat_interleave(victim.copies, 0) for part in (victim.x, victim.y))
    offsets = np.where(np.arange(clients + 1) > victim.client, len(y), 0).astype(np.int64)
    return Clients(x, y, offsets)


_AUXILIARY = 500
"""Number of public examples for an attacker who knows `aux`."""


@dataclass(frozen=True)
class Interception:
    """One release, with what the attacker knows.

    Args:
        upload: the release. known: additional knowledge of the attacker. victims: clients whose examples are in it.
    """

    upload: CapturedUpload
    known: Knowledge
    victims: tuple[Victim, ...]

    @property
    def x(self) -> Tensor:
        """Return all attacked examples, in the model's units."""
        return torch.cat([v.x for v in self.victims])

    @property
    def y(self) -> Tensor:
        """Return the labels of all attacked examples."""
        return torch.cat([v.y for v in self.victims])


def interception_of(
    snapshot: Snapshot, sent: release.Upload, clean: Tensor, members: tuple[Victim, ...], knows: Sequence[str]
) -> Interception:
    """Return a release with the attacker's knowledge; `clean` is the update without noise, `members` are the clients in it."""
    n, weights = sum(len(v.y) for v in members), getattr(snapshot.federation.method, "sends_weights", False)
    if weights:  # the model from which training started is public
        start = snapshot.progress.model
        sent, clean = replace(sent, vector=sent.vector - start), clean - start
    local = local_spec(snapshot.federation.context.spec, len(members[0].y), snapshot.progress.round)
    upload = intercepted(sent, snapshot.layout, n, local, float(clean.norm()))
    if any(isinstance(m, BATCH_NORMS) for m in snapshot.federation.context.model.module.modules()):
        upload = replace(upload, bn_mode="train")
    known = Knowledge(
        n=n,
        local=local,
        labels=torch.cat([v.y for v in members]) if "labels" in knows else None,
        noise_std=_noise(snapshot, sent, upload, knows),
        mask=upload.sent_mask if "mask" in knows else None,
        clip=clip_of(sent.plan, snapshot.layout) if "clip" in knows and len(members) == 1 and not weights else None,
        aux_inputs=snapshot.federation.test[0][:_AUXILIARY] if "aux" in knows else None,
    )
    return Interception(upload, known, members)


def _noise(snapshot: Snapshot, sent: release.Upload, upload: CapturedUpload, knows: Sequence[str]) -> Noise | None:
    """Return the known noise: by coordinate if the attacker knows the mask, else by layer, which does not reveal the mask."""
    if "noise" not in knows:
        return None
    return upload.noise_std if "mask" in knows else dict(zip(snapshot.layout.names, sent.noise_std.tolist(), strict=True))


def local_spec(spec: Training, examples: int, round: int) -> KnownTraining:
    """Return the local training that an attacker simulates for a client with so many examples."""
    steps, o = spec.steps_for(examples), spec.optimizer
    rates = tuple(spec.learning_rate(round, k, steps) for k in range(steps))
    return KnownTraining(
        steps=steps,
        lr=sum(rates) / steps,
        batch=spec.batch_size if spec.batches_for(examples) > 1 else None,
        optimizer="sgd" if o.name == "sgd" else "adam",
        momentum=o.momentum if o.name == "sgd" else 0.0,
        weight_decay=o.weight_decay if o.name == "sgd" else 0.0,
        batch_clip=spec.batch_clip,
        rates=rates if len(set(rates)) > 1 else None,
    )


def caveats(snapshot: Snapshot, batch: int) -> list[str]:
    """Return sentences about what the attacker does not simulate, which makes the attack weaker than possible."""
    context, sentences = snapshot.federation.context, []
    objective, steps = context.objective, context.spec.steps_for(batch)
    if type(objective) is not Plain:
        sentences.append(
            f"the attacker assumes plain local steps; the method's own ({type(objective).__name__}) are not simulated"
        )
        if snapshot.summed:
            sentences.append("r counts the noise of the door alone, none that the method adds inside local training")
    elif objective.penalty is not None and steps > 1:
        sentences.append("the attacker does not simulate the penalty of local training, which acts from the second step on")
    if snapshot.federation.setting.example_clip is not None:
        sentences.append("the attacker does not simulate DP-SGD's clipping and sampling")
    if snapshot.federation.setting.local.optimizer.name == "adam" and snapshot.federation.setting.local.optimizer.weight_decay:
        sentences.append("the attacker does not simulate Adam's weight decay")
    if steps > 1 and batch > snapshot.federation.setting.local.batch_size:
        sentences.append("the attacker assumes batches in the order of the examples; the client shuffles them")
    return sentences


def single_uploads(kind: str, snapshot: Snapshot, options: AttackOptions) -> None:
    """Refuse an attack on single uploads if no single upload is visible."""
    if snapshot.summed and "others" not in options.knows:
        view = snapshot.federation.setting.scope.view
        released = "a sum" if view == "aggregate" else "the last model"
        raise ConfigError(
            f"attack {kind} reads single uploads, but in the {view} view only {released} is released: "
            "no single upload is visible. Set privacy.view = 'server' to attack what the server receives, --knows others "
            "for an adversary who knows every other contribution to the sum, or compare with --defence none"
        )


def interceptions(snapshot: Snapshot, options: AttackOptions, count: int, batch: int) -> Iterator[Interception]:
    """Yield releases of the snapshot's round until `count` clients are attacked.

    Server view: one release per client. Aggregate view: one sum per round, of all participants; or, if the attacker knows the
    contributions of the others, one release per client with the whole noise of the sum.

    Args:
        count: attacked clients, or the most of them if `options.examples` fixes the examples. batch: examples of each.

    Raises:
        ConfigError: the view is final, in which no round is visible.
    """
    rng, knows = np.random.default_rng(options.seed), options.knows
    view, alone = snapshot.federation.setting.scope.view, not snapshot.summed or "others" in knows
    if snapshot.summed and view is View.FINAL:
        raise ConfigError(
            "privacy.view = 'final' releases the last model only, so no round can be intercepted: attack the model "
            "(--kind attribute, extraction), set privacy.view to server or aggregate, or compare with --defence none"
        )
    if alone:
        others = _others(snapshot) if snapshot.summed else []
        for victim in _chosen(snapshot, options, count, batch, rng):
            yield _within_known(snapshot, victim, others, knows) if snapshot.summed else _single(snapshot, victim, knows)
        return
    done = 0
    while done < count:
        members = victims(snapshot, max(1, snapshot.federation.setting.cohort), batch, rng)
        yield _together(snapshot, members, knows)
        done += len(members)


def number(snapshot: Snapshot, count: int, knows: Sequence[str]) -> int:
    """Return the number of releases that `interceptions` yields for `count` attacked clients."""
    each = snapshot.federation.setting.cohort if snapshot.summed and "others" not in knows else 1
    return -(-count // max(1, each))


def _chosen(snapshot: Snapshot, options: AttackOptions, count: int, batch: int, rng: np.random.Generator) -> list[Victim]:
    if options.examples == "all":
        return owners(snapshot)[:count]
    return holders_of_test_images(snapshot, count) if options.examples == "test" else victims(snapshot, count, batch, rng)


# --- one release --------------------------------------------------------------------------------------------------------


def _single(snapshot: Snapshot, victim: Victim, knows: Sequence[str]) -> Interception:
    sent, clean = _client_release(snapshot, victim, None)
    assert isinstance(sent, release.Upload)
    return interception_of(snapshot, *_with_training_noise(snapshot, victim, sent, clean), (victim,), knows)


def _with_training_noise(
    snapshot: Snapshot, victim: Victim, sent: release.Upload, clean: Tensor
) -> tuple[release.Upload, Tensor]:
    """Return the upload with the noise of local training added to its noise std, and the update without any noise.

    Anyone who knows the method knows the size of that noise. Here it is, for each layer, the root mean square of the difference
    that the noise makes. A coordinate that is exactly zero under noise was not sent, which everyone sees.
    """
    s = snapshot.federation
    if type(s.context.objective) is Plain and s.setting.example_clip is None:
        return sent, clean
    _, noiseless = _client_release(snapshot, victim, None, noise=False)
    received = sent.vector != 0
    counts = torch.stack([part.sum() for part in snapshot.layout.split(received)]).clamp_min(1)
    inside = snapshot.layout.norms(clean - noiseless) / counts.sqrt()
    noisy = replace(sent, noise_std=(sent.noise_std.square() + inside.square()).sqrt())
    visible = sent.support is None and bool(inside.any()) and not bool(received.all())
    return (replace(noisy, support=received) if visible else noisy), noiseless


def _together(snapshot: Snapshot, members: Sequence[Victim], knows: Sequence[str]) -> Interception:
    """Return the round's sum as the mean of its participants' updates."""
    plan = _common(snapshot)
    releases = [_client_release(snapshot, victim, plan) for victim in members]
    sealed = [s for s, _ in releases if isinstance(s, Contribution)]
    sent = _sum(snapshot, sealed, plan)
    total = sum(c.weight for c in sealed)
    factor = _denominator(snapshot, sealed) / total
    mean = replace(sent, vector=sent.vector * factor, noise_std=sent.noise_std * factor)
    clean = torch.stack([clean for _, clean in releases]).sum(0) / total
    return interception_of(snapshot, mean, clean, tuple(members), knows)


def _within_known(snapshot: Snapshot, victim: Victim, others: Sequence[Contribution], knows: Sequence[str]) -> Interception:
    """Return the round's sum less the known contributions: one contribution with the noise of the sum."""
    plan = _common(snapshot)
    contribution, clean = _client_release(snapshot, victim, plan)
    assert isinstance(contribution, Contribution)
    rest = [c for c in others if c.client != victim.client]
    sent = _sum(snapshot, [*rest, contribution], plan)
    remainder = (
        sent.vector * _denominator(snapshot, [*rest, contribution]) - _summed_contributions(snapshot, rest, sent)
    ) / contribution.weight
    std = remainder.new_tensor(per_layer(sent.plan.noise_std, snapshot.layout)) / contribution.weight
    return interception_of(snapshot, replace(sent, vector=remainder, noise_std=std), clean, (victim,), knows)


def _others(snapshot: Snapshot) -> list[Contribution]:
    """Return the contributions of this round's participants, computed on all their data."""
    plan = _common(snapshot)
    context = snapshot.federation.context
    contributions = []
    for c in sample(snapshot.federation, snapshot.progress):
        sealed, _ = _client_release(snapshot, Victim(c, *context.clients.examples(c)), plan)
        assert isinstance(sealed, Contribution)
        contributions.append(sealed)
    return contributions


def _sum(snapshot: Snapshot, sealed: Sequence[Contribution], plan: release.Plan | release.Raw) -> release.Upload:
    door = snapshot.federation.context.door
    if door.memory is not None:  # each attempt is a separate release of this round
        door = replace(door, memory=door.memory.copied())
    return door.release_sum(sealed, plan, snapshot.progress.round, _denominator(snapshot, sealed))


def _summed_contributions(snapshot: Snapshot, rest: Sequence[Contribution], sent: release.Upload) -> Tensor:
    """Return the sum [d] of these contributions."""
    if not rest:
        return torch.zeros_like(sent.vector)
    total = torch.stack([contribution.sealed for contribution in rest]).sum(0)
    if sent.integers is None:
        return total
    parts, shift = snapshot.federation.context.door.parts, sent.plan.mechanism.shift
    vector = from_grid(total.numpy(), [(part, k + shift) for part, k in parts.grid(sent.plan)])
    return parts.parted(torch.from_numpy(vector))[0]


def _denominator(snapshot: Snapshot, sealed: Sequence[Contribution]) -> float:
    uniform = weighting_of(snapshot.federation.method) == "uniform"
    return float(snapshot.federation.setting.cohort) if uniform else sum(c.weight for c in sealed)


def _common(snapshot: Snapshot) -> release.Plan | release.Raw:
    context = snapshot.federation.context
    return context.plan(snapshot.released, snapshot.progress.common or context.policy.start())
