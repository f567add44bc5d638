"""Draw what benchmarks/papers.py found, and Table 1 of FedGLP-ADP: docs/figures/papers-*.svg; print the tables of docs/methods.

python benchmarks/papers_figures.py
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedveil.drawing import BLUE, COLOURS, GREEN, MUTED, ORANGE

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parent / "docs" / "figures"
Found = dict[str, Any]
TABLE_1 = {  # FedGLP-ADP, Table 1, Fashion-MNIST
    "dp-fedavg": {2: 77.91, 6: 79.16, 16: 79.24},
    "fedglp-adp": {2: 80.33, 6: 81.26, 16: 82.09},
}


def tidy(axis: Axes, **settings: Any) -> None:
    """One look for all panels."""
    axis.set(**settings)
    axis.title.set_fontsize(10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def fedglp(found: Found, figure: Figure) -> None:
    """FedGLP-ADP, Table 1: ours by seed beside the paper's."""
    axis = figure.subplots()
    figure.set_size_inches(8.4, 3.8)
    arms = {"fedglp-adp": BLUE, "glp-only": COLOURS[3], "dp-fedavg": ORANGE, "noise-once": MUTED}
    for offset, (arm, colour) in enumerate(arms.items()):
        label = {"glp-only": "with clipping = flat", "noise-once": "dp-fedavg, all noise in one round"}.get(arm, arm)
        for i, epsilon in enumerate((2, 6, 16)):
            mine = [100 * r["last"]["mean_personal_accuracy"] for n, r in found.items() if re.fullmatch(f"{arm}-{epsilon}-.", n)]
            at = i + 0.14 * (offset - 1.5)
            axis.plot([at] * len(mine), mine, "o", color=colour, alpha=0.6, label=f"{label}, a seed each" if i == 0 else None)
            paper = TABLE_1.get(arm, {}).get(epsilon)
            if paper is not None:
                axis.plot(at, paper, "x", color=colour, markersize=9, label=f"{label}, the paper" if i == 0 else None)
            if mine:
                spread = statistics.stdev(mine) if len(mine) > 1 else 0
                print(f"{arm} eps {epsilon}: ours {statistics.mean(mine):.2f} +- {spread:.2f} ({len(mine)}), paper {paper}")
    alone = [100 * r["last"]["mean_personal_accuracy"] for n, r in found.items() if n.startswith("fedavg-")]
    if alone:
        axis.axhspan(min(alone), max(alone), color=GREEN, alpha=0.25, label="FedAvg without privacy, ours")
    for name in sorted(found):
        print(name, {k: round(v, 4) for k, v in found[name]["last"].items()})
    tidy(
        axis,
        xticks=range(3),
        xticklabels=["2", "6", "16"],
        xlabel="claimed epsilon (delta = 0.1)",
        ylabel="accuracy on own tests (%)",
    )
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def lines(found: Found, figure: Figure, column: str, ylabel: str, scale: float = 1.0) -> None:
    """One curve a run over rounds."""
    axis = figure.subplots()
    figure.set_size_inches(6, 3.4)
    if len(found) > len(COLOURS):
        raise ValueError(f"{len(found)} runs and {len(COLOURS)} colours: draw fewer in one picture")
    for colour, (name, run) in zip(COLOURS, sorted(found.items()), strict=False):
        values = [scale * v for v in run["curves"][column]]
        every = run["rounds"] / max(len(values), 1)
        axis.plot(
            [every * (i + 1) for i in range(len(values))], values, color=colour, label=name, marker="." if every > 1 else None
        )
        print(name, {k: round(v, 4) for k, v in run["last"].items()}, "claimed", run["claimed"], "proven", run["proven"])
    tidy(axis, xlabel="round", ylabel=ylabel)
    axis.legend(frameon=False, fontsize=8)


def ladp(found: Found, figure: Figure) -> None:
    """LaDP-FL with and without privacy estimation at each claimed epsilon, without the run with R = 1."""
    lines({n: r for n, r in found.items() if "-R1-" not in n}, figure, "test_accuracy", "test accuracy (%)", 100)


def fedanc(found: Found, figure: Figure) -> None:
    """FedANC, Fig. 3: the controller's outputs with and without pre-training."""
    figure.set_size_inches(10, 3.2)
    for axis, column in zip(figure.subplots(1, 3), ("beta", "gamma", "test_accuracy"), strict=True):
        for colour, (name, run) in zip((GREEN, BLUE, ORANGE), sorted(found.items()), strict=True):
            values = run["curves"][column]
            if values:
                axis.plot(range(1, len(values) + 1), values, color=colour, label=name)
                if column != "test_accuracy":
                    early = statistics.stdev(values[:10])
                    print(f"{name} {column}: first {values[0]:.3f}, std of rounds 1-10 {early:.4f}, last {values[-1]:.3f}")
        tidy(axis, xlabel="round", title=column)
        axis.legend(frameon=False, fontsize=8)
    for name, run in sorted(found.items()):
        print(name, run["last"])


def twin(found: Found, figure: Figure) -> None:
    """Noisy-FedAvg, Fig. 2: global sensitivity over rounds."""
    figure.set_size_inches(13, 3.2)
    groups = {"m": "clients m", "K": "local steps K", "V": "clip V", "alpha": "FedProx alpha", "schedule": "schedule"}
    base = {"m": "20", "K": "5", "V": "10", "alpha": "0 (FedAvg)", "schedule": "constant"}
    for axis, (prefix, title) in zip(figure.subplots(1, 5), groups.items(), strict=True):
        rows = {name.split("-", 1)[1]: curve for name, curve in found.items() if name.startswith(f"{prefix}-")}
        rows |= {base[prefix]: found["base"]}
        order = sorted(rows, key=lambda v: (float(v.split()[0]) if v[0].isdigit() else 0, v))
        for colour, name in zip(COLOURS, order, strict=False):
            axis.plot(range(1, len(rows[name]) + 1), rows[name], color=colour, label=name)
            print(prefix, name, [round(rows[name][t - 1], 4) for t in (1, 10, 50, 100) if t <= len(rows[name])])
        tidy(axis, xlabel="round", title=title, ylim=(0, None))
        axis.legend(frameon=False, fontsize=7)


def fedglp_table_1(kept: Found, figure: Figure) -> None:
    """FedGLP-ADP, Table 1 at the paper's scale, from the rows that benchmarks/paper_tables.py keeps: the paper's beside ours."""
    figure.set_size_inches(8.4, 3.6)
    paper, ours = figure.subplots(1, 2, sharey=True)
    epsilons = ("2", "4", "6", "8", "16")
    rows = [row for row in kept["fedglp-adp/table-1"]["paper"]["rows"] if not row["overrides"]]
    for colour, method in zip(COLOURS, ("FedGLP-ADP", "FedADDP", "FedDPA", "BLUR+LUS", "DP-FedAvg"), strict=False):
        mine = [row for row in rows if row["labels"]["method"] == method]
        of = {row["labels"]["epsilon"]: row["values"]["average accuracy (%)"] for row in mine}
        paper.plot(epsilons, [of[e]["paper"] for e in epsilons], "x-", color=colour, label=method)
        ours.plot(epsilons, [statistics.mean(of[e]["ours"]) for e in epsilons], color=colour)
        for epsilon in epsilons:
            ours.plot([epsilon] * len(of[epsilon]["ours"]), of[epsilon]["ours"], "o", color=colour, alpha=0.6, markersize=4)
    tidy(paper, xlabel="claimed epsilon (delta = 0.1)", ylabel="accuracy of the clients' models (%)", title="the paper")
    tidy(ours, xlabel="claimed epsilon (delta = 0.1)", title="ours: three seeds and their mean")
    paper.legend(frameon=False, fontsize=8, loc="lower right")


DRAW: dict[str, Callable[[Found, Figure], None]] = {
    "fedglp": fedglp,
    "ladp": ladp,
    "fedanc": fedanc,
    "aldp": lambda found, figure: lines(found, figure, "test_accuracy", "test accuracy (%)", 100),
    "twin": twin,
    "fedglp-table-1": fedglp_table_1,
}


def main() -> None:
    results = json.loads((HERE / "results" / "papers.json").read_text())
    results["fedglp-table-1"] = json.loads((HERE / "results" / "paper_tables.json").read_text())
    for group, draw in DRAW.items():
        if group in results:
            print(f"\n== {group}")
            figure = Figure(layout="constrained")
            draw(results[group], figure)
            figure.savefig(FIGURES / f"papers-{group}.svg")


if __name__ == "__main__":
    main()
