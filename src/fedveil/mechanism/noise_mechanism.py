"""Mechanisms: noise that executes and prices itself, so that a price cannot be written twice.

A mechanism turns the exact integers of a release into what leaves, and says what that costs. `Independent` draws fresh noise for
each release; correlated noise over the rounds is in `fedveil.mechanism.banded`. A plan with any other mechanism is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from fedveil.accounting.types import Event, Gaussian, SampledGaussian

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.mechanism.noise_memory import NoiseMemory

    Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Participation:
    """Who may take part how often: a client is in at most `times` rounds, two of them at least `separation` apart.

    The sampler enforces it.
    """

    times: int
    separation: int


class NoiseMechanism(Protocol):
    """How noise is added to the integers of a release, and what that costs."""

    @property
    def bits(self) -> int:
        """Grid steps of what leaves in one noise std, as a power of two."""
        ...

    @property
    def shift(self) -> int:
        """The data's grid is coarser than that of what leaves by this power of two."""
        ...

    @property
    def stateful(self) -> bool:
        """Whether it has a secret state, so that a round which is done again must hand over the same bits."""
        ...

    @property
    def participation(self) -> Participation | None:
        """Who may take part how often, where the price rests on it; the sampler enforces it."""
        ...

    def price(self, mu: float, rate: float | None, round: int) -> Event:
        """What the release of that round costs.

        Args:
            mu: sensitivity / noise std of one release on its own. rate: secret Poisson sampling of clients, or None.
        """
        ...

    def execute(self, data: Integers, noise: Callable[[], Integers], round: int, memory: NoiseMemory | None) -> Integers:
        """What leaves [D], on the grid of what leaves.

        Args:
            data: exact integers [D] on the data's grid. noise: draws fresh rounded Gaussian noise [D].
            memory: the mechanism's secret state, where it has any.
        """
        ...

    def decode(self, released: Integers, round: int, memory: NoiseMemory | None) -> NDArray[np.float64] | Integers:
        """The estimate of the data [D] in units of the grid of what leaves: post-processing."""
        ...


@dataclass(frozen=True)
class Independent:
    """Fresh Gaussian noise on each release.

    Args:
        bits: grid steps in one noise std, as a power of two; fewer bits make shorter integers and lose more of the norm.
    """

    bits: int = 24
    shift: ClassVar[int] = 0
    stateful: ClassVar[bool] = False
    participation: ClassVar[None] = None

    def price(self, mu: float, rate: float | None, round: int) -> Event:
        """Gaussian, amplified where Poisson sampling is secret."""
        return Gaussian(mu) if rate is None or mu == 0 else SampledGaussian(rate, 1 / mu)

    def execute(self, data: Integers, noise: Callable[[], Integers], round: int, memory: NoiseMemory | None) -> Integers:
        """Data + noise."""
        noisy = noise()
        noisy += data
        return noisy

    def decode(self, released: Integers, round: int, memory: NoiseMemory | None) -> Integers:
        """As it is."""
        return released
