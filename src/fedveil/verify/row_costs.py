"""What the rows of a ledger cost, each by its own clip, noise and coordinates, and all of them together by client."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fedveil.verify.second_path import Curve, Release


class RowCosts:
    """The sum of the rows, client by client (-1 is the aggregate), and what is wrong with the first row that is."""

    def __init__(self, scope: tuple[str, ...], colluders: int) -> None:
        self.scope, self.colluders = scope, colluders
        self.squares: dict[int, float] = defaultdict(float)
        self.sampled: dict[int, Counter[Release]] = defaultdict(Counter)
        self.dimension, self.extras = 0, False
        self.participants, self.wrong = dict[int, float](), ""

    def add(self, row: Mapping[str, Any], run: str) -> None:
        """Count one row, and check what it says of itself."""
        own = row["client"] >= 0
        together = math.inf if row["participants"] is None else row["participants"]
        self.participants[row["round"]] = self.participants.get(row["round"], 0) + 1 if own else together
        named = (row["unit"], row["adjacency"], row["view"], own, row["dimension"], row["run"])
        self.dimension, self.extras = self.dimension or row["dimension"], row["extras"] != "[]"
        if named != (*self.scope, row["view"] == "server", self.dimension, run) or row["coordinates"] > self.dimension:
            self.wrong = self.wrong or f"row {row['seq']} is charged for another scope, or is of another run or model"
        self.count(row["client"], row)
        if row["event"] != "unbounded" and (problem := self._cost_problem(row)):
            self.wrong = self.wrong or f"row {row['seq']} {problem}"

    def count(self, client: int, row: Mapping[str, Any]) -> None:
        """Count the cost of one row, or of one planned release."""
        if row["count"] < 1:
            raise ValueError("a release counts at least once")
        if row["event"] == "unbounded":
            self.squares[client] = math.inf
        elif row["event"] == "gaussian" or row["rate"] == 1:
            self.squares[client] += row["count"] * (row["mu"] if row["event"] == "gaussian" else 1 / row["noise_multiplier"]) ** 2
        else:
            self.sampled[client][(row["event"], row["rate"], row["noise_multiplier"])] += row["count"]

    def _cost_problem(self, row: Mapping[str, Any]) -> str:
        """Why the charged cost does not follow from the row; correlated noise has a factor that only the plan knows."""
        charged = row["mu"] if row["event"] == "gaussian" else 1 / row["noise_multiplier"]
        steps = row["note"].startswith("DP-SGD")
        factor = 2 if row["adjacency"] == "replace_one" or (row["unit"] == "record" and not steps) else 1
        whole = math.inf if row["whole_clip"] is None else row["whole_clip"]
        alone = factor * _mu(row["clip"], row["noise_std"], whole, len(json.loads(row["extras"]))) if row["coordinates"] else 0.0
        shares = max((row["participants"] or 0) - self.colluders, 1)  # each upload of a sum may carry noise of its own
        right = any(math.isclose(charged, mu, rel_tol=1e-9, abs_tol=1e-12) for mu in (alone, alone / math.sqrt(shares)))
        if steps:  # charged a little more, for the rounding of sums
            right = alone <= charged * (1 + 1e-9) <= 1.01 * alone
        elif row["mechanism"] == "banded":
            right = charged >= alone * (1 - 1e-9) if row["round"] == 0 else charged == 0
        return "" if right else f"charges mu = {charged:.9g}, and its clip, noise and coordinates give {alone:.9g}"

    def curve(self, delta: float, adjacency: str) -> Curve:
        """What the releases of one client tell, of whom most is told; raises ValueError as `Curve`."""
        costs = {(frozenset(self.sampled[c].items()), self.squares.get(c, 0.0)) for c in {*self.squares, *self.sampled}}
        plain = max((squares for sampled, squares in costs if not sampled), default=0.0)
        dearest = [(frozenset[Any](), plain), *(cost for cost in costs if cost[0])]
        return max((_curve(*cost, delta, adjacency) for cost in dearest), key=lambda curve: curve.epsilon)


_curve = lru_cache(maxsize=64)(Curve)


@lru_cache(maxsize=4096)
def _mu(clip_text: str, noise_text: str, whole: float, extras: int) -> float:
    """Largest norm of shift / std of one release, extras after the layers; inf where something leaves without noise.

    Under the clip of the whole, squares of shifts are spent first where the noise is least: a fractional knapsack.
    """
    clips = [math.inf if c is None else float(c) for c in json.loads(clip_text)]
    stds = [float(s) for s in json.loads(noise_text)]
    left, total, layers = whole * whole, 0.0, len(clips) - extras
    for std, clip in sorted(zip(stds[:layers], clips[:layers], strict=True)):
        square = min(clip * clip, left)
        if square > 0:
            total += square / (std * std) if std else math.inf
            left -= square
    others = [c / s if s else math.inf for c, s in zip(clips[layers:], stds[layers:], strict=True) if c > 0]
    return math.hypot(math.sqrt(total), *others)
