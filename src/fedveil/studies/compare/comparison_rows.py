"""The rows of a comparison: what each method reached over its seeds, its rank, and whether the best differs from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from fedveil.run.recorded_run import read_run
from fedveil.statement.statement import Statement
from fedveil.studies.compare.comparison_plan import Planned
from fedveil.studies.curves import last
from fedveil.studies.grid.cell import CellState
from fedveil.studies.statistics import Against, against_best, interval, ranks
from fedveil.tasks.column import Column


@dataclass(frozen=True)
class Row:
    """One method at one guarantee and partition.

    Args:
        method, partition, epsilon: as planned; epsilon is inf for a run without noise.
        column: the compared number. seeds: how many were asked for. values: by seed, the final model's number.
        rank: by mean within its block, 1 the best; None where the block has nothing to compare it with, or seeds are missing.
        against: the test against the best of the block, None for the best itself and where there is no sample.
        statement: what the runs promise, that of the largest proven epsilon where seeds differ, as by the users that they draw.
        problems: why it was not run, or what went wrong in single cells. states: of its cells.
    """

    method: str
    partition: str
    epsilon: float
    column: Column
    seeds: int
    values: Mapping[int, float] = field(default_factory=dict)
    rank: int | None = None
    against: Against | None = None
    statement: Statement | None = None
    problems: tuple[str, ...] = ()
    states: tuple[CellState, ...] = ()

    @property
    def statements(self) -> list[Statement]:
        """Of its finished runs, which may assume different things, as their engines do; of the plan where none has ended."""
        return _made(self.states) or ([] if self.statement is None else [self.statement])

    @property
    def mean(self) -> float:
        """Over the seeds; nan without any."""
        return fmean(self.values.values()) if self.values else math.nan

    @property
    def sd(self) -> float:
        """Sample standard deviation over the seeds; nan for fewer than two."""
        return stdev(self.values.values()) if len(self.values) > 1 else math.nan

    @property
    def interval(self) -> float:
        """Half the width of the 95 % confidence interval of the mean; nan for fewer than two seeds."""
        return interval(list(self.values.values()))

    @property
    def around(self) -> tuple[float, float]:
        """That interval, of a share as far as one can be in it; the mean alone for fewer than two seeds."""
        half = 0.0 if math.isnan(self.interval) else self.interval
        low, high = self.mean - half, self.mean + half
        return (max(0.0, low), min(1.0, high)) if self.column.share else (low, high)

    @property
    def complete(self) -> bool:
        """Whether all seeds gave a number; a mean over those that did not fail favours a method that fails."""
        return len(self.values) == self.seeds > 0

    @property
    def block(self) -> tuple[str, float]:
        """What it is compared within: the same partition and the same guarantee."""
        return self.partition, self.epsilon


def rows_of(planned: Sequence[Planned], states: Mapping[str, CellState], column: Column) -> list[Row]:
    """The rows in the planned order, ranked and tested within their blocks.

    Args:
        states: by the name of the cell. column: of the history; its last value counts.
    """
    rows = [_row(p, [states[cell.name] for cell in p.cells], column) for p in planned]
    return [_placed(row, [r for r in rows if r.block == row.block and r.complete]) for row in rows]


def blocks(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows that may be compared with each other, each from the best to the worst, those without a result last.

    Blocks come by partition, then by epsilon, runs without noise last.
    """
    rows = list(rows)
    partitions = list(dict.fromkeys(row.partition for row in rows))
    found: dict[tuple[str, float], list[Row]] = {}
    for row in sorted(rows, key=lambda r: (partitions.index(r.partition), r.epsilon)):
        found.setdefault(row.block, []).append(row)
    return {block: sorted(found[block], key=lambda r: (r.rank is None, r.rank or 0, not r.complete)) for block in found}


def _row(planned: Planned, states: Sequence[CellState], column: Column) -> Row:
    values: dict[int, float] = {}
    seeds_by_problem: dict[str, list[str]] = {}
    for state in states:
        seed = state.cell.config.run.seed
        value = last(read_run(state.path).history, column.name) if state.rounds and state.state != "failed" else None
        if value is not None:
            values[seed] = value
        if said := _problem(state, value, column.name):
            seeds_by_problem.setdefault(said, []).append(str(seed))
    problems = [f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}: {said}" for said, seeds in seeds_by_problem.items()]
    statement = max(_made(states), key=lambda s: s.proven.epsilon, default=planned.statement)
    return Row(
        planned.method,
        planned.partition,
        planned.epsilon,
        column,
        len(planned.cells),
        values,
        statement=statement,
        problems=(*([planned.reason] if planned.reason else []), *problems),
        states=tuple(states),
    )


def _made(states: Iterable[CellState]) -> list[Statement]:
    """The statements of those that have ended."""
    return [state.statement for state in states if state.statement is not None]


def _problem(state: CellState, value: float | None, metric: str) -> str:
    """What went wrong in a cell, in words that are the same for all seeds where it is; an empty string where nothing did."""
    if state.state == "failed":
        return f"failed: {state.error}"
    if not state.rounds:
        return f"no round finished: {state.ended}"
    stopped = f"stopped after round {state.rounds} of {state.total}: {state.ended}" if state.ended else ""
    return "; ".join(filter(None, (f"no {metric}" if value is None else "", stopped)))


def _placed(row: Row, block: Sequence[Row]) -> Row:
    if not row.complete or len(block) < 2:
        return row
    sign = row.column.sign
    rank = ranks({r.method: sign * r.mean for r in block})[row.method]
    signed = {r.method: {seed: sign * value for seed, value in r.values.items()} for r in block}
    against = against_best(signed).get(row.method)
    return replace(row, rank=rank, against=against and replace(against, difference=sign * against.difference))
