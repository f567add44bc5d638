"""Which clients of a Flower app have the arrays of its model: their names and shapes follow from the app, and from no data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class FittingClients:
    """The clients whose last reply had the arrays of the model, and those whose last reply had not.

    A client that fails may do so by its data, so that it counts as it did before: no run ends because it failed. Nor does one end
    by who was drawn: not where a round had replies of both kinds, as long as one client is left that fits, and not by fewer
    clients than those that fit.
    """

    _fitting: set[int] = field(default_factory=set)
    _others: set[int] = field(default_factory=set)
    _mixed: bool = False

    def none_left(self, drawn: Collection[int], fitting: Collection[int], others: Collection[int]) -> bool:
        """Whether the app has come to answer with other arrays, by the replies of a round.

        Args:
            drawn: who was asked. fitting, others: whose reply has the arrays of the model, and whose has not; the rest failed.
        """
        self._mixed |= bool(fitting) and bool(others)
        self._fitting = self._fitting.union(fitting).difference(others)
        self._others = self._others.union(others).difference(fitting)
        left = self._fitting if self._mixed else self._fitting.intersection(drawn)
        return bool(others) and not left and len(self._others) >= len(self._fitting)
