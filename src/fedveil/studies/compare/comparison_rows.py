"""The rows of a comparison, and the comparison in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from fedveil.accounting.types import epsilon, number, small
from fedveil.experiment.recorded_run import read_run
from fedveil.statement.statement import Assumption, Statement
from fedveil.statement.statement_text import Item, TextSection
from fedveil.studies.cell import CellState
from fedveil.studies.compare.comparison_plan import Planned
from fedveil.studies.statistics import (
    LEVEL,
    Against,
    against_best,
    interval,
    last,
    ranks,
    seeds_needed,
    smallest_rank_sum,
    smallest_signed_rank,
)
from fedveil.tasks.task import Column


@dataclass(frozen=True)
class Row:
    """One method at one guarantee and partition.

    Args:
        method, partition, epsilon: as planned; epsilon is inf for a run without noise.
        column: the compared number. seeds: number of planned seeds. values: by seed, the number of the final model.
        rank: by mean within the block, 1 is the best; None if the block has a single row, or seeds are missing.
        against: the test against the best of the block; None for the best, or without a sample.
        statement: the promise of the runs; if seeds differ (by the users that they draw), that of the largest proven epsilon.
        problems: why it was not run, or the errors of single cells. states: of its cells.
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
        """The statements of finished runs, whose assumptions may differ by engine; that of the plan if none has finished."""
        return _made(self.states) or ([] if self.statement is None else [self.statement])

    @property
    def mean(self) -> float:
        """Mean over the seeds; nan without any."""
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
        """The confidence interval, limited to [0, 1] for a share; the mean alone for fewer than two seeds."""
        half = 0.0 if math.isnan(self.interval) else self.interval
        low, high = self.mean - half, self.mean + half
        return (max(0.0, low), min(1.0, high)) if self.column.share else (low, high)

    @property
    def complete(self) -> bool:
        """Return whether all seeds gave a number; otherwise the mean would favour a method that fails."""
        return len(self.values) == self.seeds > 0

    @property
    def block(self) -> tuple[str, float]:
        """The block of the row: its partition and its guarantee."""
        return self.partition, self.epsilon


def rows_of(planned: Sequence[Planned], states: Mapping[str, CellState], column: Column) -> list[Row]:
    """Return the rows in the planned order, ranked and tested within their blocks.

    Args:
        states: by name of the cell. column: of the history; the last value is used.
    """
    rows = [_row(p, [states[cell.name] for cell in p.cells], column) for p in planned]
    return [_placed(row, [r for r in rows if r.block == row.block and r.complete]) for row in rows]


def blocks(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """Return blocks of comparable rows, from the best to the worst, rows without a result last.

    Blocks are sorted by partition, then epsilon, runs without noise last.
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
    """Return the statements of finished cells."""
    return [state.statement for state in states if state.statement is not None]


def _problem(state: CellState, value: float | None, metric: str) -> str:
    """Return the problem of a cell, in the same words for all seeds; an empty string if there is none."""
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


def short_names(methods: Sequence[str]) -> dict[str, str]:
    """Return short names: the name of the method if it is unique, else with options."""
    bare = [m.split(":")[0] for m in methods]
    return {m: b if bare.count(b) == 1 else m.replace(":", " ", 1).replace(":", ", ") for m, b in zip(methods, bare, strict=True)}


def mean_and_sd(row: Row) -> str:
    """Return the mean with the sample standard deviation over the seeds."""
    return row.column.text(row.mean, row.sd)


def count(row: Row) -> str:
    """Return how many of the seeds gave a number."""
    return f"{len(row.values)} of {row.seeds}"


def claimed(row: Row) -> str:
    """Return the epsilon that the paper claims, or `none`."""
    claim = row.statement.claimed if row.statement else None
    return "none" if claim is None else epsilon(claim.epsilon, "∞", number)


def proven(row: Row) -> str:
    """Return the proven epsilon of the run's scope."""
    return epsilon(row.statement.proven.epsilon, "∞") if row.statement else "–"


def verdict(row: Row) -> str:
    """Return the result of the test against the best of the block."""
    if not row.values:
        return "no result"
    if not row.complete:
        return f"only {count(row)} seeds"
    if row.rank is None:
        return "alone"
    if row.against is None:
        return "best" if row.rank == 1 else "not tested"
    p = f"p = {row.against.holm:.3f}" if row.against.holm >= 0.001 else "p < 0.001"
    return f"{'worse' if row.against.holm < LEVEL else 'unclear'}, {p}"


def guarantee(partition: str, at: float, by: str) -> str:
    """Return the heading of a block."""
    promise = "without noise (no guarantee)" if math.isinf(at) else f"{by} epsilon = {at:g}"
    return f"{partition}, {promise}" if partition else promise


def problem_sentences(rows: Sequence[Row], names: Mapping[str, str], by: str) -> dict[str, list[str]]:
    """Return sentences about rows that were not run or failed, with their guarantees. names: short names of methods."""
    said: dict[str, list[str]] = {}
    for row in rows:
        for problem in row.problems:
            said.setdefault(f"{names[row.method]}: {problem}", []).append(guarantee(row.partition, row.epsilon, by))
    return said


def sample_sentences(seeds: Sequence[int], most: int, what: str) -> list[str]:
    """Return sentences about the test, its sample and its limits.

    Args:
        most: methods in the largest block. what: the compared number.
    """
    n = len(seeds)
    sample = (
        f"Sample: one number a seed ({what}, n = {n}, seeds {', '.join(map(str, seeds))}); rounds of one run are never a sample."
    )
    if n < 2:
        return [sample, "One seed is no sample: there is no spread and no test. Give --seeds 3 or more."]
    if most < 2:
        return [sample]
    others = most - 1
    comparisons = f"{others} comparison{'s' * (others != 1)}"
    needed, needed_all = seeds_needed(1), seeds_needed(others)
    test = (
        "Test: two-sided paired t-test by seed (both methods have the same initial model, partition and batch order) against "
        f"the best mean at the same guarantee, p after Holm's correction for {comparisons} in a block. "
        "An interval is that of one difference, without this correction."
    )
    limits = (
        "The t-test takes the differences between seeds for normal, which so few numbers cannot show. "
        if n < 10
        else "The t-test takes the differences between seeds for normal. "
    )
    if n < needed_all:
        limits += (
            f"Rank tests assume less, but with {n} seeds they cannot reach {LEVEL}: the least possible p is "
            f"{smallest_signed_rank(n):.3g} (Wilcoxon signed-rank) or {smallest_rank_sum(n):.3g} (Mann-Whitney) before "
            f"correction; signed-rank needs {needed} seeds for one comparison"
            + (f", {needed_all} for {others}. " if others > 1 else ". ")
        )
    limits += "The best was chosen by these same numbers, which favours it: confirm a close result with fresh seeds."
    return [sample, test, limits]


def assumptions_of(rows: Sequence[Row], names: Mapping[str, str]) -> TextSection:
    """Return the assumptions of the proven epsilons; a line names its methods unless it holds for all. names: short names."""
    resting: dict[Assumption, dict[str, None]] = {}
    proved: dict[str, None] = {}
    for name, statement in ((names[row.method], s) for row in rows for s in row.statements):
        if math.isfinite(statement.proven.epsilon):
            proved[name] = None
            for assumption in statement.assumptions:
                resting.setdefault(assumption, {})[name] = None
    items = [Item(f"{', '.join(who)}: {a.what}" if who != proved else a.what, a.why) for a, who in resting.items()]
    return TextSection("What the proven numbers rest on", items=tuple(items))


def promise_sentences(rows: Sequence[Row], by: str) -> list[str]:
    """Return sentences about the meaning of the epsilons, and differences between rows."""
    own = list(dict.fromkeys(f"{r.statement.scope}, delta = {small(r.statement.delta)}" for r in rows if r.statement))
    said = [f"Proven: {'; '.join(own)}."] if own else []
    seen: dict[str, dict[str, None]] = {}
    for r in rows:
        if r.statement and (e := r.statement.own.seen_count):
            seen.setdefault(proven(r), {})[epsilon(e)] = None
    if seen:
        worse = ", ".join(f"{hidden} becomes {' or '.join(others)}" for hidden, others in seen.items())
        said.append(f"Proven against those who do not see how many clients take part in a round; else {worse}.")
    claims: dict[str, dict[str, None]] = {}
    for r in rows:
        if claim := r.statement and r.statement.claimed:
            claims.setdefault(f"{claim.scope}, delta = {small(claim.delta)}", {})[r.method.split(":")[0]] = None
    if claims:
        said.append("Claimed by the papers: " + "; ".join(f"{', '.join(m)}: {scope}" for scope, m in claims.items()) + ".")
    if by == "claimed":
        said.append(
            "Compared at equal claimed epsilon: a claim may be wrong, and claims of different scopes do not promise the same; "
            "the proven column says what each run is known to keep. A method without a claim of its own is run at its proof."
        )
    return said
