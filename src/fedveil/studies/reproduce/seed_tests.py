"""Whether the best of several methods is better than the others, over the seeds of a reproduction.

A sample is one number a seed: the same seed has the same data, partition and first model in every row, so rows are paired by it.
Rounds of one run, and clients of one federation, are no independent samples.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedveil.studies.reproduce.recipe import compared_axis
from fedveil.studies.reproduce.reproduction import Reproduction, RowOutcome
from fedveil.studies.statistics import LEVEL, against, against_best


def seed_test_remarks(done: Reproduction) -> list[str]:
    """For each block of rows that differ in the compared axis alone: which rows differ from the largest mean, or a named one."""
    if done.seeds < 2:
        return []
    axis = compared_axis(done.recipe)
    if axis is None:
        return []
    found = []
    for i, column in enumerate(done.recipe.columns):
        if not column.relative:
            found += [text for block in _blocks(done, axis) if (text := _tested(block, axis, i, column.label, done))]
    if found:
        small = f"; with {done.seeds} seeds only large differences show" if done.seeds < 6 else ""
        found.append(f"Tests are two-sided paired t-tests by seed ({done.seeds} seeds), with Holm's correction{small}.")
    return found


def _blocks(done: Reproduction, axis: int) -> Iterator[list[RowOutcome]]:
    """Rows that agree on all other axes, each with a number for every seed."""
    blocks: dict[tuple[str, ...], list[RowOutcome]] = {}
    for outcome in done.outcomes:
        labels = outcome.row.labels
        blocks.setdefault((*labels[:axis], *labels[axis + 1 :]), []).append(outcome)
    yield from blocks.values()


def _tested(block: list[RowOutcome], axis: int, column: int, label: str, done: Reproduction) -> str:
    """One sentence about a block, or nothing where fewer than two rows have several seeds, or the settings decide the figure."""
    samples = {
        outcome.row.labels[axis]: dict(enumerate(outcome.values[column]))
        for outcome in block
        if outcome.values and not outcome.problems[column] and len(outcome.values[column]) > 1
    }
    if len(samples) < 2 or all(len(set(values.values())) == 1 for values in samples.values()):
        return ""
    where = ", ".join((*block[0].row.labels[:axis], *block[0].row.labels[axis + 1 :]))
    where = f"{where}: " if where else ""
    of = f" ({label})" if len(done.recipe.columns) > 1 else ""
    if done.against and done.against not in samples:
        return f"{where}{done.against} has no numbers of several seeds{of}, so nothing is compared with it."
    tests = against(samples, done.against) if done.against else against_best(samples)
    best = done.against or f"{next(iter(tests.values())).best} has the largest mean"
    parts = [
        f"{name} {t.difference:+.3g} (p = {t.holm:.2g}{'' if t.holm <= LEVEL else ', not shown'})" for name, t in tests.items()
    ]
    return f"{where}{best}{of}; less that: {'; '.join(parts)}."
