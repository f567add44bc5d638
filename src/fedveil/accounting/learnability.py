"""Whether noise leaves anything to learn from: the noise gathered over all rounds against the signal that they can gather.

With noise multiplier z, clip C, d coordinates and n uploads the noise on the mean has norm about z C sqrt(d) / n when it is added
once to the sum, and z C sqrt(d / n) when each upload carries its own; the mean of clipped updates has norm at most C. Over T
rounds independent noise grows with sqrt(T), and aligned updates with T: R = (noise norm / C) / sqrt(T) compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fedveil.accounting._numbers import at_least, non_negative, positive
from fedveil.accounting.types import Scope, View

Verdict = Literal["yes", "perhaps", "no"]
TARGET_RATIO = 1.0
"""The ratio that advice aims at: noise no longer than the longest possible mean update."""
HALF, POWER = 4.2, 1.2
"""Fitted: R at which half of the accuracy above chance is kept, and how fast it falls there."""
LEARNS, HARDLY = 0.9, 0.6
"""Expected shares from which on the answer is yes, and below which it is no."""


@dataclass(frozen=True)
class Level:
    """Noise in one view, at the same epsilon in each view.

    Args:
        noise_multiplier: z that this epsilon needs in this view, or None where no noise is enough.
        noise_norm: expected norm of the noise on the mean of a round, in the units of the clip norm. ratio: noise_norm / clip.
        note: why there are no figures; empty when there are.
    """

    view: View
    noise_multiplier: float | None = None
    noise_norm: float | None = None
    ratio: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Advice:
    """One change that brings the ratio to the target at the same epsilon.

    Args:
        change: what to change. now: its present value. to: the value needed, or None when this change alone cannot do it.
        clients: population N that the change needs. text: the same in words.
    """

    change: Literal["clients a round", "rounds", "dimension"]
    now: int
    to: int | None
    clients: int
    text: str


@dataclass(frozen=True)
class Learnability:
    """Noise against signal, before anything is trained.

    Args:
        epsilon, delta, scope: the promise that is held fixed. clip: largest norm of the signal. what: the signal in words.
        levels: one per view. verdict: for the run's own view, see `verdict_of`. advice: empty where the target is met.
        steps: rounds, or local steps of all rounds under DP-SGD, over which noise averages out; 0 in statements that do not say.
    """

    epsilon: float
    delta: float
    scope: Scope
    clip: float
    what: str
    levels: tuple[Level, ...]
    verdict: Verdict
    target_ratio: float = TARGET_RATIO
    advice: tuple[Advice, ...] = ()
    steps: int = 0

    def level(self, view: View) -> Level:
        """The level of one view."""
        return next(level for level in self.levels if level.view is view)


def noise_norm(noise_std: float, dimension: int, uploads: int, *, on_sum: bool) -> float:
    """Expected norm (to 1 / 4d) of the noise on the mean of a round.

    Args:
        noise_std: std of the noise on the sum (`on_sum`) or on each upload, >= 0.
        dimension: d >= 1. uploads: n >= 1.
    """
    std, n = non_negative("noise_std", noise_std), at_least("uploads", uploads, 1)
    root = math.sqrt(at_least("dimension", dimension, 1))
    return std * root / n if on_sum else std * root / math.sqrt(n)


def multiplier_for(ratio: float, dimension: int, uploads: int, *, on_sum: bool) -> float:
    """The noise multiplier at which noise norm / clip equals `ratio`; inverse of `noise_norm` at clip 1."""
    return positive("ratio", ratio) / noise_norm(1.0, dimension, uploads, on_sum=on_sum)


def dimension_for(ratio: float, noise_multiplier: float, uploads: int, *, on_sum: bool) -> int:
    """The most coordinates at which noise norm / clip stays at or below `ratio` (0 when one is already too many)."""
    one = noise_norm(positive("noise_multiplier", noise_multiplier), 1, uploads, on_sum=on_sum)
    return math.floor((positive("ratio", ratio) / one) ** 2)


def gathered_ratio(ratio: float, steps: int) -> float:
    """R: the noise gathered over `steps` rounds (local steps under DP-SGD) against as many steps of norm C in one direction.

    Args:
        ratio: noise norm / clip of one of them, >= 0. steps: >= 1.
    """
    return non_negative("ratio", ratio) / math.sqrt(at_least("steps", steps, 1))


def expected_share(gathered: float) -> float:
    """The share of the accuracy above chance that runs kept of what they reached without noise, 1 / (1 + (R / half)^power).

    Fitted to measured runs (docs/utility.md, benchmarks/learnability.py): a rule of thumb for client level, no bound.
    """
    return 1 / (1 + math.pow(non_negative("gathered", gathered) / HALF, POWER))


def verdict_of(ratio: float, steps: int) -> Verdict:
    """By `expected_share`: yes from 0.9 on, no below 0.6."""
    share = expected_share(gathered_ratio(ratio, steps))
    return "yes" if share >= LEARNS else "perhaps" if share >= HARDLY else "no"
