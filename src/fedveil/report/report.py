"""The report of one or several runs: one self-contained HTML page."""

from __future__ import annotations

import base64
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.accounting.types import joined
from fedveil.errors import ConfigError
from fedveil.experiment.recorded_run import RunData, experiment_of, group_names, grouped, read_run
from fedveil.experiment.verification import verification
from fedveil.report.privacy_section import card_of, outcome_values, privacy_values, spent_values
from fedveil.report.web_page import render, write_html
from fedveil.statement.glossary import TERMS
from fedveil.studies.statistics import constant, curve, last, layers, spread, thinned
from fedveil.tasks.task import Column
from fedveil.verify import Verification

Values = dict[str, Any]
NOISE = {"Expected noise, added up over the rounds": ("cumulative_noise_norm",)}
_COST = ("participants", "failed", "uplink_bytes", "seconds")


def _column_values(runs: Sequence[RunData]) -> Values:
    """Return the descriptions of the columns of runs of one configuration: those per round, and those by layer."""
    names = dict.fromkeys(name for run in runs for name in run.columns)
    layered = dict.fromkeys(name for row in runs[0].layers[:1] for name in row if name not in ("round", "layer"))
    known = runs[0].declared
    return {
        "charts": dict(known.together.values()) | NOISE,
        "columns": {name: _words(known[name]) for name in names},
        "layer_columns": {name: _words(known.by_layer(name)) for name in layered},
    }


def chart_values(groups: Sequence[Values]) -> Values:
    """Return the charts of each section, from the columns of the page's groups of runs, and the note on private figures."""
    charts = {title: columns for g in groups for title, columns in g["charts"].items()}
    drawn = [name for columns in charts.values() for name in columns]
    shown = (*drawn, *_COST, "epsilon_spent")  # the last one in the part on privacy, from the ledger
    own = dict.fromkeys(name for g in groups for name in g["columns"] if name not in shown)
    if len(groups) == 1:
        training = [_chart(groups, names, title) for title, names in charts.items()]
    else:
        training = [chart for name in drawn for chart in _apart(groups, name)]
    return {
        "training": [chart for chart in training if chart["series"]],
        "method": [chart for name in own for chart in _apart(groups, name)],
        "cost": [chart for name in _COST for chart in _apart(groups, name)],
        "private": _private(groups),
    }


def _apart(groups: Sequence[Values], name: str) -> Iterable[Values]:
    """Return one chart for each meaning of a column, since methods may use one name for different figures."""
    meanings = [g["columns"][name] for g in groups if name in g["columns"]]
    for words in [w for i, w in enumerate(meanings) if w not in meanings[:i]]:
        yield _chart(groups, (name,), words["title"], words)


def _chart(groups: Sequence[Values], names: Sequence[str], title: str, meaning: Values | None = None) -> Values:
    """Return a chart's texts and series: for each group, its columns, or only those with the requested meaning."""
    found = [(i, n, g["columns"][n]) for i, g in enumerate(groups) for n in names if n in g["columns"]]
    kept = [(i, n, words) for i, n, words in found if meaning is None or words == meaning]
    series = [{"group": i, "column": n, "name": groups[i]["name"] if len(groups) > 1 else w["title"]} for i, n, w in kept]
    first: Values = kept[0][2] if kept else {}
    label = _axis_label(title if len(names) > 1 else first["title"], first["axis"]) if first else ""
    return {"title": title, "axis": label, "factor": first.get("factor"), "limits": first.get("limits"), "series": series}


def _axis_label(title: str, unit: str) -> str:
    """Return the label of an axis: the figure that it shows, and its unit where the figure does not name it."""
    figure = title if title[1:2].isupper() or title[1:2].isdigit() else title[:1].lower() + title[1:]
    plain = unit.removesuffix(" (%)")
    if plain.lower() in figure.lower():
        return f"{figure} (%)" if unit != plain else figure
    return unit if figure.lower() in plain.lower() else f"{figure}: {unit}"


def _private(groups: Sequence[Values]) -> str:
    """Say which figures of the page are computed from private data without noise; empty if none are."""
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
    return {
        "title": column.words,
        "axis": column.axis,
        "share": column.percent,
        "factor": column.factor,
        "limits": column.limits if column.better is not None else None,
        "private": "" if column.public else column.phrase,
    }


def attack_values(runs: list[RunData], room: list[int]) -> list[Values]:
    """Return name, figures and assumptions of each attack, and its picture as long as there is room.

    room: bytes left for pictures, in a list of one, which is counted down.
    """
    stems = {p.with_suffix("") for run in runs for p in run.path.glob("attack*") if p.suffix in (".png", ".json")}
    return [_attack(stem, room) for stem in sorted(stems)]


def _attack(stem: Path, room: list[int]) -> Values:
    values: Values = {"name": stem.name.removeprefix("attack-")}
    record, picture = stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".png")
    if record.is_file():
        values |= _record(record)
    if picture.is_file():
        values |= _picture(picture, room)
    return values


def _record(path: Path) -> Values:
    """Return the headline and the assumptions that `fedveil attack` wrote; for another file, its single figures."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {"figures": [["not readable", path.name]], "assumptions": []}
    if isinstance(value, dict) and isinstance(value.get("figures"), dict):
        return {"figures": [[k, str(v)] for k, v in value["figures"].items()], "assumptions": value.get("assumptions", [])}
    return {"figures": [[k, f"{v:.4g}" if isinstance(v, float) else str(v)] for k, v in _leaves(value)][:60], "assumptions": []}


def _picture(path: Path, room: list[int]) -> Values:
    data = path.read_bytes()
    if len(data) > room[0]:
        return {"too_large": str(path)}
    room[0] -= len(data)
    return {"picture": f"data:image/png;base64,{base64.b64encode(data).decode()}"}


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in _leaves(v, f"{prefix}.{k}" if prefix else str(k))]
    return [] if isinstance(value, list) or value is None else [(prefix or "value", value)]


_PICTURE_BYTES = 2_500_000
"""Pictures beyond this total are named, not shown, so that the page stays small."""
COLUMNS = 240
"""The partition plot has so many columns at most; neighbours are averaged above that."""


def page_values(
    runs: Sequence[RunData],
    progress: Callable[[int, int], None] | None = None,
    checked: Mapping[Path, Verification] | None = None,
) -> dict[str, Any]:
    """Return everything that the page shows, as values for strict JSON.

    Args:
        checked: what is found by verifying the runs, by their paths.
    """
    groups = grouped(runs)
    names = group_names(groups)
    room = [_PICTURE_BYTES]
    shown = [_group(name, group, room, progress, checked) for name, group in zip(names, groups, strict=True)]
    promises = list(dict.fromkeys(g["scope"] for g in shown))
    shown.sort(key=lambda g: (promises.index(g["scope"]), g["proven_value"] is None, g["proven_value"] or 0.0, _rank(g)))
    charts = chart_values(shown)
    return {
        "runs": len(runs),
        "groups": shown,
        "metrics": _metrics(shown),
        "charts": charts,
        "promises": [
            {"promise": scope or "no privacy statement", "groups": [i for i, g in enumerate(shown) if g["scope"] == scope]}
            for scope in promises
        ],
        "verification": outcome_values(checked or {}),
        "glossary": TERMS,
    }


def _rank(group: Values) -> float:
    order: float | None = group["cards"]["score"]["order"]
    return order or 0.0


def _metrics(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the main metrics of the page's groups, each with the positions of the groups that have it."""
    mains = [group["main"] for group in groups]
    different = [main for i, main in enumerate(mains) if main not in mains[:i]]
    return [{**main, "groups": [i for i, other in enumerate(mains) if other == main]} for main in different]


def _group(
    name: str,
    runs: list[RunData],
    room: list[int],
    progress: Callable[[int, int], None] | None,
    checked: Mapping[Path, Verification] | None,
) -> dict[str, Any]:
    first, privacy = runs[0], privacy_values(runs)
    main = first.declared.main
    score = spread([last(run.history, main.name) for run in runs])
    columns, seconds = list(dict.fromkeys(c for run in runs for c in run.columns)), [p for r in runs for p in r.points("seconds")]
    curves = {c: curve([[(r["round"], r.get(c)) for r in run.history] for run in runs]) for c in columns}
    level = [c for c in columns if constant(runs, c) or len(curves[c]["points"]) < 2]
    return {
        "name": name,
        "data": _data(first),
        "seeds": [run.seed for run in runs],
        "rounds": [len(run.history) for run in runs],
        "planned": first.config.get("training", {}).get("rounds"),
        "warnings": list(dict.fromkeys(text for run in runs for text in run.warnings)),
        "ended": [run.summary.get("ended", "unfinished") for run in runs],
        "seconds": sum(t for _, t in seconds) / len(runs) if seconds else None,
        "score": None if score is None else main.factor * score["mean"],
        "main": {
            "title": main.words,
            "phrase": main.phrase,
            "axis": main.axis,
            "share": main.percent,
            "limits": main.limits,
            "lower": main.sign < 0,
        },
        "curves": {c: v for c, v in curves.items() if c not in level},
        "constant": {c: last(first.history, c) for c in level},
        "layers": layers(runs),
        **_column_values(runs),
        "spent": spent_values(runs, progress, checked),
        "clients": _clients(runs),
        "partition": _partition(first.partition),
        "failures": _failures(runs),
        "attacks": attack_values(runs, room),
        "configuration": first.config_text,
        "settings": {k: v for k, v in experiment_of(first).items() if not isinstance(v, dict)},
        "versions": first.versions,
        "seeded": bool(first.config.get("run", {}).get("seeded_noise")),
        "handed_over": any(run.handed_over for run in runs),
        "commands": [_command(run) for run in runs if not run.handed_over],
        **privacy,
        "cards": {"score": _score(runs, score), **privacy["cards"]},
        "sentence": [*_reached(name, runs, score), *privacy["promise"]],
    }


def _reached(name: str, runs: list[RunData], score: dict[str, float] | None) -> list[tuple[str, bool]]:
    """Return the method and its score in one sentence, as pieces of text and whether they are bold."""
    rounds, main = max(len(run.history) for run in runs), runs[0].declared.main
    end = f" on {_data(runs[0])} in {rounds} round{'s' * (rounds != 1)}. "
    if main.percent:
        return [(name, True), (" reached ", False), (_mean(main, score), True), (f" {main.phrase}{end}", False)]
    return [(name, True), (f" reached a {main.phrase} of ", False), (_mean(main, score), True), (end, False)]


def _score(runs: list[RunData], score: dict[str, float] | None) -> dict[str, Any]:
    declared = runs[0].declared
    main = declared.main
    among = ""
    if score and score["n"] > 1:
        among = f"{main.text(score['min'])} to {main.text(score['max'])} over {score['n']} seeds"
    order = -main.sign * score["mean"] if score else None
    beside = [
        f"{words}: {_mean(main, personal)}"
        for words, column in (
            ("personal models", declared.personal),
            ("personal models on the test set", declared.personal_on_test_set),
        )
        if (personal := spread([last(run.history, column.name) for run in runs]))
    ]
    noisy = [declared.noisy_text(run.history) for run in runs]
    beside += [f"on clients' own examples, with noise: {text}" for text in noisy if text]
    return card_of(main.words, _mean(main, score), order, among, "; ".join(beside))


def _mean(column: Column, score: dict[str, float] | None) -> str:
    return column.text(score["mean"]) if score else "not measured"


def _data(run: RunData) -> str:
    return str(run.config.get("data", {}).get("name", ""))


# --- clients and data ---------------------------------------------------------------------------------------------------


def _clients(runs: list[RunData]) -> dict[str, Any] | None:
    """Return the clients' scores in the last evaluated round, and their worst tenth, median and best tenth over the rounds."""
    main = runs[0].declared.main
    header = main.name.removeprefix("test_")
    rounds = sorted({int(r["round"]) for run in runs for r in run.clients if isinstance(r.get(header), float)})
    if not rounds:
        return None
    at: dict[int, list[float]] = {t: [] for t in thinned(rounds)}
    own: list[float] = []
    for row in (row for run in runs for row in run.clients):
        t = int(row["round"])
        if t in at and isinstance(row.get(header), float):
            at[t].append(main.factor * row[header])
        if t == rounds[-1] and isinstance(row.get("personal"), float):
            own.append(main.factor * row["personal"])
    worst_first = (0.1, 0.5, 0.9)[:: main.sign]
    tenths = {t: np.quantile(v, worst_first).tolist() for t, v in at.items()}
    shown = [*tenths[rounds[-1]], float(np.std(at[rounds[-1]]))]
    return {
        "final": sorted(at[rounds[-1]])[:20000],
        "personal": sorted(own)[:20000],
        "points": [[t + 1, q[1]] for t, q in tenths.items()],
        "band": [[t + 1, min(q), max(q)] for t, q in tenths.items()],
        "worst": [[t + 1, q[0]] for t, q in tenths.items()],
        "spread": [main.text(value / main.factor) for value in shown],
    }


def _partition(stored: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return columns of label counts for the picture: a few clients in order, or many sorted by their most frequent label."""
    if not stored or not stored["counts"]:
        return None
    counts = np.array(stored["counts"], dtype=np.float64)
    sizes = counts.sum(axis=1)
    listed = np.array(stored["listed"])
    if len(counts) > 60:
        shares = counts / np.maximum(sizes, 1)[:, None]
        order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1), sizes == 0))
        counts, listed = counts[order], listed[order]
    blocks = np.array_split(np.arange(len(counts)), min(COLUMNS, len(counts)))
    return {
        "kind": stored["kind"],
        "sha256": stored["sha256"],
        "clients": stored["clients"],
        "listed": len(counts),
        "columns": [[round(v, 2) for v in counts[b].mean(axis=0).tolist()] for b in blocks],
        "names": [f"client {listed[b[0]]}" if len(b) == 1 else f"{len(b)} clients, mean" for b in blocks],
        "ordered": len(counts) > 60,
        "sizes": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
    }


def _failures(runs: list[RunData]) -> dict[str, Any]:
    reasons = Counter(str(row["failure"]) for run in runs for row in run.failures)
    rounds = {r: sorted({int(f["round"]) + 1 for run in runs for f in run.failures if f["failure"] == r}) for r in reasons}
    skipped = [f"round {int(row['round']) + 1}: {row['skipped']}" for run in runs for row in run.history if row.get("skipped")]
    listed = [
        {"reason": r, "count": n, "rounds": rounds[r][:12], "more": len(rounds[r]) > 12} for r, n in reasons.most_common(20)
    ]
    return {"reasons": listed, "skipped": skipped[:20], "total": sum(reasons.values())}


# --- how to repeat it --------------------------------------------------------------------------------------------------


def _command(run: RunData) -> str:
    return shlex.join(["fedveil", "run", str(run.path / "config.toml"), "--out", f"{run.path}-again"])


MOST_RUNS = 60


def write_report(
    runs: Sequence[str | Path],
    out: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    checked: Mapping[Path, Verification] | None = None,
) -> Path:
    """Write the report of these run directories and return its path.

    Args:
        runs: run directories; those that differ in their seed only are shown as one, with their mean and range.
        out: the HTML file; by default `report.html` in the run directory, or in the working directory for several runs.
        progress: called with the rows of a ledger that are verified, and all of it.
        checked: what is found by verifying them, where that is known already.

    Raises:
        ConfigError: no run, more than 60, the same one twice, one that cannot be read, or a page that cannot be written.
    """
    paths = [Path(run) for run in runs]
    if not 1 <= len(paths) <= MOST_RUNS:
        raise ConfigError(f"a report shows 1 to {MOST_RUNS} runs, got {len(paths)}")
    if len({p.resolve() for p in paths}) < len(paths):
        raise ConfigError(f"a run is given twice: {', '.join(map(str, paths))}; give each run directory once")
    target = Path(out) if out is not None else (paths[0] / "report.html" if len(paths) == 1 else Path("report.html"))
    shown = [read_run(path) for path in paths]
    checked = checked or {path: verification(path, on_step=progress) for path in paths}
    values = page_values(shown, progress, checked)
    return write_html(target, render("report.js", _short(values)), "report", private=bool(values["charts"]["private"]))


def _short(value: Any) -> Any:
    """Round numbers to 6 digits, which is more than a picture shows."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list | tuple) else value
