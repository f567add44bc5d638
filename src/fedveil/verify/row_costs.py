"""Costs of the rows of a ledger, each from its clip, noise and coordinates, and their sum for each client."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from fedveil.verify.second_path import Curve, Release, Search

_curve = lru_cache(maxsize=64)(Curve)


class Expected(NamedTuple):
    """The expected contents of rows; kinds: events with their rates; plan: fixed values of every row.

    sharers: the most uploads of a sum that each have their own noise; 1 if noise is added once.
    """

    scope: tuple[str, ...] = ()
    clients: int = 0
    colluders: int = 0
    steps: bool = False
    kinds: frozenset[tuple[str, float | None]] = frozenset()
    plan: tuple[Any, ...] | None = None  # clip, most examples of the released counts or 0, noises, mechanism: if always the same
    sharers: int = 1
    score: tuple[int, tuple[Any, ...] | None] = (-1, None)  # round and plan of the score by which the run was chosen
    runs: int = 1  # number of inspected runs
    search: Search = None
    shared: bool = False  # each client adds a share of the noise on the sum, and spare releases are planned


class RowCosts:
    """The costs of the rows for each client (-1 is the aggregate), and the error of the first wrong row."""

    def __init__(self, expected: Expected | None = None, releases: Iterable[Mapping[str, Any]] = ()) -> None:
        self.expected, self.wrong, self.participants = expected or Expected(), "", dict[int, float]()
        self.dimension, self.extras = 0, False
        self.held, self.most, self.so_far = Counter[int](), (0.0, 0), dict[int, tuple[Any, float]]()  # largest cost up to a round
        self.fellow = 0.0  # additional mu^2 for a client who knows its own noise, if rows leave that out (A-2026-03)
        self.squares, self.sampled = defaultdict[int, float](float), defaultdict[int, Counter[Release]](Counter)
        for release in releases:
            self.count(-1, release)

    def add(self, row: Mapping[str, Any], run: str) -> None:
        """Add one row, and check its consistency."""
        own, x, dimension = row["client"] >= 0, self.expected, 1
        if row["round"] != x.score[0]:
            seen, together = self.participants.get(row["round"], 0), row["participants"]
            self.participants[row["round"]] = seen + 1 if own else math.inf if together is None else together
            dimension = self.dimension = self.dimension or row["dimension"]
            self.extras = row["extras"] != "[]"
        named = (row["unit"], row["adjacency"], row["view"], own, row["dimension"], row["run"])
        right = named == (*x.scope, x.scope[2] == "server", dimension, run) and row["coordinates"] <= dimension
        problem = "" if row["event"] == "unbounded" else self._problem(row, x)
        if not right or not -1 <= row["client"] < x.clients:
            problem = "is charged for another scope, or is of another run, model or client"
        if (row["participants"] or 0) > x.clients:
            problem = f"has {row['participants']} participants, and there are {x.clients} clients"
        self.wrong = self.wrong or (problem and f"row {row['seq']} {problem}")
        self.count(client := row["client"], row)
        self.held[client] += row["count"]
        if (now := (self.squares[client], self.held[client])) > self.most:
            self.most, self.so_far[row["round"]] = now, (frozenset(self.sampled[client].items()), now[0])

    def count(self, client: int, row: Mapping[str, Any]) -> None:
        """Add the cost of one row, or of one planned release."""
        if row["count"] < 1 or not 0 < (row["rate"] or 1) <= 1 or not 0 < (row["noise_multiplier"] or 1) < math.inf:
            raise ValueError("a release counts at least once, has a rate of at most 1, and a noise multiplier above 0")
        count = row["count"] * self.expected.runs
        if row["event"] == "unbounded":
            self.squares[client] = math.inf
        elif row["event"] == "gaussian" or row["rate"] == 1:
            self.squares[client] += count * (row["mu"] if row["event"] == "gaussian" else 1 / row["noise_multiplier"]) ** 2
        else:
            self.sampled[client][(row["event"], row["rate"], row["noise_multiplier"])] += count

    def _problem(self, row: Mapping[str, Any], x: Expected) -> str:
        """Return why the charged cost does not follow from the row; only the plan has the factor of correlated noise."""
        charged = row["mu"] if row["event"] == "gaussian" else 1 / row["noise_multiplier"]
        factor = 2 if row["adjacency"] == "replace_one" or (row["unit"] == "record" and not x.steps) else 1
        if (row["event"], row["rate"]) not in x.kinds or row["note"].startswith("DP-SGD") != x.steps:
            return "is of another kind than the releases that the statement lists"
        if row["reads"] != "[]" or (not x.steps and ((row["grid"] or "null") == "null" or row["mechanism"] == "none")):
            return "is charged as if it left as integers with noise, chosen without the data, and says that it did not"
        mu, clips, stds = _mu(row["clip"], row["noise_std"], row["whole_clip"], row["extras"], x.steps)
        alone = factor * mu if row["coordinates"] else 0.0
        uploads = x.sharers if row["participants"] is None else min(row["participants"], x.sharers)
        shares = round((alone / charged) ** 2) if row["client"] < 0 < charged < alone < math.inf else 1
        right = shares <= max(uploads - x.colluders, 1)
        right = right and math.isclose(charged, alone / math.sqrt(shares), rel_tol=1e-9, abs_tol=1e-12)
        if right and shares > max(uploads - max(x.colluders, 1), 1):
            self.fellow += row["count"] * x.runs * charged * charged / (shares - 1)
        if x.steps:  # charged a little more, for the rounding of sums, and of each coordinate to a grid of 2^-24 of the noise
            right = alone <= charged * (1 + 1e-9) <= 1.01 * alone + factor * 2.0**-24 * math.sqrt(row["dimension"])
        elif row["mechanism"] == "banded":
            right = row["client"] < 0 and (charged >= alone * (1 - 1e-9) if row["round"] == 0 else charged == 0)
        plan = x.score[1] if row["round"] == x.score[0] else x.plan
        if not right or plan is None:
            return "" if right else f"charges mu = {charged:.9g}, and its clip, noise and coordinates give {alone:.9g}"
        clip, most, noises, mechanism = plan
        found = (row["whole_clip"], clips, row["mechanism"], row["extras"], row["coordinates"])
        wanted = (clip, {clip, most or clip}, mechanism, '["evaluation"]' if most else "[]", row["dimension"])
        right = found == wanted and stds in [{float(f"{std:.9g}") for std in each if std} for each in noises]
        return "" if right else f"has not the clip {clip:.9g} and the {mechanism} noise {noises[0]} of the configuration"

    def curve(self, delta: float, adjacency: str) -> Curve:
        """Return the curve of the client with the largest cost; raises ValueError as `Curve` does."""
        costs = {(frozenset(self.sampled[c].items()), self.squares.get(c, 0.0)) for c in {*self.squares, *self.sampled}}
        plain = max((squares for sampled, squares in costs if not sampled), default=0.0)
        dearest = [*(cost for cost in costs if cost[0]), (frozenset[Any](), plain)]
        return max((_curve(*cost, delta, adjacency, self.expected.search) for cost in dearest), key=lambda curve: curve.epsilon)


@lru_cache(maxsize=4096)
def _mu(clip_text: str, noise_text: str, whole: float | None, extras: str, steps: bool) -> tuple[float, set[float], set[float]]:
    """Return the largest norm of shift / std of a release (fractional knapsack; inf without noise), clips, noises to 9 digits.

    In steps of DP-SGD a record moves either the gradients or the counts of test records.
    """
    clips = [math.inf if c is None else float(c) for c in json.loads(clip_text)]
    stds = [float(s) for s in json.loads(noise_text)]
    left, total, layers = math.inf if whole is None else whole * whole, 0.0, len(clips) - len(json.loads(extras))
    for std, clip in sorted(zip(stds[:layers], clips[:layers], strict=True)):
        square = min(clip * clip, left)
        if square > 0:
            total += square / (std * std) if std else math.inf
            left -= square
    others = [c / s if s else math.inf for c, s in zip(clips[layers:], stds[layers:], strict=True) if c > 0]
    apart = steps and extras == '["evaluation"]'
    mu = max(math.sqrt(total), *others) if apart else math.hypot(math.sqrt(total), *others)
    return mu, set(clips), {float(f"{std:.9g}") for std in stds}
