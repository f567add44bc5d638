"""Interception: what the run's own door releases of the attacked examples, as an attacker reads it.

The attacked client runs `client_round` as in training: the method's policy, local objective and door, with its clip, noise and
mask, from the states that the run has saved. It differs in its data alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.accounting.types import View
from fedveil.adversary.attacked_client import Victim, client_release, holders_of_test_images, owners, victims
from fedveil.adversary.attacker_knowledge import Interception, interception_of
from fedveil.errors import ConfigError
from fedveil.federation.fit import sample
from fedveil.mechanism import plan as release
from fedveil.mechanism.cost import per_layer
from fedveil.mechanism.grid import from_grid
from fedveil.methods.method import weighting_of
from fedveil.release.sealed import Contribution
from fedveil.training.local import Plain

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.adversary.attack_options import AttackOptions
    from fedveil.adversary.snapshot import Snapshot


def single_uploads(kind: str, snapshot: Snapshot, options: AttackOptions) -> None:
    """Refuse to attack single uploads where none is visible."""
    if snapshot.summed and "others" not in options.knows:
        view = snapshot.federation.setting.scope.view
        leaves = "a sum" if view == "aggregate" else "the last model"
        raise ConfigError(
            f"attack {kind} reads single uploads, but in the {view} view only {leaves} leaves: "
            "no single upload is visible. Set privacy.view = 'server' to attack what the server receives, --knows others "
            "for an adversary who knows every other contribution to the sum, or compare with --defence none"
        )


def interceptions(snapshot: Snapshot, options: AttackOptions, count: int, batch: int) -> Iterator[Interception]:
    """Releases of the snapshot's round, until `count` clients were attacked.

    Server view: one release a client. Aggregate view: one a round, of all its participants together; or, when the attacker knows
    what the others contributed, one a client again, with all the noise of the sum.

    Args:
        count: clients. batch: examples of each; where `options.examples` fixes them, `count` is the most that are attacked.

    Raises:
        ConfigError: nothing of a round is visible in the final view.
    """
    rng, knows = np.random.default_rng(options.seed), options.knows
    view, alone = snapshot.federation.setting.scope.view, not snapshot.summed or "others" in knows
    if snapshot.summed and view is View.FINAL:
        raise ConfigError(
            "privacy.view = 'final' lets out the last model only, so no round can be intercepted: attack the model "
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
    """How many releases `interceptions` gives for `count` attacked clients."""
    each = snapshot.federation.setting.cohort if snapshot.summed and "others" not in knows else 1
    return -(-count // max(1, each))


def _chosen(snapshot: Snapshot, options: AttackOptions, count: int, batch: int, rng: np.random.Generator) -> list[Victim]:
    if options.examples == "all":
        return owners(snapshot)[:count]
    return holders_of_test_images(snapshot, count) if options.examples == "test" else victims(snapshot, count, batch, rng)


# --- one release --------------------------------------------------------------------------------------------------------


def _single(snapshot: Snapshot, victim: Victim, knows: Sequence[str]) -> Interception:
    sent, clean = client_release(snapshot, victim, None)
    assert isinstance(sent, release.Upload)
    return interception_of(snapshot, *_with_training_noise(snapshot, victim, sent, clean), (victim,), knows)


def _with_training_noise(
    snapshot: Snapshot, victim: Victim, sent: release.Upload, clean: Tensor
) -> tuple[release.Upload, Tensor]:
    """The upload with the noise that the method adds inside local training counted too, and the update without any noise.

    Who knows the method knows the size of that noise; here it is the root mean square of what silence changes in a layer. Under
    noise an exact zero was not sent, which everyone sees.
    """
    s = snapshot.federation
    if type(s.context.objective) is Plain and s.setting.example_clip is None:
        return sent, clean
    _, quiet = client_release(snapshot, victim, None, noise=False)
    received = sent.vector != 0
    counts = torch.stack([part.sum() for part in snapshot.layout.split(received)]).clamp_min(1)
    inside = snapshot.layout.norms(clean - quiet) / counts.sqrt()
    noisy = replace(sent, noise_std=(sent.noise_std.square() + inside.square()).sqrt())
    visible = sent.support is None and bool(inside.any()) and not bool(received.all())
    return (replace(noisy, support=received) if visible else noisy), quiet


def _together(snapshot: Snapshot, members: Sequence[Victim], knows: Sequence[str]) -> Interception:
    """The round's sum as the mean of its participants' updates, which nobody can tell apart."""
    plan = _common(snapshot)
    releases = [client_release(snapshot, victim, plan) for victim in members]
    sealed = [s for s, _ in releases if isinstance(s, Contribution)]
    sent = _sum(snapshot, sealed, plan)
    total = sum(c.weight for c in sealed)
    factor = _denominator(snapshot, sealed) / total
    mean = replace(sent, vector=sent.vector * factor, noise_std=sent.noise_std * factor)
    clean = torch.stack([clean for _, clean in releases]).sum(0) / total
    return interception_of(snapshot, mean, clean, tuple(members), knows)


def _within_known(snapshot: Snapshot, victim: Victim, others: Sequence[Contribution], knows: Sequence[str]) -> Interception:
    """The round's sum less what the attacker knows: one contribution, and the noise that is left."""
    plan = _common(snapshot)
    own, clean = client_release(snapshot, victim, plan)
    assert isinstance(own, Contribution)
    rest = [c for c in others if c.client != victim.client]
    sent = _sum(snapshot, [*rest, own], plan)
    left = (sent.vector * _denominator(snapshot, [*rest, own]) - _known(snapshot, rest, sent)) / own.weight
    std = left.new_tensor(per_layer(sent.plan.noise_std, snapshot.layout)) / own.weight
    return interception_of(snapshot, replace(sent, vector=left, noise_std=std), clean, (victim,), knows)


def _others(snapshot: Snapshot) -> list[Contribution]:
    """What the participants of this round contribute, with all their own data."""
    plan = _common(snapshot)
    context = snapshot.federation.context
    found = []
    for c in sample(snapshot.federation, snapshot.progress):
        sealed, _ = client_release(snapshot, Victim(c, *context.clients.examples(c)), plan)
        assert isinstance(sealed, Contribution)
        found.append(sealed)
    return found


def _sum(snapshot: Snapshot, sealed: Sequence[Contribution], plan: release.Plan | release.Raw) -> release.Upload:
    door = snapshot.federation.context.door
    if door.memory is not None:  # each attempt is a release of this round of its own
        door = replace(door, memory=door.memory.copied())
    return door.release_sum(sealed, plan, snapshot.progress.round, _denominator(snapshot, sealed))


def _known(snapshot: Snapshot, rest: Sequence[Contribution], sent: release.Upload) -> Tensor:
    """The sum [d] of these contributions."""
    if not rest:
        return torch.zeros_like(sent.vector)
    total = torch.stack([contribution.sealed for contribution in rest]).sum(0)
    if sent.integers is None:
        return total
    parts, shift = snapshot.federation.context.door.parts, sent.plan.mechanism.shift
    return parts.parted(from_grid(total.numpy(), [(part, k + shift) for part, k in parts.grid(sent.plan)]))[0]


def _denominator(snapshot: Snapshot, sealed: Sequence[Contribution]) -> float:
    uniform = weighting_of(snapshot.federation.method) == "uniform"
    return float(snapshot.federation.setting.cohort) if uniform else sum(c.weight for c in sealed)


def _common(snapshot: Snapshot) -> release.Plan | release.Raw:
    context = snapshot.federation.context
    return context.plan(snapshot.released, snapshot.progress.common or context.policy.start())
