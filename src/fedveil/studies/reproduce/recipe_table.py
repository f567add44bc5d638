"""The table of a recipe: our values and the paper's, with tests over seeds.

A sample has one number per seed. A seed has the same data, partition and initial model in every row, so rows are paired by seed.
Rounds of one run, and clients of one federation, are not independent samples.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any

from fedveil.experiment.run_directory import write_json, write_text, write_versions
from fedveil.studies.reproduce.recipe import PAPERS, Value, as_printed, compared_axis
from fedveil.studies.reproduce.recipe_files import changes, settings_digest
from fedveil.studies.reproduce.reproduction import Reproduction, RowOutcome
from fedveil.studies.statistics import LEVEL, against, against_best

_ACCURACIES = ("test_accuracy", "mean_personal_accuracy", "mean_personal_test_accuracy", "client_accuracy")
"""Series that are accuracies."""
NEAR, SHARE = 1.5, 0.05
"""An accuracy is at chance if it is at most NEAR times that of guessing, and exceeds it by at most SHARE of the distance to 1."""


def chance_remarks(done: Reproduction) -> list[str]:
    """Return one sentence for each column and data set with two or more rows at chance."""
    found = []
    for i, column in enumerate(done.recipe.columns):
        if column.of not in _ACCURACIES or column.relative:
            continue
        by_level: dict[float, list[str]] = {}
        for outcome in done.outcomes:
            level = _at_chance(outcome, i, column.times)
            if level is not None:
                by_level.setdefault(level, []).append(f"{', '.join(outcome.row.labels)} {outcome.mean(i):.3g}")
        for level, rows in by_level.items():
            if len(rows) > 1:
                arms = "both arms" if len(rows) == 2 else f"{len(rows)} arms"
                found.append(
                    f"{arms} are at chance ({column.label}: {'; '.join(rows)}, against {column.times * level:.3g} by "
                    "guessing): their difference says nothing."
                )
    return [text[0].upper() + text[1:] for text in found]


def _at_chance(outcome: RowOutcome, column: int, times: float) -> float | None:
    """Return the chance level of a row that does not exceed it, else None."""
    ours = outcome.mean(column)
    guess = outcome.chance
    if ours is None or guess is None or ours > times * min(NEAR * guess, guess + SHARE * (1 - guess)):
        return None
    return guess


def seed_test_remarks(done: Reproduction) -> list[str]:
    """Return, for each block of rows that differ in the compared axis only, which differ from the best or from a named row."""
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
    """Return blocks of rows that agree on all other axes, each row with a number for every seed."""
    blocks: dict[tuple[str, ...], list[RowOutcome]] = {}
    for outcome in done.outcomes:
        labels = outcome.row.labels
        blocks.setdefault((*labels[:axis], *labels[axis + 1 :]), []).append(outcome)
    yield from blocks.values()


def _tested(block: list[RowOutcome], axis: int, column: int, label: str, done: Reproduction) -> str:
    """Return one sentence about a block; none if fewer than two rows have several seeds, or the settings determine the figure."""
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


@dataclass(frozen=True)
class Line:
    """One value: labels, column, the published value, ours with its spread, the difference, or why ours is missing."""

    labels: tuple[str, ...]
    column: str
    theirs: Value | None
    ours: float | None
    spread: float | None
    seeds: int
    difference: float | None
    why: str

    def cells(self, footnotes: Sequence[str]) -> tuple[str, str, str]:
        """Return the published value, ours and the difference as text; a missing value of ours is the number of a footnote."""
        ours = "" if self.ours is None else digits(self.ours)
        if self.spread is not None:
            ours += f" ± {digits(self.spread)}"
        if self.why:
            ours = f"{ours} [{footnotes.index(self.why) + 1}]".lstrip()
        return as_printed(self.theirs), ours, "" if self.difference is None else signed(self.difference)


def lines(done: Reproduction) -> Iterator[Line]:
    """Yield one line per value, row by row and column by column.

    A row that could not be run has one line if the paper has no value for it, else one line per published value.
    """
    for outcome in done.outcomes:
        if outcome.problem and not any(v is not None for v in outcome.row.published):
            yield Line(outcome.row.labels, "", None, None, None, 0, None, outcome.problem)
            continue
        for i, column in enumerate(done.recipe.columns):
            if not (outcome.problem and outcome.row.published[i] is None):
                yield _line(outcome, i, column.label)


def header(done: Reproduction) -> list[str]:
    several = len(done.recipe.columns) > 1
    value = ["column"] if several else []
    unit = "" if several else f" {done.recipe.columns[0].label}"
    return [axis.name for axis in done.recipe.axes] + value + [f"paper:{unit}" if unit else "paper", "ours", "difference"]


def body(done: Reproduction) -> list[list[str]]:
    """Return the lines of a table, as text under `header`."""
    several, why = len(done.recipe.columns) > 1, footnotes(done)
    return [[*line.labels, *([line.column] if several else []), *line.cells(why)] for line in lines(done)]


def footnotes(done: Reproduction) -> list[str]:
    """Return the reasons for missing values of ours, each once."""
    return list(dict.fromkeys(line.why for line in lines(done) if line.why))


def scale_text(done: Reproduction) -> str:
    """Return one or two sentences about the scale and its meaning."""
    seeds = f"{done.seeds} seed{'s' if done.seeds > 1 else ''}"
    own = f" Settings of the user: {', '.join(done.overrides)}." if done.overrides else ""
    if all(outcome.problem for outcome in done.outcomes):
        return "Nothing of it was run."
    made = [f"{key} = {_toml(value)}" for key, value in changes(done.recipe).items()]
    rows = f" {done.left_out} further rows at the paper's scale." if done.left_out else ""
    if done.only:
        chosen = "; ".join(f"{axis}: {', '.join(labels)}" for axis, labels in done.only.items())
        rows = f" Only {chosen}: {done.left_out} further rows at the paper's scale."
    if done.scale == "paper":
        return f"Scale: the paper's settings, as far as it states them ({seeds}).{rows}{own}"
    if not made and not rows:
        return f"Scale: small, which is the paper's own here ({seeds}).{own}"
    return (
        f"Scale: SMALL, not the paper's ({seeds}): {'; '.join(made) or 'fewer rows'}. "
        f"Differences show the change of settings too.{rows}{own}"
    )


def remarks(done: Reproduction) -> list[str]:
    """Return remarks: missing values, rows at chance, tests over seeds, notes, and other figures in the text of the paper."""
    missing = [f"[{i}] {why}." for i, why in enumerate(footnotes(done), 1)]
    ended = [f"{', '.join(o.row.labels)}: the run ended early: {o.ended}." for o in done.outcomes if o.ended]
    entries = [entry for outcome in done.outcomes for entry in outcome.row.entries if entry.note]
    notes = [*done.recipe.notes, *dict.fromkeys(f"{entry.label}: {entry.note}." for entry in entries)]
    return [
        *missing,
        *ended,
        *chance_remarks(done),
        *seed_test_remarks(done),
        *notes,
        *(f"The paper also states: {s.what}: {as_printed(s.value)}." for s in done.recipe.stated),
    ]


def title(done: Reproduction) -> str:
    """Return the title: paper, table and subject."""
    return f"{PAPERS[done.recipe.paper]}, {done.recipe.table}: {done.recipe.title}"


def write_results(done: Reproduction) -> Path:
    """Write result.json, result.md, result.csv and versions.json into the reproduction's folder, and return the folder."""
    done.folder.mkdir(parents=True, exist_ok=True)
    write_json(done.folder / "result.json", as_json(done))
    write_text(done.folder / "result.md", as_markdown(done))
    write_text(done.folder / "result.csv", _as_csv(done))
    write_versions(done.folder / "versions.json")
    return done.folder


def as_json(done: Reproduction) -> dict[str, Any]:
    axes = [axis.name for axis in done.recipe.axes]
    rows = []
    for outcome in done.outcomes:
        values = [
            {
                "column": column.label,
                "paper": outcome.row.published[i],
                "ours": outcome.mean(i),
                "seeds": list(outcome.values[i]) if outcome.values else [],
                "difference": outcome.difference(i),
                "problem": outcome.problems[i] if outcome.problems else outcome.problem,
            }
            for i, column in enumerate(done.recipe.columns)
        ]
        labels = dict(zip(axes, outcome.row.labels, strict=True))
        row = {"labels": labels, "problem": outcome.problem, "values": values, "folders": list(outcome.folders)}
        settings = settings_digest(done.recipe, outcome.row, done.scale, done.overrides) if outcome.values else ""
        rows.append(row | {"settings": settings})
    return {
        "format": "fedveil-reproduction/1",
        "recipe": done.name,
        "paper": done.recipe.paper,
        "table": done.recipe.table,
        "title": done.recipe.title,
        "scale": done.scale,
        "scale_text": scale_text(done),
        "small": changes(done.recipe) if done.scale == "small" else {},
        "overrides": list(done.overrides),
        "only": {axis: list(labels) for axis, labels in done.only.items()},
        "seeds": done.seeds,
        "left_out": done.left_out,
        "rows": rows,
        "remarks": remarks(done),
    }


def as_markdown(done: Reproduction) -> str:
    head = header(done)
    table = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body(done))]
    notes = "\n".join(f"- {note}" for note in remarks(done))
    return f"# {title(done)}\n\n{scale_text(done)}\n\n" + "\n".join(table) + f"\n\n{notes}\n"


def _as_csv(done: Reproduction) -> str:
    """Return CSV with one line per value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    axes = [axis.name for axis in done.recipe.axes]
    writer.writerow([*axes, "column", "paper", "ours", "spread", "seeds", "difference", "problem", "scale"])
    for line in lines(done):
        numbers = [line.ours, line.spread, line.seeds, line.difference]
        shown_numbers = ["" if n is None else n for n in numbers]
        theirs = "" if line.theirs is None else line.theirs
        writer.writerow([*line.labels, line.column, theirs, *shown_numbers, line.why, done.scale])
    return text.getvalue()


def digits(value: float) -> str:
    """Return a number with four significant digits, as in the papers."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def signed(value: float) -> str:
    """Return a difference with its sign."""
    return f"{'+' if value >= 0 else '-'}{digits(abs(value))}"


def _line(outcome: RowOutcome, i: int, label: str) -> Line:
    values = outcome.values[i] if outcome.values else ()
    spread = stdev(values) if len(values) > 1 else None
    why = outcome.problem or (outcome.problems[i] if outcome.problems else "")
    theirs = outcome.row.published[i]
    return Line(outcome.row.labels, label, theirs, outcome.mean(i), spread, len(values), outcome.difference(i), why)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
