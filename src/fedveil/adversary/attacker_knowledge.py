"""What an attacker knows of a release, and what it does not simulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fedveil.adversary.attacked_client import Victim
from fedveil.attacks.attack_types import CapturedUpload, Knowledge, KnownTraining, Noise
from fedveil.attacks.intercept import clip_of, intercepted
from fedveil.attacks.simulate import BATCH_NORMS
from fedveil.mechanism import plan as release
from fedveil.training.local import Plain

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.adversary.snapshot import Snapshot
    from fedveil.training.local import LocalSpec as Training

AUXILIARY = 500
"""Public examples for an attacker who knows `aux`."""


@dataclass(frozen=True)
class Interception:
    """One release, read by an attacker.

    Args:
        upload: what was released. known: what the attacker knows besides. victims: whose examples are behind it.
    """

    upload: CapturedUpload
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


def interception_of(
    snapshot: Snapshot, sent: release.Upload, clean: Tensor, behind: tuple[Victim, ...], knows: Sequence[str]
) -> Interception:
    """A release with what the attacker knows; `clean` is the update without noise, `behind` whose examples are in it."""
    n, weights = sum(len(v.y) for v in behind), getattr(snapshot.federation.method, "sends_weights", False)
    if weights:  # everybody has the model that training started from
        start = snapshot.progress.model
        sent, clean = replace(sent, vector=sent.vector - start), clean - start
    local = local_spec(snapshot.federation.context.spec, len(behind[0].y), snapshot.progress.round)
    upload = intercepted(sent, snapshot.layout, n, local, float(clean.norm()))
    if any(isinstance(m, BATCH_NORMS) for m in snapshot.federation.context.model.module.modules()):
        upload = replace(upload, bn_mode="train")
    known = Knowledge(
        n=n,
        local=local,
        labels=torch.cat([v.y for v in behind]) if "labels" in knows else None,
        noise_std=_noise(snapshot, sent, upload, knows),
        mask=upload.sent_mask if "mask" in knows else None,
        clip=clip_of(sent.plan, snapshot.layout) if "clip" in knows and len(behind) == 1 and not weights else None,
        aux_inputs=snapshot.federation.test[0][:AUXILIARY] if "aux" in knows else None,
    )
    return Interception(upload, known, behind)


def _noise(snapshot: Snapshot, sent: release.Upload, upload: CapturedUpload, knows: Sequence[str]) -> Noise | None:
    """By coordinate where the mask is known, else by layer: it would give the mask away."""
    if "noise" not in knows:
        return None
    return upload.noise_std if "mask" in knows else dict(zip(snapshot.layout.names, sent.noise_std.tolist(), strict=True))


def local_spec(spec: Training, examples: int, round: int) -> KnownTraining:
    """The training of a client with so many examples, as an attacker simulates it."""
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
    """What the attacker does not simulate, so that the attack may be weaker than it could be."""
    context, found = snapshot.federation.context, []
    own, steps = context.objective, context.spec.steps_for(batch)
    if type(own) is not Plain:
        found.append(f"the attacker assumes plain local steps; the method's own ({type(own).__name__}) are not simulated")
        if snapshot.summed:
            found.append("r counts the noise of the door alone, none that the method adds inside local training")
    elif own.penalty is not None and steps > 1:
        found.append("the attacker does not simulate the penalty of local training, which acts from the second step on")
    if snapshot.federation.setting.example_clip is not None:
        found.append("the attacker does not simulate DP-SGD's clipping and sampling")
    if snapshot.federation.setting.local.optimizer.name == "adam" and snapshot.federation.setting.local.optimizer.weight_decay:
        found.append("the attacker does not simulate Adam's weight decay")
    if steps > 1 and batch > snapshot.federation.setting.local.batch_size:
        found.append("the attacker assumes batches in the order of the examples; the client shuffles them")
    return found
