"""What a comparison leaves behind: tables for people and for programs, pictures, and a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedveil.pages.compare_page import cells, write_page
from fedveil.pages.figures.compare_figure import plot_comparison
from fedveil.pages.report import MOST_RUNS, write_report
from fedveil.pages.verification_section import outcome_lines
from fedveil.run.run_directory import write_config, write_json, write_table, write_text
from fedveil.run.verification import verification
from fedveil.statement.statement_markdown import markdown_section
from fedveil.studies.compare.comparison import Comparison
from fedveil.studies.compare.comparison_rows import Row
from fedveil.studies.compare.comparison_text import guarantee
from fedveil.verify import Verification

FORMAT = "fedveil-compare/1"


def check_runs(found: Comparison) -> dict[Path, Verification]:
    """What is found by verifying the runs of a comparison, by their paths."""
    return {state.path: verification(state.path) for row in found.rows for state in row.states if state.rounds}


def write_files(found: Comparison, checked: Mapping[Path, Verification]) -> dict[str, Path]:
    """Write tables, pictures and pages into the comparison's directory and return their paths by what they are."""
    folder = found.path
    if not found.column.public:
        folder.chmod(0o700)  # every table here shows figures of private data
    write_config(folder / "base.toml", found.config.resolved())
    write_table(folder / "compare.csv", [row_values(row) for row in found.rows])
    write_table(folder / "cells.csv", cell_values(found, checked))
    write_json(folder / "compare.json", values(found, checked))
    paths = {"table": folder / "compare.csv", "cells": folder / "cells.csv", "json": folder / "compare.json"}
    if any(row.values for row in found.rows):
        paths["picture"] = plot_comparison(found, folder / "compare.png")
        paths["svg"] = plot_comparison(found, folder / "compare.svg")
    if 1 < len(checked) <= MOST_RUNS:
        paths["runs"] = write_report(list(checked), folder / "runs.html", checked=checked)
    write_text(folder / "compare.md", markdown(found, checked))
    page = write_page(found, folder / "compare.html", paths.get("runs"), checked)
    return {"page": page, "markdown": folder / "compare.md", **paths}


def row_values(row: Row) -> dict[str, Any]:
    """One row as plain values; what is not known is None."""
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
        "p_paired_t": test.t if test else None,
        "p_holm": test.holm if test else None,
        "p_signed_rank": test.wilcoxon if test else None,
        "problems": "; ".join(row.problems),
    }


def cell_values(found: Comparison, checked: Mapping[Path, Verification]) -> list[dict[str, Any]]:
    """One line a run: the sample itself."""
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
    """The whole comparison as plain values (`compare.json`)."""
    return {
        "format": FORMAT,
        "by": found.by,
        "metric": found.column.name,
        "seeds": list(found.seeds),
        "notes": found.sentences,
        "assumptions": [asdict(item) for item in found.assumptions.items],
        "rows": [row_values(row) | {"problems": list(row.problems)} for row in found.rows],
        "cells": cell_values(found, checked),
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
