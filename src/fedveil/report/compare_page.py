"""The output of a comparison: tables, a picture, and a page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w
from scipy.optimize import isotonic_regression

from fedveil.accounting.types import small
from fedveil.drawing import INK, MUTED, Paper, blank, quiet, save, style
from fedveil.experiment.run_directory import present, write_config, write_json, write_table, write_text
from fedveil.experiment.verification import verification
from fedveil.report.compare_paper import latex, verdict_sentences, verdicts
from fedveil.report.privacy_section import capital, outcome_lines, outcome_values
from fedveil.report.report import MOST_RUNS, write_report
from fedveil.report.web_page import render
from fedveil.statement.statement_layout import markdown_section
from fedveil.studies.compare.comparison import Comparison
from fedveil.studies.compare.comparison_rows import Row, claimed, count, guarantee, mean_and_sd, proven, verdict
from fedveil.tasks.task import Column
from fedveil.verify import Verification

if TYPE_CHECKING:
    from fedveil.drawing import Axes


def plot_comparison(found: Comparison, path: Path, paper: Paper | None = None) -> Path:
    """Draw the page's charts, one panel a partition; over one epsilon only, the methods below each other.

    Args:
        path: ends in .png, .svg or .pdf, which is the format. paper: its size and font.
    """
    names, many, seeds, drawn = found.names, _curved(found), len(found.seeds), _by_partition(found)
    margin = 0.085 * max(len(names[row.method]) for rows in drawn.values() for row in rows) + 0.9
    figure = blank((4.6 + margin) * len(drawn), 4.2 if many else 1.5 + 0.42 * len(names))
    axes = figure.subplots(1, len(drawn), squeeze=False, sharey=many)[0]
    for axis, (partition, rows) in zip(axes, drawn.items(), strict=True):
        if many:
            _lines(axis, _over_epsilon(found, rows))
        else:
            _strip(axis, rows, names)
        axis.set_title(partition, loc="left", fontsize=10.5)
    label = f"{found.column.phrase} (%)" if found.column.percent else found.column.phrase
    (axes[0].set_ylabel if many else axes[0].set_xlabel)(label)
    band = "bands" if many else "bars"
    note = f"mean of {seeds} seeds, {band}: its 95 % confidence interval (Student's t), small points: single seeds"
    figure.suptitle(note if seeds > 1 else "one seed: no spread", x=0.01, ha="left", fontsize=8.5, color=MUTED)
    if paper is not None:
        paper.fit(figure)
    return save(figure, path)


def _lines(axis: Axes, chart: dict[str, Any]) -> None:
    """Draw a line per method over epsilon; runs without noise are level lines."""
    ends: list[tuple[float, str, str]] = []
    for series in chart["series"]:
        x, y = zip(*series["points"], strict=True)
        look = style(series["color"])
        colour = look["color"]
        if series.get("dashed"):
            axis.axhline(y[0], color=colour, linewidth=1.2, linestyle=(0, (1, 2)), zorder=2)
        else:
            axis.plot(x, y, markersize=6, linewidth=1.8, markeredgecolor="white", markeredgewidth=0.8, zorder=4, **look)
        if series.get("band"):
            at, low, high = zip(*series["band"], strict=True)
            axis.fill_between(at, low, high, color=colour, alpha=0.13, linewidth=0)
            at, single = zip(*series["dots"], strict=True)
            axis.scatter(at, single, s=9, color=colour, alpha=0.55, linewidths=0, zorder=3)
        ends.append((y[-1], series["name"], colour))
    epsilons = chart["x"]["ticks"]
    reach = epsilons[-1] / epsilons[0]
    axis.set_xscale("log")
    axis.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    axis.minorticks_off()
    axis.set_xlim(epsilons[0] / reach**0.12, epsilons[-1] * reach**0.06)
    axis.set_xlabel(f"{chart['x']['label']} (log scale)")
    quiet(axis)
    _name_ends(axis, ends)


def _name_ends(axis: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each name at the right end of its line, pushed apart where they would cover each other."""
    low, high = axis.get_ylim()
    gap = (high - low) * 0.058
    ordered = sorted(ends)
    # the places at least a gap apart that are nearest to the ends (least squares)
    places = isotonic_regression([y - i * gap for i, (y, _, _) in enumerate(ordered)]).x + gap * np.arange(len(ordered))
    for place, (y, name, colour) in zip(places, ordered, strict=True):
        axis.annotate(
            name,
            xy=(1, y),
            xytext=(1.05, place),
            xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
            color=INK,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.4, "shrinkA": 2, "shrinkB": 0, "relpos": (0, 0.5)},
            annotation_clip=False,
        )


def _strip(axis: Axes, rows: list[Row], names: dict[str, str]) -> None:
    """Draw the methods in rows, best first: mean, confidence interval, and each seed."""
    ordered = sorted(rows, key=lambda r: (math.isinf(r.epsilon), -r.column.sign * r.mean))
    for place, row in enumerate(ordered):
        look = style(list(names).index(row.method)) | {"linestyle": "-"}
        factor = row.column.factor
        reach = [[factor * (row.mean - row.around[0])], [factor * (row.around[1] - row.mean)]]
        axis.errorbar(factor * row.mean, place, xerr=reach, markersize=8, capsize=3, linewidth=1.6, **look)
        single = [factor * v for v in row.values.values()]
        axis.scatter(single, [place + 0.26] * len(single), s=12, color=look["color"], alpha=0.6)
    promises = ["no noise" if math.isinf(row.epsilon) else f"ε = {row.epsilon:g}" for row in ordered]
    axis.set_yticks(range(len(ordered)), [f"{names[row.method]}, {said}" for row, said in zip(ordered, promises, strict=True)])
    axis.set_ylim(len(ordered) - 0.4, -0.6)
    quiet(axis, "x")


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
    """Return everything that the page shows, as values for strict JSON."""
    blocks = {guarantee(*block, found.by): [r for r in rows if r.values] for block, rows in found.blocks.items()}
    seeds = f"{len(found.seeds)} seed{'s' * (len(found.seeds) != 1)}"
    kind = "Bands" if _curved(found) else "Bars"
    spread = (
        f"{kind}: 95 % confidence interval of the mean (Student's t, n = {len(found.seeds)} seeds). Small points: single seeds."
    )
    return {
        "title": f"Methods compared on {found.config.data.name}",
        "lead": f"{capital(found.what)}, {seeds}, at equal {found.by} epsilon.",
        "results": _results(found),
        "charts": charts(found),
        "note": spread if len(found.seeds) > 1 else "One seed: no confidence interval.",
        "columns": list(cells(found.rows[0], "")),
        "tables": [
            {"title": capital(title), "rows": [_line(row, found.names[row.method]) for row in rows]}
            for title, rows in blocks.items()
            if rows
        ],
        "problems": [f"{line} ({', '.join(where)})" for line, where in found.problems.items()],
        "reading": found.sentences,
        "assumptions": asdict(found.assumptions),
        "command": _command(found),
        "configuration": tomli_w.dumps(present(found.config.model_dump(mode="json"))),
    }


def _results(found: Comparison) -> list[dict[str, str]]:
    """Return the verdict at each guarantee with the differences below it; without a test, the best mean."""
    if tested := verdicts(found):
        return [{"verdict": f"{verdict}.", "differences": f"{capital(differences)}."} for verdict, differences in tested]
    ranked = {block: [row for row in rows if row.complete] for block, rows in found.blocks.items()}
    return [
        {"verdict": f"{capital(guarantee(*block, found.by))}: {found.names[rows[0].method]} {mean_and_sd(rows[0])}."}
        for block, rows in ranked.items()
        if rows
    ]


# --- charts -------------------------------------------------------------------------------------------------------------


def charts(found: Comparison) -> list[dict[str, Any]]:
    """Return one chart per partition: the methods over epsilon, or side by side if there is only one epsilon."""
    label, drawn = _label(found.column), _by_partition(found)
    draw, height = _over_epsilon if _curved(found) else _beside_each_other, 400 if len(drawn) == 1 else 300
    return [
        {"title": partition or capital(label), "y": {"label": label}, "height": height, **draw(found, rows)}
        for partition, rows in drawn.items()
    ]


def _by_partition(found: Comparison) -> dict[str, list[Row]]:
    """Return the rows that have a number, by partition."""
    rows = [row for row in found.rows if row.values]
    return {one: [row for row in rows if row.partition == one] for one in dict.fromkeys(row.partition for row in rows)}


def _label(column: Column) -> str:
    return f"{column.phrase} (%)" if column.percent else f"{column.phrase}{' (lower is better)' * (column.better == 'lower')}"


def _epsilons(found: Comparison) -> list[float]:
    return sorted({row.epsilon for row in found.rows if row.values and math.isfinite(row.epsilon)})


def _curved(found: Comparison) -> bool:
    return len(_epsilons(found)) > 1


def _over_epsilon(found: Comparison, rows: list[Row]) -> dict[str, Any]:
    """Return a line for each method; runs without noise are level lines."""
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
    """Return a marker for each method, best first, those without noise last."""
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
    """Return one row of a table: the text of each column. name: short name of the method."""
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
    """Return a row of the page's tables: texts with their small print."""
    options = row.method.partition(":")[2].replace(":", ", ")
    claim = row.statement.claimed if row.statement else None
    details = {
        "Method": options if options not in name else "",
        "Claimed ε": f"{claim.scope}, delta = {small(claim.delta)}" if claim else "",
    }
    return {"best": row.rank == 1, "cells": [[text, details.get(column, "")] for column, text in cells(row, name).items()]}


def _command(found: Comparison) -> str:
    command = ["fedveil", "compare", str(found.path / "base.toml"), "--methods", ",".join(found.methods)]
    command += ["--epsilon", ",".join(f"{e:g}" for e in found.epsilons), "--seeds", str(len(found.seeds)), "--by", found.by]
    command += ["--metric", found.column.name, *(["--partition", ",".join(found.partitions)] if found.partitions else [])]
    return shlex.join([*command, "--out", f"{found.path}-again"])


FORMAT = "fedveil-compare/1"


def check_runs(found: Comparison) -> dict[Path, Verification]:
    """Verify the runs of a comparison, and return the findings by path."""
    return {state.path: verification(state.path) for row in found.rows for state in row.states if state.rounds}


def write_files(found: Comparison, checked: Mapping[Path, Verification]) -> dict[str, Path]:
    """Write tables, pictures and pages into the comparison's directory and return their paths by what they are."""
    folder = found.path
    if not found.column.public:
        folder.chmod(0o700)  # every table here shows figures of private data
    write_config(folder / "base.toml", found.config.resolved())
    write_table(folder / "compare.csv", [_row_values(row) for row in found.rows])
    write_table(folder / "cells.csv", _cell_values(found, checked))
    write_json(folder / "compare.json", values(found, checked))
    paths = {"table": folder / "compare.csv", "cells": folder / "cells.csv", "json": folder / "compare.json"}
    if any(row.values for row in found.rows):
        paths["picture"] = plot_comparison(found, folder / "compare.png")
        paths["svg"] = plot_comparison(found, folder / "compare.svg")
    if 1 < len(checked) <= MOST_RUNS:
        paths["runs"] = write_report(list(checked), folder / "runs.html", checked=checked)
    write_text(folder / "compare.md", markdown(found, checked))
    write_text(folder / "compare.tex", latex(found))
    page = write_page(found, folder / "compare.html", paths.get("runs"), checked)
    return {"page": page, "markdown": folder / "compare.md", "latex": folder / "compare.tex", **paths}


def _row_values(row: Row) -> dict[str, Any]:
    """Return one row as plain values; unknown values are None."""
    claim = row.statement.claimed if row.statement else None
    proof = row.statement.proven if row.statement else None
    test = row.against
    return {
        "partition": row.partition,
        "method": row.method,
        "epsilon": row.epsilon,
        "seeds": len(row.values),
        "seeds_asked": row.seeds,
        "mean": _known(row.mean),
        "sd": _known(row.sd),
        "ci95": _known(row.interval),
        "least": min(row.values.values(), default=None),
        "largest": max(row.values.values(), default=None),
        "rank": row.rank,
        "claimed_epsilon": claim.epsilon if claim else None,
        "claimed_delta": claim.delta if claim else None,
        "claimed_scope": str(claim.scope) if claim else None,
        "proven_epsilon": proof.epsilon if proof else None,
        "proven_delta": proof.delta if proof else None,
        "proven_scope": str(proof.scope) if proof else None,
        "best": test.best if test else None,
        "difference_to_best": test.difference if test else None,
        "pairs": test.n if test else None,
        "difference_ci95": _known(test.half) if test else None,
        "p_paired_t": test.t if test else None,
        "p_holm": test.holm if test else None,
        "p_signed_rank": test.wilcoxon if test else None,
        "problems": "; ".join(row.problems),
    }


def _cell_values(found: Comparison, checked: Mapping[Path, Verification]) -> list[dict[str, Any]]:
    """Return one line per run: the sample itself."""
    return [
        {
            "partition": row.partition,
            "method": row.method,
            "epsilon": row.epsilon,
            "seed": state.cell.config.run.seed,
            found.column.name: row.values.get(state.cell.config.run.seed),
            "state": state.state,
            "rounds": state.rounds,
            "seconds": state.seconds,
            "run": state.path.relative_to(found.path).as_posix(),
            "problem": state.error or state.ended,
            "verification": checked[state.path].outcome if state.path in checked else None,
        }
        for row in found.rows
        for state in row.states
    ]


def values(found: Comparison, checked: Mapping[Path, Verification]) -> dict[str, Any]:
    """Return the whole comparison as plain values (`compare.json`)."""
    return {
        "format": FORMAT,
        "by": found.by,
        "metric": found.column.name,
        "seeds": list(found.seeds),
        "notes": found.sentences,
        "assumptions": [asdict(item) for item in found.assumptions.items],
        "rows": [_row_values(row) | {"problems": list(row.problems)} for row in found.rows],
        "cells": _cell_values(found, checked),
    }


def markdown(found: Comparison, checked: Mapping[Path, Verification]) -> str:
    names = found.names
    lines = [
        f"# Comparison on {found.config.data.name}",
        "",
        f"Compared: {found.what}, mean ± sample standard deviation over seeds.",
        "",
    ]
    if any(row.values for row in found.rows):
        lines += ["![The compared number against epsilon](compare.png)", ""]
    lines += [f"{sentence}\n" for sentence in verdict_sentences(found)]
    for (partition, at), block in found.blocks.items():
        table = [cells(row, names[row.method]) for row in block if row.values]
        if not table:
            continue
        heading = guarantee(partition, at, found.by)
        lines += [f"## {heading[0].upper()}{heading[1:]}", ""]
        columns = [found.column.phrase if column == "Mean ± sd" else column.lower() for column in table[0]]
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [*(f"| {' | '.join(line.values())} |" for line in table), ""]
    lines += [*(f"- {line} ({', '.join(where)})" for line, where in found.problems.items()), ""]
    lines += [*(f"{line}\n" for line in outcome_lines(checked))]
    lines += [*(f"{sentence}\n" for sentence in found.sentences)]
    if found.assumptions.items:
        lines += [*(f"{part}\n" for part in markdown_section(found.assumptions))]
    if any(":" in method for method in names):
        lines += ["Options: " + "; ".join(f"`{method}`" for method in names if ":" in method), ""]
    return "\n".join(lines)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
