"""What a run costs that was chosen among others of equal price: by private selection, or after a look at all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedveil.accounting import accountant
from fedveil.accounting.random_tries import RandomTries, tries_of_mean
from fedveil.accounting.selection import selection_bound
from fedveil.accounting.types import Adjacency, Event, Gaussian, Unbounded
from fedveil.errors import ConfigError


@dataclass(frozen=True)
class Selection:
    """How a run was chosen among others of equal price.

    Args:
        runs: the expected number of them, or, without a shape, the number that was looked at.
        shape: eta > -1 of the truncated negative binomial law of a secret number of runs, of which only the best is released;
            0 is the logarithmic law. None: all runs were looked at.
        score_noise: noise multiplier of the private score that each run releases; None where public data score it.
    """

    runs: float
    shape: float | None = None
    score_noise: float | None = None

    def __post_init__(self) -> None:
        if self.shape is not None:
            tries_of_mean(self.shape, self.runs)
        elif self.runs < 1 or self.runs != int(self.runs):
            raise ConfigError(f"{self.runs:g} runs cannot be looked at: give a whole number of at least 1")
        if self.score_noise is not None and not 0 < self.score_noise < math.inf:
            raise ConfigError(f"the noise multiplier of a score must be finite and > 0, got {self.score_noise}")

    @property
    def law(self) -> RandomTries | None:
        """Of the secret number of runs."""
        return None if self.shape is None else tries_of_mean(self.shape, self.runs)

    def releases(self, events: Sequence[Event], adjacency: Adjacency) -> list[Event]:
        """Everything that one run releases: its events, and the noisy score."""
        if self.score_noise is None or any(isinstance(event, Unbounded) for event in events):
            return list(events)
        return [*events, Gaussian(adjacency.factor / self.score_noise)]

    def bound(self, events: Sequence[Event], delta: float, adjacency: Adjacency) -> tuple[float, str]:
        """Epsilon at `delta` of the whole search, and its accountant.

        Args:
            events: all that one run releases.
        """
        if any(isinstance(event, Unbounded) for event in events):
            return math.inf, "none"
        if (law := self.law) is not None:
            return selection_bound(law, events, delta, adjacency)
        return accountant.bound(self.every(events), delta, adjacency=adjacency)

    def every(self, events: Sequence[Event]) -> list[Event]:
        """The releases of all runs that were looked at, from those of one."""
        times = int(self.runs)
        return [event if isinstance(event, Unbounded) else replace(event, count=event.count * times) for event in events]
