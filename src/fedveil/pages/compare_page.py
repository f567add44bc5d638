"""The page of a comparison: the values that its charts, tables and sentences show."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedveil.pages.verification_section import outcome_values
from fedveil.pages.web_page import render
from fedveil.run.run_directory import present, write_text
from fedveil.studies.compare.comparison_rows import Row
from fedveil.studies.compare.comparison_text import claimed, count, guarantee, mean_and_sd, proven, verdict
from fedveil.tasks.column import Column
from fedveil.verify import Verification

if TYPE_CHECKING:
    from fedveil.studies.compare.comparison import Comparison


def write_page(
    found: Comparison, path: Path, runs: Path | None = None, checked: Mapping[Path, Verification] | None = None
) -> Path:
    """Write the page and return its path.

    Args:
        runs: the report of the runs, to link to. checked: what is found by verifying them.
    """
    more = {"runs": runs.name if runs is not None else None, "verification": outcome_values(checked or {})}
    write_text(path, render("compare.js", page_values(found) | more))
    return path


def page_values(found: Comparison) -> dict[str, Any]:
    """Everything that the page shows, as values for strict JSON."""
    blocks = {guarantee(*block, found.by): [r for r in rows if r.values] for block, rows in found.blocks.items()}
    seeds = f"{len(found.seeds)} seed{'s' * (len(found.seeds) != 1)}"
    kind = "Bands" if _curved(found) else "Bars"
    spread = (
        f"{kind}: 95 % confidence interval of the mean (Student's t, n = {len(found.seeds)} seeds). Small points: single seeds."
    )
    return {
        "title": f"Methods compared on {found.config.data.name}",
        "lead": f"{_capital(found.what)}, {seeds}, at equal {found.by} epsilon.",
        "headlines": headlines(found),
        "charts": charts(found),
        "note": spread if len(found.seeds) > 1 else "One seed: no confidence interval.",
        "columns": list(cells(found.rows[0], "")),
        "tables": [
            {"title": _capital(title), "rows": [_line(row, found.names[row.method]) for row in rows]}
            for title, rows in blocks.items()
            if rows
        ],
        "problems": [f"{line} ({', '.join(where)})" for line, where in found.problems.items()],
        "reading": found.sentences,
        "assumptions": asdict(found.assumptions),
        "command": _command(found),
        "configuration": tomli_w.dumps(present(found.config.model_dump(mode="json"))),
    }


def headlines(found: Comparison) -> list[str]:
    """For each guarantee the best method, and what the next best is told apart by."""
    lines = []
    for (partition, at), block in found.blocks.items():
        ranked = [row for row in block if row.complete]
        if not ranked:
            continue
        best, *others = ranked
        text = f"{_capital(guarantee(partition, at, found.by))}: {found.names[best.method]} {mean_and_sd(best)}"
        if others:
            text += f"; next {found.names[others[0].method]} {mean_and_sd(others[0])} ({verdict(others[0])})"
        lines.append(f"{text}.")
    return lines


# --- charts -------------------------------------------------------------------------------------------------------------


def charts(found: Comparison) -> list[dict[str, Any]]:
    """One chart a partition: the methods over epsilon, or beside each other where there is one epsilon only."""
    rows = [row for row in found.rows if row.values]
    partitions = list(dict.fromkeys(row.partition for row in rows))
    label = _label(found.column)
    draw = _over_epsilon if _curved(found) else _beside_each_other
    return [
        {
            "title": partition or _capital(label),
            "y": {"label": label},
            "height": 400 if len(partitions) == 1 else 300,
            **draw(found, [row for row in rows if row.partition == partition]),
        }
        for partition in partitions
    ]


def _label(column: Column) -> str:
    return f"{column.phrase} (%)" if column.share else f"{column.phrase}{' (lower is better)' * (column.better == 'lower')}"


def _epsilons(found: Comparison) -> list[float]:
    return sorted({row.epsilon for row in found.rows if row.values and math.isfinite(row.epsilon)})


def _curved(found: Comparison) -> bool:
    return len(_epsilons(found)) > 1


def _over_epsilon(found: Comparison, rows: list[Row]) -> dict[str, Any]:
    """A line a method; runs without noise are level lines."""
    epsilons = _epsilons(found)
    room = (epsilons[-1] / epsilons[0]) ** 0.06
    ends = {"min": epsilons[0] / room, "max": epsilons[-1] * room, "snap": False}
    series: list[dict[str, Any]] = []
    for colour, (method, name) in enumerate(found.names.items()):
        mine = sorted((r for r in rows if r.method == method), key=lambda r: r.epsilon)
        if curve := [r for r in mine if math.isfinite(r.epsilon)]:
            series.append({"name": name, "color": colour, **_points([(r.epsilon, r) for r in curve])})
        for free in (r for r in mine if math.isinf(r.epsilon)):
            level = [[e, free.column.factor * free.mean] for e in (epsilons[0], epsilons[-1])]
            series.append({"name": f"{name}, no noise", "color": colour, "points": level, "dashed": True})
    return {"x": {"label": f"{found.by} ε", "scale": "log", "ticks": epsilons, **ends}, "series": series}


def _beside_each_other(found: Comparison, rows: list[Row]) -> dict[str, Any]:
    """A marker a method, best first, those without noise last."""
    ordered = sorted(rows, key=lambda r: (math.isinf(r.epsilon), -r.column.sign * r.mean))
    colours = {method: colour for colour, method in enumerate(found.names)}
    series = [
        {
            "name": f"{place}. {found.names[row.method]}{', no noise' * math.isinf(row.epsilon)}",
            "color": colours[row.method],
            "kind": "scatter",
            **_points([(str(place), row)]),
        }
        for place, row in enumerate(ordered, 1)
    ]
    return {"x": {"label": "method, from the best mean to the worst", "scale": "band"}, "series": series}


def _points(places: list[tuple[Any, Row]]) -> dict[str, Any]:
    factor = places[0][1].column.factor
    return {
        "points": [[x, factor * row.mean] for x, row in places],
        "band": [[x, *(factor * edge for edge in row.around)] for x, row in places if len(row.values) > 1],
        "dots": [[x, factor * value] for x, row in places if len(row.values) > 1 for value in row.values.values()],
    }


# --- text ---------------------------------------------------------------------------------------------------------------


def cells(row: Row, name: str) -> dict[str, str]:
    """One row of a table: the text of each column. name: of the method, short."""
    return {
        "Rank": str(row.rank or "–"),
        "Method": name,
        "Mean ± sd": mean_and_sd(row),
        "Seeds": count(row),
        "95 % interval": "–" if math.isnan(row.interval) else f"± {row.column.text(row.interval)}",
        "Claimed ε": claimed(row),
        "Proven ε": proven(row),
        "Against the best": verdict(row),
    }


def _line(row: Row, name: str) -> dict[str, Any]:
    """A row of the page's tables: texts with their small print."""
    options = row.method.partition(":")[2].replace(":", ", ")
    claim = row.statement.claimed if row.statement else None
    small = {
        "Method": options if options not in name else "",
        "Claimed ε": f"{claim.scope}, delta = {claim.delta:.3g}" if claim else "",
    }
    return {"best": row.rank == 1, "cells": [[text, small.get(column, "")] for column, text in cells(row, name).items()]}


def _command(found: Comparison) -> str:
    command = ["fedveil", "compare", str(found.path / "base.toml"), "--methods", ",".join(found.methods)]
    command += ["--epsilon", ",".join(f"{e:g}" for e in found.epsilons), "--seeds", str(len(found.seeds)), "--by", found.by]
    command += ["--metric", found.column.name, *(["--partition", ",".join(found.partitions)] if found.partitions else [])]
    return shlex.join([*command, "--out", f"{found.path}-again"])


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
