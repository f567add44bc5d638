"""The rounded Gaussian noise of a release, drawn without looking at any data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedveil.errors import ConfigError
from fedveil.ledger.entry import AGGREGATE
from fedveil.mechanism.plan import Plan
from fedveil.release.release_layout import ReleaseLayout
from fedveil.training.cores import available_cores

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.release.noise import Randomness

LEAST_SHARE = 4
"""Grid steps of a share's noise std from which a sum of rounded shares costs what one Gaussian does (docs/exact-release.md)."""
LARGE = 2**23
"""Coordinates from which the noise of a sum is drawn on all cores: no client trains while a sum is released."""


@dataclass(frozen=True)
class DrawnNoise:
    """Fresh noise [D] of a plan, in steps of its grid; one key for each release. name: (round, client).

    Its bits do not depend on the number of cores.
    """

    randomness: Randomness
    parts: ReleaseLayout
    plan: Plan
    name: tuple[int, int]

    def __call__(self) -> NDArray[np.int64]:
        parts, plan = self.parts, self.plan
        steps = [std * 2.0**-k for (_, std, _), (_, k) in zip(parts.groups(plan), parts.grid(plan), strict=True)]
        if plan.place == "upload" and min((s for s in steps if s), default=LEAST_SHARE) < LEAST_SHARE:
            raise ConfigError(
                f"an upload's noise has a std of {min(s for s in steps if s):.3g} grid steps, and noise that is added up over "
                f"uploads needs at least {LEAST_SHARE}: give the mechanism (or privacy.grid_bits) at least 2 bits, or the plan "
                f"more noise"
            )
        if len(set(steps)) == 1 and plan.support is None:
            return self._integers(steps[0])
        sizes = [part.stop - part.start for part, _ in parts.grid(plan)]
        std = np.repeat(np.array(steps), sizes)
        if plan.support is not None:
            std[: parts.model.dimension] *= plan.support.numpy()
        return self._integers(std)

    def _integers(self, std: float | NDArray[np.float64]) -> NDArray[np.int64]:
        n = self.parts.dimension
        threads = available_cores() if self.name[1] == AGGREGATE and n >= LARGE else None
        return self.randomness.integers(std, n, *self.name, threads=threads)
