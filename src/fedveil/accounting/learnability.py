"""Signal against noise: whether a run can learn, from the noise and the signal accumulated over all rounds.

With noise multiplier z, clip C, d coordinates and n uploads, the noise on the mean has norm about z C sqrt(d) / n if it is added
once to the sum, and z C sqrt(d / n) if it is added to each upload. The mean of clipped updates has norm at most C. Over T
rounds, independent noise grows with sqrt(T) and aligned updates with T: R = (noise norm / C) / sqrt(T) compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fedveil.accounting._numbers import at_least, non_negative, positive
from fedveil.accounting.types import Scope, View

Verdict = Literal["yes", "perhaps", "no"]
TARGET_RATIO = 1.0
"""Target ratio of the advice: the noise norm equals the largest norm of a mean update."""
HALF, POWER = 4.2, 1.2
"""Fitted values: R at which half of the accuracy above chance remains, and the exponent of the decline."""
LEARNS, HARDLY = 0.9, 0.6
"""Expected shares: "yes" at or above the first, "no" below the second."""


@dataclass(frozen=True)
class Level:
    """Noise level in one view; epsilon is the same in each view.

    Args:
        noise_multiplier: z that this epsilon needs in this view, or None if no noise suffices.
        noise_norm: expected norm of the noise on a round's mean, in the units of the clip norm. ratio: noise_norm / clip.
        note: the reason why the figures are missing, or an empty string.
    """

    view: View
    noise_multiplier: float | None = None
    noise_norm: float | None = None
    ratio: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Advice:
    """Single change that brings the ratio to the target at the same epsilon.

    Args:
        change: the quantity to change. now: its present value. to: the value needed, or None if this change alone is not enough.
        clients: population N that the change needs. text: the advice in words.
    """

    change: Literal["clients a round", "rounds", "dimension"]
    now: int
    to: int | None
    clients: int
    text: str


@dataclass(frozen=True)
class Learnability:
    """Forecast of noise against signal, made before training.

    Args:
        epsilon, delta, scope: the fixed guarantee. clip: largest norm of the signal. what: the signal in words.
        levels: one per view. verdict: for the run's view, see `verdict_of`. advice: empty if the target is met.
        steps: rounds, or local steps of all rounds under DP-SGD, over which noise averages out; 0 in statements without it.
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
        """Return the level of one view."""
        return next(level for level in self.levels if level.view is view)


def noise_norm(noise_std: float, dimension: int, uploads: int, *, on_sum: bool) -> float:
    """Return the expected norm (to 1 / 4d) of the noise on the mean of a round.

    Args:
        noise_std: std of the noise on the sum (`on_sum`) or on each upload, >= 0.
        dimension: d >= 1. uploads: n >= 1.
    """
    std, n = non_negative("noise_std", noise_std), at_least("uploads", uploads, 1)
    root = math.sqrt(at_least("dimension", dimension, 1))
    return std * root / n if on_sum else std * root / math.sqrt(n)


def multiplier_for(ratio: float, dimension: int, uploads: int, *, on_sum: bool) -> float:
    """Return the noise multiplier at which noise norm / clip equals `ratio`, the inverse of `noise_norm` at clip 1."""
    return positive("ratio", ratio) / noise_norm(1.0, dimension, uploads, on_sum=on_sum)


def dimension_for(ratio: float, noise_multiplier: float, uploads: int, *, on_sum: bool) -> int:
    """Return the largest number of coordinates at which noise norm / clip is at most `ratio` (0 if one is too many)."""
    one = noise_norm(positive("noise_multiplier", noise_multiplier), 1, uploads, on_sum=on_sum)
    return math.floor((positive("ratio", ratio) / one) ** 2)


def gathered_ratio(ratio: float, steps: int) -> float:
    """Return R: the noise accumulated over `steps` rounds (local steps under DP-SGD) / that many aligned steps of norm C.

    Args:
        ratio: noise norm / clip of one step, >= 0. steps: >= 1.
    """
    return non_negative("ratio", ratio) / math.sqrt(at_least("steps", steps, 1))


def expected_share(gathered: float) -> float:
    """Return the expected accuracy above chance, as a share of that without noise: 1 / (1 + (R / half)^power).

    It is fitted to measured runs (docs/utility.md, benchmarks/learnability.py): a rule of thumb for client level, not a bound.
    """
    return 1 / (1 + math.pow(non_negative("gathered", gathered) / HALF, POWER))


def verdict_of(ratio: float, steps: int) -> Verdict:
    """Return "yes" for an `expected_share` >= 0.9, "no" below 0.6, and "perhaps" in between."""
    share = expected_share(gathered_ratio(ratio, steps))
    return "yes" if share >= LEARNS else "perhaps" if share >= HARDLY else "no"
