"""Which columns of the history a report draws, which of them in one chart, and the words of each: those of its columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fedveil.accounting.formatting import joined
from fedveil.run.recorded_run import RunData
from fedveil.tasks.column import Column

Values = dict[str, Any]
NOISE = {"Expected noise, added up over the rounds": ("cumulative_noise_norm",)}
COST = ("participants", "failed", "uplink_bytes", "seconds")


def column_values(runs: Sequence[RunData]) -> Values:
    """The words of the columns that runs of one configuration have: of those with a number a round, and of those by layer."""
    names = dict.fromkeys(name for run in runs for name in run.columns)
    layered = dict.fromkeys(name for row in runs[0].layers[:1] for name in row if name not in ("round", "layer"))
    known = runs[0].declared
    return {
        "charts": dict(known.together.values()) | NOISE,
        "columns": {name: _words(known[name]) for name in names},
        "layer_columns": {name: _words(known.by_layer(name)) for name in layered},
    }


def chart_values(groups: Sequence[Values]) -> Values:
    """The charts of each section from the columns of the page's groups of runs, and what is said of private figures."""
    charts = {title: columns for g in groups for title, columns in g["charts"].items()}
    drawn = [name for columns in charts.values() for name in columns]
    shown = (*drawn, *COST, "epsilon_spent")  # the last one in the part on privacy, from the ledger
    own = dict.fromkeys(name for g in groups for name in g["columns"] if name not in shown)
    if len(groups) == 1:
        training = [_chart(groups, names, title) for title, names in charts.items()]
    else:
        training = [chart for name in drawn for chart in _apart(groups, name)]
    return {
        "training": [chart for chart in training if chart["series"]],
        "method": [chart for name in own for chart in _apart(groups, name)],
        "cost": [chart for name in COST for chart in _apart(groups, name)],
        "private": _private(groups),
    }


def _apart(groups: Sequence[Values], name: str) -> Iterable[Values]:
    """A chart of one column for each meaning that it has: methods may give one name to different figures."""
    meanings = [g["columns"][name] for g in groups if name in g["columns"]]
    for words in [w for i, w in enumerate(meanings) if w not in meanings[:i]]:
        yield _chart(groups, (name,), words["title"], words)


def _chart(groups: Sequence[Values], names: Sequence[str], title: str, meaning: Values | None = None) -> Values:
    """A chart's words and series: of each group every column that it has, with that meaning if one is asked for."""
    found = [(i, n, g["columns"][n]) for i, g in enumerate(groups) for n in names if n in g["columns"]]
    kept = [(i, n, words) for i, n, words in found if meaning is None or words == meaning]
    series = [{"group": i, "column": n, "name": groups[i]["name"] if len(groups) > 1 else w["title"]} for i, n, w in kept]
    first: Values = kept[0][2] if kept else {}
    return {"title": title, "axis": first.get("axis"), "share": first.get("share"), "whole": first.get("whole"), "series": series}


def _private(groups: Sequence[Values]) -> str:
    """Which of the page's figures come from private data without noise."""
    drawn = (words for g in groups for name, words in g["columns"].items() if name in g["curves"])
    titles = dict.fromkeys(words["private"] for words in drawn if words["private"])
    clients = ["scores by client"] if any(g["clients"] for g in groups) else []
    partition = ["the partition"] if any(g["partition"] for g in groups) else []
    named = [*titles, *clients, *partition]
    if not named:
        return ""
    said = f"{joined(named)} {'is' if len(named) == 1 else 'are'}"
    return f"{said[0].upper()}{said[1:]} computed from private data without noise: figures of a simulation, not for publication."


def _words(column: Column) -> Values:
    scored = column.share and column.better is not None
    return {
        "title": column.words,
        "axis": column.axis,
        "share": column.share,
        "whole": scored,
        "private": "" if column.public else column.phrase,
    }
