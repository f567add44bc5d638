"""What is audited: a mechanism between two neighbouring worlds, and what its accountant was told about it.

The protocol is one call: `mechanism(world, rng)` runs the whole release on the private input of world 0 or world 1, with all
noise drawn from `rng`, and returns everything an adversary of the view receives. Adapting a release takes one line:

    mechanism = on_pair(lambda update, rng: Output(door(update, rng)), update_0, update_1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting.types import SampledGaussian, Scope
from fedveil.errors import ConfigError

Floats = NDArray[np.float64]
Private = TypeVar("Private")


@dataclass(frozen=True)
class Output:
    """Everything that leaves: the released vector and its side channels.

    vector: [d], in the dtype that is sent; entries that were not sent hold any fixed value (0).
    sent: [d] booleans, True where the entry was sent; None = all.
    extras: any further numbers or arrays that leave with it (a loss, a norm, a count), by name.
    """

    vector: NDArray[Any]
    sent: NDArray[np.bool_] | None = None
    extras: Mapping[str, float | NDArray[Any]] = field(default_factory=dict)


class AuditedMechanism(Protocol):
    """A release on the private input of world 0 or 1; all its randomness comes from `rng`."""

    def __call__(self, world: int, rng: np.random.Generator, /) -> Output:
        """Release once in `world` (0 or 1)."""
        ...


def on_pair(release: Callable[[Private, np.random.Generator], Output], a: Private, b: Private) -> AuditedMechanism:
    """The mechanism that runs `release` on `a` in world 0 and on `b` in world 1."""

    def mechanism(world: int, rng: np.random.Generator, /) -> Output:
        return release(b if world else a, rng)

    return mechanism


@dataclass(frozen=True)
class Subject:
    """One audited release: the mechanism between two neighbours, and what is known about it.

    scope: unit, adjacency and view that the two worlds stand for.
    mean: the noiseless upload in world 0 and in world 1, each [d]; an auditor owns both inputs, so these are known.
    noise_std: std of the noise on each coordinate in world 0 and world 1, each [d]; 0 = no noise there.
    gaussian: whether the trade-off curve between the worlds is Gaussian (plain Gaussian noise, equal in both worlds).
    bounded: whether the noise has bounded support, so that a neighbour's upload can lie where this one never does.
    layers: slices of the vector by name, for the recomputation of noise per layer; default one layer "all".
    sampled: what it costs where it is plain Gaussian noise on a unit that is in the release by a secret chance.
    rate: the chance that the unit is in the release at all, if that is secret; `mechanism` draws it, `mean` has the unit in.
    present: the release with the unit in it, which is looked at for structure: what leaks there leaks at every delta < rate.
    """

    name: str
    mechanism: AuditedMechanism
    scope: Scope
    mean: tuple[Floats, Floats]
    noise_std: tuple[Floats, Floats]
    gaussian: bool = False
    bounded: bool = False
    layers: Mapping[str, slice] = field(default_factory=dict)
    sampled: SampledGaussian | None = None
    rate: float = 1.0
    present: AuditedMechanism | None = None

    def __post_init__(self) -> None:
        shapes = {np.shape(array) for array in (*self.mean, *self.noise_std)}
        if len(shapes) != 1 or len(shapes.pop()) != 1:
            got = [np.shape(array) for array in (*self.mean, *self.noise_std)]
            raise ConfigError(f"{self.name}: mean and noise_std must be four vectors of one length, got {got}")
        for array in (*self.mean, *self.noise_std):
            if not np.all(np.isfinite(array)):
                raise ConfigError(f"{self.name}: mean and noise_std must be finite")
        if not 0 < self.rate <= 1 or (self.rate < 1 and self.gaussian):
            raise ConfigError(f"{self.name}: rate must be in (0, 1], and 1 where the curve is Gaussian, got {self.rate}")
        if any(np.any(std < 0) for std in self.noise_std):
            raise ConfigError(f"{self.name}: noise_std must be >= 0")

    @property
    def d(self) -> int:
        return int(self.mean[0].size)

    @property
    def named_layers(self) -> Mapping[str, slice]:
        """The layers, or the whole vector as one."""
        return self.layers or {"all": slice(0, self.d)}


def isotropic(d: int, std: float) -> tuple[Floats, Floats]:
    """The same noise std on all d coordinates in both worlds."""
    return np.full(d, std), np.full(d, std)
