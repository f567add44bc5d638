"""The tables of docs/comparison.md and its figure, from the runs of `comparison.py`."""

from __future__ import annotations

import json
from statistics import fmean
from textwrap import fill

from comparison_space import (
    CONTESTS,
    EPSILONS,
    LEFT_OUT,
    METHODS,
    REFERENCE,
    SEEDS,
    TUNED_AT,
    Found,
    Job,
    all_cells,
    choice,
    looks,
    tuning,
)
from fedveil.drawing import MUTED, blank, legend_below, panels, quiet, save, style
from fedveil.studies.statistics import holm, interval, paired_t
from harness import FIGURES, markdown, mean_and_spread, put

NAMED = 10
"""The first methods, each drawn with a line style of its own; the rest, baselines of the papers, are grey."""
TESTED = 3
"""Seeds that a test needs: the p of two is chance."""
SIGNIFICANT = 0.05
"""The level of the tests."""
POINTS = (-50, -20, -10, -5, -2, -1, 0, 1, 2)
Sample = dict[int, float]
"""A number of each seed."""


def sample(found: Found, contest: str, method: str, partition: str, epsilon: float, score: str) -> Sample:
    """The accuracies of the seeds that have one."""
    runs = {seed: found.get(Job(contest, "compare", method, partition, epsilon, seed, -1).key, {}) for seed in SEEDS}
    return {seed: result[score] for seed, result in runs.items() if score in result}


def shown(values: Sample) -> str:
    """Mean and standard deviation, with the number of seeds where it is not all."""
    if not values:
        return "missing"
    return f"{mean_and_spread(values.values())}{'' if len(values) == len(SEEDS) else f' ({len(values)})'}"


def tests(samples: dict[str, Sample]) -> dict[str, tuple[float, float | None]]:
    """Mean difference from the reference and its p, paired by seed, with Holm's correction over the methods of one epsilon.

    There is no p where fewer than TESTED seeds are common.
    """
    reference = samples[REFERENCE]
    pairs = {m: [v[s] - reference[s] for s in sorted(v.keys() & reference.keys())] for m, v in samples.items() if m != REFERENCE}
    enough = {m: d for m, d in pairs.items() if len(d) >= TESTED}
    corrected = dict(zip(enough, holm([paired_t(d) for d in enough.values()]), strict=True))
    return {m: (fmean(d), corrected.get(m)) for m, d in pairs.items() if d}


def accuracies(found: Found, contest: str, partition: str, scores: dict[str, str]) -> str:
    """Methods by epsilon, each number with how far it lies from the reference's, and the p of that.

    Args:
        scores: what is shown of each method, by its name in the table ("" for one alone); the first is tested.
    """
    methods, tested = CONTESTS[contest].methods, next(iter(scores.values()))
    by_epsilon = {e: {m: sample(found, contest, m, partition, e, tested) for m in methods} for e in EPSILONS}
    compared = {e: tests(samples) for e, samples in by_epsilon.items()}
    rows = []
    for method in methods:
        for name, score in scores.items():
            cells = []
            for e in EPSILONS:
                cell = shown(sample(found, contest, method, partition, e, score))
                if score == tested and method in compared[e]:
                    difference, p = compared[e][method]
                    cell += f"<br>{difference:+.1f}" + (f", p {p:.2g}" if p is not None else "")
                cells.append(cell)
            rows.append([f"{method}{f', {name}' if name else ''}", *cells])
    return markdown(["epsilon", *(f"{e:g}" for e in EPSILONS)], rows)


def settings(found: Found, contest: str) -> str:
    """What the looks chose for each method, and what they had on MNIST."""
    rows, score = [], CONTESTS[contest].score
    for method in CONTESTS[contest].methods:
        for tuned_at in dict.fromkeys(TUNED_AT.values()):
            results = [found.get(job.key, {}) for job in tuning(contest, method, tuned_at)]
            right = [result[score] for result in results if score in result]
            best = choice(found, contest, method, next(e for e in EPSILONS if TUNED_AT[e] == tuned_at))
            if best is None or not right:
                rows.append([method, f"{tuned_at:g}", "missing", "", "", ""])
                continue
            tried = looks(method)
            changed = ", ".join(f"{knob.removeprefix('method.')} {json.dumps(value)}" for knob, value in tried[best].items())
            figures = [f"{results[best][score]:.1f}", f"{right[0]:.1f}" if score in results[0] else "failed", f"{min(right):.1f}"]
            failed = sum("error" in result for result in results)
            rows.append([method, f"{tuned_at:g}", changed, *figures[:2], figures[2] + (f", {failed} failed" if failed else "")])
    return markdown(["method", "epsilon", "tuned setting", "MNIST accuracy", "first trial", "worst trial"], rows)


def missing(found: Found) -> str:
    """One line: which cells have no number, by contest, partition and seed, then the methods."""
    left: dict[tuple[str, str, str], list[str]] = {}
    for job in all_cells():
        if "accuracy" not in found.get(job.key, {}):
            left.setdefault((job.contest, job.method, job.partition), []).append(f"{job.epsilon:g}/{job.seed}")
    if not left:
        return "Missing cells: none."
    alike: dict[str, list[str]] = {}
    for (contest, method, partition), cells in left.items():
        every = len(cells) == len(EPSILONS) * len(SEEDS)
        alike.setdefault(f"{contest} {partition}, {'all' if every else ' '.join(cells)}", []).append(method)
    listed = "; ".join(f"{cells}: {', '.join(methods)}" for cells, methods in alike.items())
    return f"Missing cells (epsilon/seed), {sum(map(len, left.values()))} of {len(all_cells())}: {listed}."


def failures(found: Found) -> str:
    """Which runs failed, and why, each message once."""
    reasons: dict[str, list[str]] = {}
    for key, result in found.items():
        if "error" in result:
            reasons.setdefault(result["error"], []).append(key)
    if not reasons:
        return "No run failed."
    return "\n".join(wrapped(f"- {len(keys)} runs, such as `{keys[0]}`: {reason}") for reason, keys in reasons.items())


def left_out() -> str:
    """Methods that are not compared, and why."""
    return "\n".join(wrapped(f"- {name}: {reason}.") for name, reason in LEFT_OUT.items())


def wrapped(text: str) -> str:
    """As prose of the docs is."""
    return fill(text, 120, subsequent_indent="  " if text.startswith("- ") else "", break_on_hyphens=False)


PANELS = {
    ("global", "iid"): "global accuracy, IID",
    ("global", "dirichlet"): "global accuracy, Dirichlet 0.5",
    ("personal", "dirichlet"): "clients' own models, Dirichlet 0.5",
}
"""The panels of the figure: contest and partition, and the title."""


def message(found: Found) -> str:
    """The title of the figure: the methods that are significantly better than the reference (5 %, Holm), and by how much."""
    better = [
        f"{method} (by {difference:.1f} points at epsilon {epsilon:g}, {name})"
        for (contest, partition), name in PANELS.items()
        for epsilon in EPSILONS
        for method, (difference, p) in tests(
            {m: sample(found, contest, m, partition, epsilon, CONTESTS[contest].score) for m in CONTESTS[contest].methods}
        ).items()
        if difference > 0 and p is not None and p < SIGNIFICANT
    ]
    if not better:
        return f"No method is significantly better than {REFERENCE}"
    return f"Only {' and '.join(better)} is significantly better than {REFERENCE}"


def draw(found: Found) -> None:
    """How far each method lies from the reference, by epsilon; bars are 95 % intervals over seeds."""
    figure = blank(10, 4.9)
    figure.suptitle(message(found), x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = panels(figure, len(PANELS), 3)
    for axis, ((contest, partition), name) in zip(axes, PANELS.items(), strict=True):
        for i, method in enumerate(METHODS):
            if method != REFERENCE:
                points = differences(found, contest, method, partition)
                x, y, half = zip(*points, strict=True) if points else ((), (), ())
                if i < NAMED or METHODS[method].heavy:
                    axis.errorbar(x, y, half, label=method, lw=1, ms=4, capsize=2, **style(i))
                else:
                    axis.plot(x, y, color=MUTED, alpha=0.4, lw=1, label="other baselines" if i == NAMED else None)
        axis.axhline(0, color=MUTED, lw=0.8)
        axis.set_xscale("log")
        axis.set_yscale("symlog", linthresh=2)
        axis.minorticks_off()
        axis.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
        axis.set_yticks(POINTS, [f"{y:+g}" if y else "0" for y in POINTS])
        axis.set_xlabel("proven epsilon", fontsize=8)
        axis.set_title(name, fontsize=9)
        quiet(axis, size=8)
    axes[0].set_ylabel(f"points above {REFERENCE}", fontsize=8)
    legend_below(figure, axes[0])
    save(figure, FIGURES / "comparison.svg")


def differences(found: Found, contest: str, method: str, partition: str) -> list[tuple[float, float, float]]:
    """Epsilon, mean difference from the reference, and half the width of its 95 % interval (0 for few seeds)."""
    points = []
    for e in EPSILONS if method in CONTESTS[contest].methods else ():
        ours, theirs = (sample(found, contest, m, partition, e, CONTESTS[contest].score) for m in (method, REFERENCE))
        if both := [ours[s] - theirs[s] for s in sorted(ours.keys() & theirs.keys())]:
            points.append((e, fmean(both), interval(both) if len(both) >= TESTED else 0.0))
    return points


def write(found: Found) -> None:
    """Put each table between its marks, and draw."""
    one, own = {"": "accuracy"}, {"own models": "personal", "global model": "client"}
    parts = {
        "figure": "![Points above DP-FedAvg by proven epsilon](figures/comparison.svg)",
        "iid": accuracies(found, "global", "iid", one),
        "dirichlet": accuracies(found, "global", "dirichlet", one),
        "personal": accuracies(found, "personal", "dirichlet", own),
        "public": accuracies(found, "public", "iid", one),
        "chosen": settings(found, "global"),
        "chosen, personal": settings(found, "personal"),
        "missing": wrapped(missing(found)),
        "failures": failures(found),
        "left out": left_out(),
    }
    for name, part in parts.items():
        put("comparison.md", f"<!-- {name} -->", part)
    draw(found)
    print(missing(found))
