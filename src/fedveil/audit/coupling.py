"""Does a mask tell more than the uploads before it? Two worlds whose released values are forced to agree.

The client's whole data are swapped, and the noise of world 1 is chosen such that it releases in every round what world 0
released. A support that is a function of earlier releases is then the same in both worlds, and so is post-processing of them;
one that reads raw values is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.types import Unit
from fedveil.audit.training_audit import Trainer
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Raw, Released
from fedveil.training.local import State


@dataclass(frozen=True)
class Support:
    """One round of two coupled worlds.

    sent: coordinates that world 0 sent. differs: coordinates that only one of the worlds sent. gap: largest difference of what
    both released, relative to the largest value: rounding, where the coupling worked.
    """

    sent: int
    differs: int
    gap: float


def supports_given_releases(trainer: Trainer, rng: np.random.Generator) -> list[Support]:
    """The supports of every round in two worlds that released the same values until then.

    Args:
        trainer: rounds of a client at client level, whose method draws its noise once a round. rng: source of the noise.

    Raises:
        ConfigError: the method draws noise more than once a round, or protects records.
    """
    if trainer.case.setting.scope.unit is not Unit.CLIENT:
        raise ConfigError("worlds are coupled at client level, where the whole data are swapped: set privacy.unit = 'client'")
    d = len(trainer.case.model)
    private: list[State] = [{}, {}]
    found = []
    for t in range(trainer.rounds):
        drawn = torch.from_numpy(rng.standard_normal(d)).float()
        first, after = _round(trainer, 0, t, private[0], drawn)
        still, _ = _round(trainer, 1, t, private[1], torch.zeros(d))
        one, _ = _round(trainer, 1, t, private[1], torch.ones(d))
        std = one - still
        needed = torch.where(std > 0, (first - still) / std.where(std > 0, torch.ones(())), torch.zeros(()))
        second, again = _round(trainer, 1, t, private[1], needed)
        sent = [_support(trainer, vector, t) for vector in (first, second)]
        both = sent[0] & sent[1]
        gap = float(((first - second).abs() * both).max() / first.abs().max())
        found.append(Support(int(sent[0].sum()), int((sent[0] ^ sent[1]).sum()), gap))
        private = [after, again]
    return found


def _round(trainer: Trainer, world: int, round: int, private: State, noise: Tensor) -> tuple[Tensor, State]:
    once = _once(noise)
    return trainer.train(trainer.neighbours.own[world], trainer.neighbours.common, round, private, once)


def _once(noise: Tensor) -> Callable[[int], Tensor]:
    left = [noise]

    def draw(n: int) -> Tensor:
        if not left or n != len(noise):
            raise ConfigError("coupled worlds need a method that draws noise for the whole update, once a round")
        return left.pop()

    return draw


def _support(trainer: Trainer, update: Tensor, round: int) -> Tensor:
    policy = trainer.case.policy
    plan = policy.plan(Released(round, trainer.case.model, None, 0.5), policy.start())
    made = plan.make(update) if isinstance(plan, Raw) else plan
    assert isinstance(made, Plan)
    return torch.ones(len(update), dtype=torch.bool) if made.support is None else made.support
