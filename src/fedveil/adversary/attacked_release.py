"""Interception: what the run's own door lets out of the attacked examples, as an attacker reads it.

The attacked client runs `client_round` as in training: the method's policy, local objective and door, with its clip, noise and
mask. It differs in its data alone: it holds as many examples as the attack says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.accounting.types import View
from fedveil.adversary.attacked_client import Victim, let_out, victims
from fedveil.adversary.attacker_knowledge import Interception, told
from fedveil.errors import ConfigError
from fedveil.federation.fit import sample
from fedveil.release import plan as release
from fedveil.release.cost import per_layer
from fedveil.release.door import Contribution
from fedveil.training.local import Plain

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.adversary.snapshot import Scene


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
    sent, clean = let_out(scene, victim, None)
    assert isinstance(sent, release.Upload)
    return told(scene, *_with_training_noise(scene, victim, sent, clean), (victim,), knows)


def _with_training_noise(scene: Scene, victim: Victim, sent: release.Upload, clean: Tensor) -> tuple[release.Upload, Tensor]:
    """The upload with the noise that the method adds inside local training counted too, and the update without any noise.

    Who knows the method knows the size of that noise; here it is the root mean square of what silence changes in a layer. Under
    noise an exact zero was not sent, which everyone sees.
    """
    s = scene.federation
    if isinstance(s.context.objective, Plain) and s.setting.example_clip is None:
        return sent, clean
    _, quiet = let_out(scene, victim, None, silent=True)
    received = sent.vector != 0
    counts = torch.stack([part.sum() for part in scene.layout.split(received)]).clamp_min(1)
    inside = scene.layout.norms(clean - quiet) / counts.sqrt()
    noisy = replace(sent, noise_std=(sent.noise_std.square() + inside.square()).sqrt())
    visible = sent.support is None and bool(inside.any()) and not bool(received.all())
    return (replace(noisy, support=received) if visible else noisy), quiet


def _together(scene: Scene, members: Sequence[Victim], knows: Sequence[str]) -> Interception:
    """The round's sum as the mean of its participants' updates, which nobody can tell apart."""
    plan = _common(scene)
    given = [let_out(scene, victim, plan) for victim in members]
    sealed = [s for s, _ in given if isinstance(s, Contribution)]
    sent = _sum(scene, sealed, plan)
    total = sum(c.weight for c in sealed)
    factor = _denominator(scene, sealed) / total
    mean = replace(sent, vector=sent.vector * factor, noise_std=sent.noise_std * factor)
    return told(scene, mean, torch.stack([clean for _, clean in given]).sum(0) / total, tuple(members), knows)


def _within_known(scene: Scene, victim: Victim, others: Sequence[Contribution], knows: Sequence[str]) -> Interception:
    """The round's sum less what the attacker knows: one contribution, and the noise that is left."""
    plan = _common(scene)
    own, clean = let_out(scene, victim, plan)
    assert isinstance(own, Contribution)
    rest = [c for c in others if c.client != victim.client]
    sent = _sum(scene, [*rest, own], plan)
    known = torch.zeros_like(sent.vector)
    for contribution in rest:
        known += contribution.sealed
    left = (sent.vector * _denominator(scene, [*rest, own]) - known) / own.weight
    std = left.new_tensor(per_layer(sent.plan.noise_std, scene.layout)) / own.weight
    return told(scene, replace(sent, vector=left, noise_std=std), clean, (victim,), knows)


def _others(scene: Scene) -> list[Contribution]:
    """What the participants of this round contribute, with all their own data."""
    plan = _common(scene)
    context = scene.federation.context
    found = []
    for c in sample(scene.federation, scene.progress):
        sealed, _ = let_out(scene, Victim(c, *context.clients.examples(c)), plan)
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
