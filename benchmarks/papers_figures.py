"""Draw what benchmarks/papers.py found, and Table 1 of FedGLP-ADP: docs/figures/papers-*.svg; print the tables of docs/methods.

python benchmarks/papers_figures.py
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedveil.drawing import BLUE, COLOURS, GREEN, MUTED, ORANGE, blank, panels, quiet, save
from harness import FIGURES, kept, mean_and_spread

Found = dict[str, Any]
TABLE_1 = {  # FedGLP-ADP, Table 1, Fashion-MNIST
    "dp-fedavg": {2: 77.91, 6: 79.16, 16: 79.24},
    "fedglp-adp": {2: 80.33, 6: 81.26, 16: 82.09},
}
CLAIMED = "claimed epsilon (delta = 0.1)"


def tidy(axis: Axes, legend: dict[str, Any] | None = None, **settings: Any) -> None:
    """One look for all panels."""
    axis.set(**settings)
    axis.title.set_fontsize(10)
    quiet(axis)
    if legend is not None:
        axis.legend(frameon=False, **{"fontsize": 8, **legend})


def fedglp(found: Found) -> Figure:
    """FedGLP-ADP, Table 1: ours by seed beside the paper's."""
    axis = (figure := blank(8.4, 3.8)).subplots()
    personal = {name: 100 * run["last"]["mean_personal_accuracy"] for name, run in found.items()}
    arms = {"fedglp-adp": BLUE, "glp-only": COLOURS[3], "dp-fedavg": ORANGE, "noise-once": MUTED}
    for offset, (arm, colour) in enumerate(arms.items()):
        label = {"glp-only": "with clipping = flat", "noise-once": "dp-fedavg, all noise in one round"}.get(arm, arm)
        for i, epsilon in enumerate((2, 6, 16)):
            mine = [value for name, value in personal.items() if re.fullmatch(f"{arm}-{epsilon}-.", name)]
            at, paper = i + 0.14 * (offset - 1.5), TABLE_1.get(arm, {}).get(epsilon)
            axis.plot([at] * len(mine), mine, "o", color=colour, alpha=0.6, label=None if i else f"{label}, a seed each")
            if paper is not None:
                axis.plot(at, paper, "x", color=colour, markersize=9, label=None if i else f"{label}, the paper")
            print(f"{arm} eps {epsilon}: ours {mean_and_spread(mine, 2, '+-')} ({len(mine)}), paper {paper}")
    if alone := [value for name, value in personal.items() if name.startswith("fedavg-")]:
        axis.axhspan(min(alone), max(alone), color=GREEN, alpha=0.25, label="FedAvg without privacy, ours")
    for name in sorted(found):
        print(name, {k: round(v, 4) for k, v in found[name]["last"].items()})
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    tidy(axis, beside, xticks=range(3), xticklabels=["2", "6", "16"], xlabel=CLAIMED, ylabel="accuracy on own tests (%)")
    return figure


def lines(found: Found) -> Figure:
    """Accuracy of one run each over rounds."""
    axis = (figure := blank(6, 3.4)).subplots()
    for colour, (name, run) in zip(COLOURS, sorted(found.items()), strict=False):
        values = [100 * v for v in run["curves"]["test_accuracy"]]
        every = run["rounds"] / max(len(values), 1)
        x, marker = [every * (i + 1) for i in range(len(values))], "." if every > 1 else None
        axis.plot(x, values, color=colour, label=name, marker=marker)
        print(name, {k: round(v, 4) for k, v in run["last"].items()}, "claimed", run["claimed"], "proven", run["proven"])
    tidy(axis, {}, xlabel="round", ylabel="test accuracy (%)")
    return figure


def ladp(found: Found) -> Figure:
    """LaDP-FL with and without privacy estimation at each claimed epsilon, without the run with R = 1."""
    return lines({n: r for n, r in found.items() if "-R1-" not in n})


def fedanc(found: Found) -> Figure:
    """FedANC, Fig. 3: the controller's outputs with and without pre-training."""
    figure = blank(10, 3.2)
    for axis, column in zip(panels(figure, 3, 3), ("beta", "gamma", "test_accuracy"), strict=True):
        for colour, (name, run) in zip((GREEN, BLUE, ORANGE), sorted(found.items()), strict=True):
            if values := run["curves"][column]:
                axis.plot(range(1, len(values) + 1), values, color=colour, label=name)
                if column != "test_accuracy":
                    early = f"std of rounds 1-10 {statistics.stdev(values[:10]):.4f}"
                    print(f"{name} {column}: first {values[0]:.3f}, {early}, last {values[-1]:.3f}")
        tidy(axis, {}, xlabel="round", title=column)
    for name, run in sorted(found.items()):
        print(name, run["last"])
    return figure


def twin(found: Found) -> Figure:
    """Noisy-FedAvg, Fig. 2: global sensitivity over rounds."""
    figure = blank(13, 3.2)
    groups = {"m": "clients m", "K": "local steps K", "V": "clip V", "alpha": "FedProx alpha", "schedule": "schedule"}
    base = {"m": "20", "K": "5", "V": "10", "alpha": "0 (FedAvg)", "schedule": "constant"}
    for axis, (prefix, title) in zip(panels(figure, 5, 5), groups.items(), strict=True):
        rows = {name.split("-", 1)[1]: curve for name, curve in found.items() if name.startswith(f"{prefix}-")}
        rows |= {base[prefix]: found["base"]}
        order = sorted(rows, key=lambda v: (float(v.split()[0]) if v[0].isdigit() else 0, v))
        for colour, name in zip(COLOURS, order, strict=False):
            axis.plot(range(1, len(rows[name]) + 1), rows[name], color=colour, label=name)
            print(prefix, name, [round(rows[name][t - 1], 4) for t in (1, 10, 50, 100) if t <= len(rows[name])])
        tidy(axis, {"fontsize": 7}, xlabel="round", title=title, ylim=(0, None))
    return figure


def fedglp_table_1(tables: Found) -> Figure:
    """FedGLP-ADP, Table 1 at the paper's scale, from the rows that benchmarks/paper_tables.py keeps: the paper's beside ours."""
    paper, ours = (figure := blank(8.4, 3.6)).subplots(1, 2, sharey=True)
    epsilons = ("2", "4", "6", "8", "16")
    rows = [row for row in tables["fedglp-adp/table-1"]["paper"]["rows"] if not row["overrides"]]
    for colour, method in zip(COLOURS, ("FedGLP-ADP", "FedADDP", "FedDPA", "BLUR+LUS", "DP-FedAvg"), strict=False):
        mine = [row for row in rows if row["labels"]["method"] == method]
        of = {row["labels"]["epsilon"]: row["values"]["average accuracy (%)"] for row in mine}
        paper.plot(epsilons, [of[e]["paper"] for e in epsilons], "x-", color=colour, label=method)
        ours.plot(epsilons, [statistics.mean(of[e]["ours"]) for e in epsilons], color=colour)
        for epsilon in epsilons:
            ours.plot([epsilon] * len(of[epsilon]["ours"]), of[epsilon]["ours"], "o", color=colour, alpha=0.6, markersize=4)
    own = "accuracy of the clients' models (%)"
    tidy(paper, {"loc": "lower right"}, xlabel=CLAIMED, ylabel=own, title="the paper")
    tidy(ours, xlabel=CLAIMED, title="ours: three seeds and their mean")
    return figure


DRAW: dict[str, Callable[[Found], Figure]] = {
    "fedglp": fedglp,
    "ladp": ladp,
    "fedanc": fedanc,
    "aldp": lines,
    "twin": twin,
    "fedglp-table-1": fedglp_table_1,
}

if __name__ == "__main__":
    results = {**kept("papers"), "fedglp-table-1": kept("paper_tables")}
    for group, draw in DRAW.items():
        if group in results:
            print(f"\n== {group}")
            save(draw(results[group]), FIGURES / f"papers-{group}.svg")
