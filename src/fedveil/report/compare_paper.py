"""A comparison for a paper: the verdict at each guarantee as a sentence, and the table in LaTeX."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from fedveil.studies.compare.comparison import Comparison
from fedveil.studies.compare.comparison_rows import Row, guarantee
from fedveil.studies.statistics import LEVEL, Against


def verdict_sentences(found: Comparison) -> list[str]:
    """Return one sentence for each guarantee at which two or more methods were tested."""
    return [f"{verdict} ({differences})." for verdict, differences in verdicts(found)]


def verdicts(found: Comparison) -> list[tuple[str, str]]:
    """Return the verdict and the differences that it rests on, for each guarantee at which two or more methods were tested."""
    both = []
    for (partition, at), block in found.blocks.items():
        ranked = [row for row in block if row.complete]
        tested = [(row, row.against) for row in ranked if row.against is not None]
        if tested:
            promise = guarantee(partition, at, found.by).replace(" = ", " ")
            where = "Without noise" if math.isinf(at) and not partition else f"At {promise}"
            differences = "; ".join(f"{found.names[row.method]} {_difference(row, test)}" for row, test in tested)
            best = found.names[ranked[0].method]
            both.append((f"{where} {_verdict(found, best, tested)}", f"against {best}: {differences}"))
    return both


def _verdict(found: Comparison, best: str, tested: Sequence[tuple[Row, Against]]) -> str:
    worse = [pair for pair in tested if pair[1].holm < LEVEL]
    unclear = [pair for pair in tested if pair[1].holm >= LEVEL]
    if not worse:
        return f"no method is shown to be better, {_p(min(test.holm for _, test in unclear))}"
    names = " and ".join(found.names[row.method] for row, _ in worse)
    text = f"{best} is better than {names}, {_p(max(test.holm for _, test in worse))}"
    if unclear:
        others = " or ".join(found.names[row.method] for row, _ in unclear)
        text += f", and is not shown to be better than {others}, {_p(min(test.holm for _, test in unclear))}"
    return text


def _difference(row: Row, test: Against) -> str:
    """Return the mean paired difference to the best method and, where there is one, its 95 % confidence interval."""
    factor, unit = (100, " points") if row.column.percent else (1, "")
    low, high = (factor * (test.difference + side * test.half) for side in (-1, 1))
    interval = "" if math.isnan(test.half) else f", 95 % interval {low:.3g} to {high:.3g}"
    return f"{factor * test.difference:+.3g}{unit}{interval}"


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def latex(found: Comparison) -> str:
    """Return a `tabular` with booktabs: methods as rows, guarantees as columns, the best mean of each column in bold."""
    blocks = {block: [row for row in rows if row.values] for block, rows in found.blocks.items()}
    blocks = {block: rows for block, rows in blocks.items() if rows}
    heads = [_escaped(_head(partition, at)) for partition, at in blocks]
    lines = [
        f"% {found.what} on {found.config.data.name}, mean and standard deviation over {len(found.seeds)} seeds;",
        f"% {found.by} epsilon. {' '.join(verdict_sentences(found))}".rstrip(),
        rf"\begin{{tabular}}{{l{'r' * len(blocks)}}}",
        r"\toprule",
        rf"Method & {' & '.join(heads)} \\",
        r"\midrule",
    ]
    for method, name in found.names.items():
        cells = [next((_cell(row) for row in rows if row.method == method), "--") for rows in blocks.values()]
        lines.append(rf"{_escaped(name)} & {' & '.join(cells)} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _head(partition: str, at: float) -> str:
    promise = "no noise" if math.isinf(at) else f"$\\varepsilon = {at:g}$"
    return f"{partition}, {promise}" if partition else promise


def _cell(row: Row) -> str:
    factor, digits = (100, ".1f") if row.column.percent else (1, ".4g")
    mean = f"{factor * row.mean:{digits}}"
    text = mean if math.isnan(row.sd) else rf"{mean} \pm {factor * row.sd:{'.1f' if row.column.percent else '.2g'}}"
    return rf"$\mathbf{{{text}}}$" if row.rank == 1 else f"${text}$"


def _escaped(text: str) -> str:
    """Return text with LaTeX's special characters escaped, outside of formulas."""
    parts = text.split("$")
    return "$".join(part if i % 2 else re.sub(r"([&%#_{}])", r"\\\1", part) for i, part in enumerate(parts))
