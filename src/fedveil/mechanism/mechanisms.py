"""Noise mechanisms and their hidden state: independent noise, and noise correlated over the rounds.

A mechanism adds noise to the exact integers of a release, and returns its price. `Independent` draws fresh noise for each
release; `Banded` correlates the noise of several rounds. A plan with any other mechanism is refused.

Round t releases Y_t = sum_{j < band} c_j X_{t-j} + Z_t with independent integers Z_t, so that the whole run is one Gaussian
release of C X. The estimate of X_t is (C^-1 Y)_t = X_t + (C^-1 Z)_t: post-processing, in floats. The coefficients are dyadic,
so that C X lies on the grid of Y, and the sensitivity is that of the rounded coefficients. Earlier sums X are the mechanism's
hidden state.

Source: Choquette-Choo et al. 2023 (banded factorisation for multiple participations); docs/privacy.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from fedveil.accounting.correlated_noise import banded_sensitivity, toeplitz_sensitivity
from fedveil.accounting.types import Event, Gaussian, SampledGaussian
from fedveil.errors import ConfigError, LedgerError
from fedveil.ledger.files import replace_whole, sync_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]
    Integers = NDArray[np.int64]


STATE_FILE = "noise-state.safetensors"
"""Name of the file in a run directory."""


class NoiseMemory:
    """Hidden state of a mechanism between rounds: named arrays, and the round that wrote them.

    The state allows the noise to be removed from a release, so the file is readable by its owner only (mode 600).

    Args:
        path: of the file, or None for a run without a directory, whose state lives in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._arrays: Arrays | None = None
        self._plan: bytes | None = None

    def read(self) -> Arrays:
        """Return the arrays written last; empty before the first write.

        Raises:
            LedgerError: the file is damaged; the run cannot continue, because its noise would not be the noise charged for.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        if self._arrays is None:
            try:
                self._arrays = load(self.path.read_bytes()) if self.path is not None and self.path.exists() else {}
            except (OSError, SafetensorError) as problem:
                raise LedgerError(f"{self.path}: the state of the noise cannot be read ({problem}); start a new run") from problem
        return self._arrays

    def hold_to(self, plan: bytes) -> None:
        """Store the digest of this plan with later writes, since a price paid once covers a single plan for all rounds.

        Raises:
            ConfigError: the stored state was written under another plan; nothing may be released.
        """
        arrays = self.read()
        if arrays and ("plan" not in arrays or arrays["plan"].tobytes() != plan):
            raise ConfigError(
                "noise correlated over the rounds was charged for the plan of its first round, and this round has another clip, "
                "noise, support, extra or mechanism: make the same plan in every round"
            )
        self._plan = plan

    def copied(self) -> NoiseMemory:
        """Return a copy of the state in memory, for inspecting a release without making one."""
        copy = NoiseMemory()
        copy._arrays = dict(self.read())
        return copy

    def write(self, arrays: Arrays) -> None:
        """Replace the stored arrays durably, so that they survive a crash.

        Raises:
            LedgerError: writing failed; nothing may be released.
        """
        from safetensors.numpy import save

        if self._plan is not None:
            arrays = {**arrays, "plan": np.frombuffer(self._plan, np.uint8)}
        if self.path is not None:
            content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
            try:
                replace_whole(self.path, content, private=True)
                sync_path(self.path.parent)
            except OSError as problem:
                raise LedgerError(
                    f"cannot write {self.path}: {problem.strerror or problem}; nothing was released: make room, then resume"
                ) from problem
        self._arrays = arrays


@dataclass(frozen=True)
class Participation:
    """Participation rule, enforced by the sampler: a client is in at most `times` rounds, at least `separation` apart."""

    times: int
    separation: int


class NoiseMechanism(Protocol):
    """Adds noise to the integers of a release, and returns the price."""

    @property
    def bits(self) -> int:
        """Return log2 of the released grid steps in one noise std."""
        ...

    @property
    def shift(self) -> int:
        """Return log2 of the data's grid step divided by the released grid step."""
        ...

    @property
    def stateful(self) -> bool:
        """Return whether the mechanism has a hidden state, so that a repeated round must release the same integers."""
        ...

    @property
    def participation(self) -> Participation | None:
        """Return the participation rule that the price depends on, or None; the sampler enforces it."""
        ...

    def price(self, mu: float, rate: float | None, round: int) -> Event:
        """Return the cost of the release of a round.

        Args:
            mu: sensitivity / noise std of a single release. rate: of secret Poisson sampling of clients, or None.
        """
        ...

    def execute(self, data: Integers, noise: Callable[[], Integers], round: int, memory: NoiseMemory | None) -> Integers:
        """Return the release [D], on the released grid.

        Args:
            data: exact integers [D] on the data's grid. noise: draws fresh rounded Gaussian noise [D].
            memory: the mechanism's hidden state, if it has any.
        """
        ...

    def decode(self, released: Integers, round: int, memory: NoiseMemory | None) -> NDArray[np.float64] | Integers:
        """Return the estimate of the data [D] in units of the released grid, by post-processing."""
        ...


@dataclass(frozen=True)
class Independent:
    """Fresh Gaussian noise on each release.

    Args:
        bits: log2 of the grid steps in one noise std; fewer bits make shorter integers and lose more of the norm.
    """

    bits: int = 24
    shift: ClassVar[int] = 0
    stateful: ClassVar[bool] = False
    participation: ClassVar[None] = None

    def price(self, mu: float, rate: float | None, round: int) -> Event:
        """Return a Gaussian event, amplified if Poisson sampling is secret."""
        return Gaussian(mu) if rate is None or mu == 0 else SampledGaussian(rate, 1 / mu)

    def execute(self, data: Integers, noise: Callable[[], Integers], round: int, memory: NoiseMemory | None) -> Integers:
        """Return data + noise."""
        noisy = noise()
        noisy += data
        return noisy

    def decode(self, released: Integers, round: int, memory: NoiseMemory | None) -> Integers:
        """Return the release unchanged."""
        return released


DYADIC_BITS = 10


@dataclass(frozen=True)
class Banded:
    """Banded noise. It is charged once, in round 0, for all rounds, whose plans must be the same (`NoiseMemory.hold_to`).

    Args:
        coefficients: c_0 = 1, c_1, ..., each a multiple of 2^-10; their number is the band. In a band above the separation a
            client's columns overlap, and the coefficients must be >= 0 and nonincreasing.
        rounds: T, the number of releases. participation: the rule that the sampler enforces.
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
        """Return the sensitivity of C X to one client under `participation`, for updates of norm 1."""
        times, separation = self.participation.times, self.participation.separation
        of = banded_sensitivity if len(self.coefficients) <= separation else toeplitz_sensitivity
        return of(self.coefficients, self.rounds, separation, times)

    def price(self, mu: float, rate: float | None, round: int) -> Event:
        """Return one Gaussian of the run's sensitivity in round 0 and no cost afterwards; sampling is not credited."""
        return Gaussian(mu * self.sensitivity if round == 0 else 0.0)

    def execute(self, data: Integers, noise: Callable[[], Integers], round: int, memory: NoiseMemory | None) -> Integers:
        """Return C X + Z of this round; a repeated round returns the first release and draws nothing.

        Raises:
            LedgerError: the state is missing or of another round, so the noise would not be the noise charged for.
        """
        if memory is None:
            raise ConfigError("noise correlated over the rounds needs a place for its secret state: give the door a memory")
        if not 0 <= round < self.rounds:
            raise ConfigError(f"correlated noise was charged for the rounds 0 to {self.rounds - 1}, round {round} cannot leave")
        arrays = memory.read()
        last = int(arrays["round"][0]) if arrays else -1
        if last == round:
            return arrays["released"]
        if last != round - 1:
            raise LedgerError(f"the noise state is of round {last}: round {round} cannot be released; start a new run")
        band = len(self.coefficients)
        history = [data, *(arrays["data"] if arrays else [])][:band]
        weights = [int(c * 2**self.shift) for c in self.coefficients]
        released = noise()
        for weight, earlier in zip(weights, history, strict=False):
            released = released + weight * earlier
        estimates = [*arrays["estimates"]] if arrays else []
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
        """Return (C^-1 Y)_t, in units of the grid of Y."""
        assert memory is not None
        estimate: NDArray[np.float64] = memory.read()["estimates"][0]
        return estimate
