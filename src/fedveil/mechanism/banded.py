"""Noise correlated over the rounds by a banded Toeplitz matrix C (matrix factorisation, DP-FTRL).

Round t releases Y_t = sum_{j < band} c_j X_{t-j} + Z_t with independent integers Z_t, so that the whole run is one Gaussian
release of C X. The estimate of X_t is (C^-1 Y)_t = X_t + (C^-1 Z)_t: post-processing, in floats. The coefficients are dyadic,
so that C X lies on the grid of Y, and the sensitivity is that of the rounded coefficients. Earlier sums X are the mechanism's
secret state.

Source: Choquette-Choo et al. 2023 (banded factorisation for multiple participations); docs/privacy.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedveil.accounting.matrix_factorisation import banded_sensitivity, toeplitz_sensitivity
from fedveil.accounting.types import Event, Gaussian
from fedveil.errors import ConfigError, LedgerError
from fedveil.mechanism.noise_mechanism import Participation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.mechanism.noise_memory import NoiseMemory

    Integers = NDArray[np.int64]

DYADIC_BITS = 10


@dataclass(frozen=True)
class Banded:
    """The mechanism. It is charged once, in round 0, for all rounds, whose plans must be the same (`NoiseMemory.hold_to`).

    Args:
        coefficients: c_0 = 1, c_1, ..., each a multiple of 2^-10; as many as the band is wide. A client's columns overlap in a
            band above the separation: then they must be >= 0 and never grow.
        rounds: T, after which nothing is released. participation: what the sampler enforces.
    """

    coefficients: tuple[float, ...]
    rounds: int
    participation: Participation
    bits: int = 30
    shift: int = DYADIC_BITS
    stateful: ClassVar[bool] = True

    def __post_init__(self) -> None:
        scaled = [c * 2**self.shift for c in self.coefficients]
        if not scaled or scaled[0] != 2**self.shift or not all(c.is_integer() for c in scaled):
            raise ConfigError(
                f"the coefficients of banded noise must begin with 1 and be multiples of 2^-{self.shift}, got {self.coefficients}"
            )

    @cached_property
    def sensitivity(self) -> float:
        """Of C X to one client under `participation`, for updates of norm 1."""
        times, separation = self.participation.times, self.participation.separation
        of = banded_sensitivity if len(self.coefficients) <= separation else toeplitz_sensitivity
        return of(self.coefficients, self.rounds, separation, times)

    def price(self, mu: float, rate: float | None, round: int) -> Event:
        """One Gaussian of the run's sensitivity in round 0, nothing afterwards; sampling earns nothing."""
        return Gaussian(mu * self.sensitivity if round == 0 else 0.0)

    def execute(self, data: Integers, noise: Callable[[], Integers], round: int, memory: NoiseMemory | None) -> Integers:
        """C X + Z of this round; a round that is done again hands over what left the first time, and draws nothing.

        Raises:
            LedgerError: without its state, or with the state of another round, the noise would not be what was charged.
        """
        if memory is None:
            raise ConfigError("noise correlated over the rounds needs a place for its secret state: give the door a memory")
        if not 0 <= round < self.rounds:
            raise ConfigError(f"correlated noise was charged for the rounds 0 to {self.rounds - 1}, round {round} cannot leave")
        held = memory.read()
        last = int(held["round"][0]) if held else -1
        if last == round:
            return held["released"]
        if last != round - 1:
            raise LedgerError(f"the state of correlated noise is of round {last}: round {round} cannot be released; start anew")
        band = len(self.coefficients)
        history = [data, *(held["data"] if held else [])][:band]
        weights = [int(c * 2**self.shift) for c in self.coefficients]
        released = noise()
        for weight, earlier in zip(weights, history, strict=False):
            released = released + weight * earlier
        estimates = [*held["estimates"]] if held else []
        estimate = released.astype(np.float64)
        for c, earlier in zip(self.coefficients[1:], estimates, strict=False):
            estimate -= c * earlier
        empty = np.empty((0, len(data)))
        memory.write(
            {
                "round": np.array([round]),
                "released": released,
                "data": np.stack(history[: band - 1]) if band > 1 else empty.astype(np.int64),
                "estimates": np.stack([estimate, *estimates][: max(band - 1, 1)]),
            }
        )
        return released

    def decode(self, released: Integers, round: int, memory: NoiseMemory | None) -> NDArray[np.float64]:
        """(C^-1 Y)_t, in units of the grid of Y."""
        assert memory is not None
        estimate: NDArray[np.float64] = memory.read()["estimates"][0]
        return estimate
