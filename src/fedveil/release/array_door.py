"""The door for Gaussian releases of one clip and one noise, in numpy alone; its bits are those of `fedveil.release.door`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedveil.accounting.types import Event, Scope
from fedveil.errors import ConfigError
from fedveil.ledger.entry import AGGREGATE, Entry
from fedveil.mechanism.cost import event_of
from fedveil.mechanism.grid import Clipping, from_grid
from fedveil.mechanism.plan import Plan
from fedveil.release.noise import DrawnNoise, Randomness
from fedveil.release.release_layout import Charger, ReleaseLayout, row_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.training.params import Layout

    Floats = NDArray[np.float32]
    Integers = NDArray[np.int64]

SEEDED = "noise from a seed"
"""Note of a release whose noise anybody can draw again: it protects nobody."""
_LARGEST_SUM = 2**62
"""Integers of a sum stay below this, noise included."""


@dataclass(frozen=True)
class ArrayDoor:
    """Door for float32 vectors of numpy under one plan for all rounds.

    Args:
        plan: a finite clip and independent noise of one std, on each upload or once on the sum. layout: of the vector.
        scope: of the guarantee. run: name written into each ledger row. ledger: charged for each release.
        randomness: source of noise. rate: Poisson sampling rate of clients, or None if sampling is not Poisson.
    """

    plan: Plan
    layout: Layout
    scope: Scope
    run: str
    ledger: Charger
    randomness: Randomness
    rate: float | None = None

    @cached_property
    def _parts(self) -> ReleaseLayout:
        return ReleaseLayout(self.layout)

    @cached_property
    def _clipping(self) -> Clipping:
        return Clipping.of(self._parts.grid(self.plan), self.plan.clip, [np.inf], self.layout.dimension)

    @cached_property
    def _event(self) -> Event:
        return event_of(self.plan, self.layout, self.scope, rate=self.rate)

    def admits(self, client: int) -> bool:
        """Return whether the budget has room for one more release about a client, or about all (-1)."""
        return self.ledger.admits(client, self._event)

    def encode(self, vector: Floats) -> Integers:
        """Clip a vector [d] and truncate it to integers [d] of the plan's grid: private, before any noise.

        Raises:
            UpdateRefused: it has NaN or infinite values.
        """
        return self._clipping.integers(vector)

    def release(self, integers: Integers, client: int, round: int) -> Floats:
        """Add noise to one client's encoded vector [d], charge the release, and return it as float32 [d].

        Raises:
            BudgetExhausted: it would exceed the client's budget; nothing was charged or released.
        """
        return self._released(integers, client, round, 1)

    def release_mean(self, encoded: Sequence[Integers], round: int, denominator: float) -> Floats:
        """Add noise to the sum of encoded vectors [d], charge it once for all clients, and return the sum / denominator.

        Args:
            encoded: of the clients that contributed; it may be empty. denominator: planned; it does not depend on who failed.

        Raises:
            BudgetExhausted: as in `release`. ConfigError: so many clients that the sum may not fit into its integers.
        """
        most = sum(bound for _, bound in self._parts.bounds(self.plan)[:1])
        if len(encoded) * max(most, 1) >= _LARGEST_SUM:
            raise ConfigError(f"the sum of {len(encoded)} clients does not fit into 64 bits at this noise: plan more noise")
        total = np.zeros(self.layout.dimension, np.int64)
        for one in encoded:
            total += one
        return self._released(total, AGGREGATE, round, len(encoded)) / np.float32(denominator)

    def _released(self, integers: Integers, client: int, round: int, participants: int) -> Floats:
        noise = DrawnNoise(self.randomness, self._parts, self.plan, (round, client))
        noisy = self.plan.mechanism.execute(integers, noise, round, None)
        columns = row_of(self.plan, self._parts, exact=True)
        entry = Entry(
            run=self.run,
            round=round,
            client=client,
            unit=self.scope.unit,
            adjacency=self.scope.adjacency,
            view=self.scope.view,
            event=self._event,
            participants=participants,
            **{**columns, "note": SEEDED if self.randomness.seeded_noise else columns["note"]},
        )
        self.ledger.charge_all([entry])
        return from_grid(noisy, self._parts.grid(self.plan))
