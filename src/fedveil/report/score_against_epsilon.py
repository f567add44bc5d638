"""A picture of several runs: the main metric against the proven epsilon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fedveil.drawing import Paper, blank, legend_below, quiet, save, style, writable
from fedveil.errors import ConfigError
from fedveil.experiment.recorded_run import RunData, read_run
from fedveil.statement.statement_text import variant_of
from fedveil.studies.statistics import interval, last


def plot_against_epsilon(runs: Sequence[str | Path], out: str | Path, paper: Paper | None = None) -> Path:
    """Draw the last score of each run against its proven epsilon, a line for each method, and return the picture's path.

    Runs of one method at the same epsilon are one point, their mean, with its 95 % confidence interval (Student's t). A run
    that proves nothing is a level line.

    Raises:
        ConfigError: a directory that is no run, a run without score or statement, or runs of different metrics or promises.
    """
    target, shown = writable(out), [read_run(path) for path in runs]
    main = shown[0].declared.main
    points: dict[str, dict[float, list[float]]] = {}
    for run in shown:
        name, epsilon, score = _point(run, main.name)
        points.setdefault(name, {}).setdefault(epsilon, []).append(main.factor * score)
    figure = blank(5.2, 3.8)
    axis = figure.subplots()
    for index, (name, by_epsilon) in enumerate(points.items()):
        finite = sorted(epsilon for epsilon in by_epsilon if math.isfinite(epsilon))
        look = style(index)
        if finite:
            means = [fmean(by_epsilon[epsilon]) for epsilon in finite]
            halves = [interval(by_epsilon[epsilon]) for epsilon in finite]
            spread = None if all(map(math.isnan, halves)) else halves
            axis.errorbar(finite, means, yerr=spread, capsize=3, linewidth=1.6, label=name, **look)
        if math.inf in by_epsilon:
            axis.axhline(fmean(by_epsilon[math.inf]), color=look["color"], linestyle=":", label=f"{name}, nothing proven")
    axis.set_xscale("log")
    ticks = sorted({epsilon for by_epsilon in points.values() for epsilon in by_epsilon if math.isfinite(epsilon)})
    axis.set_xticks(ticks, [f"{epsilon:.3g}" for epsilon in ticks])
    axis.minorticks_off()
    scopes = {str(run.statement.scope) for run in shown if run.statement is not None}
    if len(scopes) > 1:
        raise ConfigError(f"the runs promise different things ({'; '.join(sorted(scopes))}): plot those of one promise together")
    axis.set_xlabel(f"proven epsilon ({scopes.pop()}), log scale")
    axis.set_ylabel(main.axis)
    quiet(axis)
    legend_below(figure, axis)
    if paper is not None:
        paper.fit(figure)
    return save(figure, target)


def _point(run: RunData, metric: str) -> tuple[str, float, float]:
    """Return method, proven epsilon and last score of a run."""
    score = last(run.history, metric)
    if score is None or run.statement is None:
        lacking = "privacy statement" if run.statement is None else metric
        raise ConfigError(f"{run.path} has no {lacking}: leave it out, or plot runs of one task that were evaluated")
    epsilon = run.statement.proven.epsilon
    return f"{run.statement.method} ({variant_of(run.statement)})", float(f"{epsilon:.4g}"), score
