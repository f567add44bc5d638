"""Mechanisms: noise that executes and prices itself, its memory, and noise correlated over the rounds.

A mechanism turns the exact integers of a release into what leaves, and says what that costs. `Independent` draws fresh noise for
each release; correlated noise over the rounds is in `fedveil.mechanism.mechanisms`. A plan with any other mechanism is refused.

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
"""Its name in a run directory."""


class NoiseMemory:
    """Named arrays that a mechanism keeps from one round to the next, with the round that wrote them.

    Whoever reads them can take the noise off what was released: the file is for its owner alone (mode 600).

    Args:
        path: of the file, or None for a run without a directory, whose state then ends with the process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._held: Arrays | None = None
        self._plan: bytes | None = None

    def read(self) -> Arrays:
        """What was written last; empty before the first write.

        Raises:
            LedgerError: the file is damaged; the run cannot go on, because its noise would not be what was charged.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        if self._held is None:
            try:
                self._held = load(self.path.read_bytes()) if self.path is not None and self.path.exists() else {}
            except (OSError, SafetensorError) as problem:
                raise LedgerError(f"{self.path}: the state of the noise cannot be read ({problem}); start anew") from problem
        return self._held

    def hold_to(self, plan: bytes) -> None:
        """Write the digest of this plan with all that follows: a price that is paid once is that of one plan for all rounds.

        Raises:
            ConfigError: what is kept was written under another plan; nothing may leave.
        """
        held = self.read()
        if held and ("plan" not in held or held["plan"].tobytes() != plan):
            raise ConfigError(
                "noise correlated over the rounds was charged for the plan of its first round, and this round has another clip, "
                "noise, support, extra or mechanism: make the same plan in every round"
            )
        self._plan = plan

    def copied(self) -> NoiseMemory:
        """The same state in memory alone, for whoever looks at a release without making one."""
        copy = NoiseMemory()
        copy._held = dict(self.read())
        return copy

    def write(self, arrays: Arrays) -> None:
        """Replace what is kept; when this returns it survives a crash.

        Raises:
            LedgerError: it cannot be written; nothing may leave.
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
        self._held = arrays


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
