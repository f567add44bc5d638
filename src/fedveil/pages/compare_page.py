"""The page of a comparison: one self-contained HTML file, its tables readable without JavaScript."""

from __future__ import annotations

import base64
import json
import math
import shlex
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedveil.pages.explorer import inline, web_file
from fedveil.run.run_directory import plain, present, write_text
from fedveil.studies.compare.comparison_rows import Row
from fedveil.studies.compare.comparison_text import (
    claimed,
    count,
    guarantee,
    mean_and_sd,
    percent,
    proven,
    verdict,
)

if TYPE_CHECKING:
    from fedveil.studies.compare.comparison import Comparison

COLUMNS = ("Rank", "Method", "Mean ± sd", "95 % interval", "Seeds", "Claimed ε", "Proven ε", "Against the best")


def write_page(found: Comparison, path: Path, picture: Path | None = None, runs: Path | None = None) -> Path:
    """Write the page and return its path.

    Args:
        picture: shown where there is one epsilon only, and so no curve. runs: the report of the runs, to link to.
    """
    names = found.names
    charts = _charts(found, names)
    sections = {
        "Result": [*(_p(text, "sentence") for text in headlines(found, names)), _drawn(charts, picture, len(found.seeds))],
        "Tables": [_table(guarantee(*block, found.by), rows, names, i) for i, (block, rows) in enumerate(found.blocks.items())],
        "Not compared": [_list(f"{line} ({', '.join(where)})" for line, where in found.problems.items())],
        "How to read it": [_p(text, "words") for text in found.sentences],
        "How to repeat it": _repeat(found, runs),
    }
    kept = {title: "".join(parts) for title, parts in sections.items() if any(parts)}
    ids = {title: title.lower().replace(" ", "-") for title in kept}
    seeds = f"{len(found.seeds)} seed{'s' * (len(found.seeds) != 1)}"
    data = json.dumps(plain({"charts": charts}), allow_nan=False, ensure_ascii=False)
    fill = {
        "title": escape(f"Methods compared on {found.config.data.name}"),
        "lead": escape(f"{found.what[0].upper()}{found.what[1:]}, {seeds}, at equal {found.by} epsilon."),
        "jump": "".join(f'<li><a href="#{ids[t]}">{t}</a></li>' for t in kept),
        "sections": "".join(
            f'<section id="{ids[t]}" aria-labelledby="{ids[t]}-title"><h2 id="{ids[t]}-title">{t}</h2>{body}</section>'
            for t, body in kept.items()
        ),
        "data": data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
    }
    page = inline(web_file("compare.html"))
    for key in ("title", "lead", "jump", "data", "sections"):
        page = page.replace(f"[[{key}]]", fill[key])
    write_text(path, page)
    return path


def headlines(found: Comparison, names: Mapping[str, str]) -> list[str]:
    """For each guarantee the best method, and what the next best is told apart by."""
    said = []
    for (partition, at), block in found.blocks.items():
        ranked = [row for row in block if row.complete]
        if not ranked:
            continue
        best, *others = ranked
        where = guarantee(partition, at, found.by)
        text = f"{where[0].upper()}{where[1:]}: {names[best.method]} {mean_and_sd(best)}"
        if others:
            told = verdict(others[0]).replace(" = ", "\u00a0=\u00a0")
            text += f"; next {names[others[0].method]} {mean_and_sd(others[0])} ({told})"
        said.append(f"{text}.")
    return said


# --- charts -------------------------------------------------------------------------------------------------------------


def _charts(found: Comparison, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """One chart a partition, as values of the page's charts; none over a single epsilon."""
    rows = [row for row in found.rows if row.values]
    finite = sorted({row.epsilon for row in rows if math.isfinite(row.epsilon)})
    if len(finite) < 2:
        return []
    partitions = list(dict.fromkeys(row.partition for row in rows))
    room = (finite[-1] / finite[0]) ** 0.06
    x = {
        "label": f"{found.by} ε",
        "scale": "log",
        "ticks": finite,
        "min": finite[0] / room,
        "max": finite[-1] * room,
        "snap": False,
    }
    label = f"{found.metric.replace('_', ' ')} (%)"
    return [
        {
            "title": partition or label[0].upper() + label[1:],
            "x": x,
            "y": {"label": label},
            "height": 400 if len(partitions) == 1 else 300,
            "series": [
                series
                for i, method in enumerate(names)
                for series in _series(
                    [r for r in rows if (r.method, r.partition) == (method, partition)], names[method], i, finite
                )
            ],
        }
        for partition in partitions
    ]


def _series(rows: list[Row], name: str, colour: int, epsilons: list[float]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    mine = sorted((r for r in rows if math.isfinite(r.epsilon)), key=lambda r: r.epsilon)
    if mine:
        points = [[r.epsilon, 100 * r.mean] for r in mine]
        band = [[r.epsilon, *(100 * edge for edge in r.around)] for r in mine]
        made.append({"name": name, "color": colour, "points": points, "band": band})
    for row in (r for r in rows if math.isinf(r.epsilon)):
        level = [[e, 100 * row.mean] for e in (epsilons[0], epsilons[-1])]
        made.append({"name": f"{name}, no noise", "color": colour, "points": level, "dashed": True})
    return made


def _drawn(charts: list[dict[str, Any]], picture: Path | None, seeds: int) -> str:
    bands = f"Bands: 95 % confidence interval of the mean (Student's t, n = {seeds} seeds)."
    note = f'<p class="scope">{bands if seeds > 1 else "One seed: no confidence interval."}</p>'
    if charts:
        wide = ' style="grid-template-columns: minmax(0, 1fr)"' if len(charts) == 1 else ""
        cells = "".join(f'<div class="chart-cell"><div id="chart-{i}"></div>{note}</div>' for i in range(len(charts)))
        return f'<div class="charts"{wide}>{cells}</div>'
    if picture is None:
        return ""
    data = base64.b64encode(picture.read_bytes()).decode()
    alt = "The methods below each other: mean, its 95 % confidence interval and single seeds"
    return f'<div class="pictures"><figure><img alt="{alt}" src="data:image/png;base64,{data}"></figure></div>'


# --- text ---------------------------------------------------------------------------------------------------------------


def _table(title: str, rows: list[Row], names: Mapping[str, str], index: int) -> str:
    lines = "".join(_line(row, names[row.method]) for row in rows if row.values)
    if not lines:
        return ""
    head = "".join(f'<th scope="col">{c}</th>' for c in COLUMNS)
    heading = f'<h3 id="table-{index}">{escape(title[0].upper() + title[1:])}</h3>'
    body = f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody>"
    return f'{heading}<div class="scroll"><table aria-labelledby="table-{index}">{body}</table></div>'


def _line(row: Row, name: str) -> str:
    around = "–" if math.isnan(row.interval) else f"± {percent(row.interval)}"
    given = row.method.partition(":")[2].replace(":", ", ")
    options = f'<br><small style="font-weight: 400">{escape(given)}</small>' if given and given not in name else ""
    claim = row.statement.claimed if row.statement else None
    scope = f"<small>{escape(f'{claim.scope}, delta = {claim.delta:.3g}')}</small>" if claim else ""
    cells = {
        "Mean ± sd": mean_and_sd(row),
        "95 % interval": around,
        "Seeds": count(row),
    }
    text = "".join(f'<td class="number" data-label="{label}">{escape(value)}</td>' for label, value in cells.items())
    claims = f'<td data-label="Claimed ε">{escape(claimed(row))}{scope}</td>'
    proofs = f'<td class="number" data-label="Proven ε">{escape(proven(row))}</td>'
    told = f'<td class="number" data-label="Against the best">{escape(verdict(row))}</td>'
    own = ' class="own"' if row.rank == 1 else ""
    first = f'<td class="number" data-label="Rank">{row.rank or "–"}</td><th scope="row">{escape(name)}{options}</th>'
    return f"<tr{own}>{first}{text}{claims}{proofs}{told}</tr>"


def _repeat(found: Comparison, runs: Path | None) -> list[str]:
    command = ["fedveil", "compare", str(found.path / "base.toml"), "--methods", ",".join(found.methods)]
    command += ["--epsilon", ",".join(f"{e:g}" for e in found.epsilons), "--seeds", str(len(found.seeds)), "--by", found.by]
    command += ["--metric", found.metric, *(["--partition", ",".join(found.partitions)] if found.partitions else [])]
    text = tomli_w.dumps(present(found.config.model_dump(mode="json")))
    link = f'<p><a href="{escape(runs.name)}">Every run: curves, privacy, settings</a></p>' if runs is not None else ""
    return [
        f'<pre class="command">{escape(shlex.join([*command, "--out", f"{found.path}-again"]))}</pre>',
        link,
        f"<details><summary>What all methods share</summary><pre>{escape(text)}</pre></details>",
    ]


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="list">{items}</ul>' if items else ""


def _p(text: str, kind: str) -> str:
    return f'<p class="{kind}">{escape(text)}</p>'
