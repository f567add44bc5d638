"""Accuracy of DP-FedAvg at equal settings for several epsilons, of FedAvg and without noise: the README's table and its figure.

FEDVEIL_DATA=... python benchmarks/headline.py [--only NAME] [--seeds 3]     # finished runs are kept
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from fedveil.drawing import BLUE, ORANGE, blank, quiet, save
from fedveil.experiment.config_files import load_config
from harness import FIGURES, ROOT, arguments, fill, kept, mean_and_spread, trained

DP = "fashion-mnist-dp-fedavg.toml"
BARE = "the same without noise"
RUNS: dict[str, tuple[str, list[str]]] = {
    "FedAvg, 20 clients Dirichlet(0.5)": ("fashion-mnist-fedavg.toml", []),
    **{f"DP-FedAvg epsilon {epsilon}": (DP, [f"privacy.epsilon={epsilon}.0"]) for epsilon in (8, 4, 2)},
    BARE: ("fashion-mnist-no-noise.toml", []),
    "UCI HAR, 30 users, FedAvg": ("uci-har-users.toml", []),
    "UCI HAR, 30 users, DP-FedAvg epsilon 8": ("uci-har-users-dp.toml", []),
}


def one(config_file: str, overrides: list[str], seed: int) -> dict[str, float]:
    """Accuracies of one run in percent."""
    began = time.perf_counter()
    config = load_config(ROOT / "configs" / config_file, [f"run.seed={seed}", "run.seeded_noise=true", *overrides])
    job, progress = trained(config)
    scores = [100 * row["test_accuracy"] for row in progress.history if "test_accuracy" in row]
    noise, rounds = job.setting.noise_multiplier or 0.0, len(progress.history)
    seconds = time.perf_counter() - began
    return {"accuracy": scores[-1], "best": max(scores), "noise_multiplier": noise, "rounds": rounds, "seconds": seconds}


def draw(found: dict[str, Any]) -> None:
    """Accuracy against proven epsilon, with the same training without noise as a band."""
    values = {name: [run["accuracy"] for run in runs.values()] for name, runs in found.items()}
    axis = (figure := blank(6.6, 3.6)).subplots()
    for epsilon in (2, 4, 8):
        own = values.get(f"DP-FedAvg epsilon {epsilon}", [])
        axis.plot([epsilon] * len(own), own, "o", color=BLUE, alpha=0.6, label="one seed" if epsilon == 2 else None)
        axis.plot(epsilon, statistics.mean(own), "_", markersize=26, markeredgewidth=2, color=BLUE)
    band = (min(values[BARE]), max(values[BARE]))
    axis.axhspan(*band, color=ORANGE, alpha=0.25, label="the same training without noise (3 seeds)")
    axis.set(xlabel="proven epsilon (client level, zero-out, aggregate view, delta = 1e-5)", ylabel="test accuracy (%)")
    axis.set(xticks=[2, 4, 8], ylim=(60, 80))
    strictest, bare = (statistics.mean(values[name]) for name in ("DP-FedAvg epsilon 2", BARE))
    message = f"DP-FedAvg reaches {strictest:.1f} % at epsilon 2, and {bare:.1f} % without noise"
    figure.suptitle(message, x=0.01, ha="left", fontsize=11, fontweight="bold")
    axis.set_title("Fashion-MNIST, LeNet-5, 1,000 clients of 60 images", loc="left", fontsize=9)
    quiet(axis)
    axis.legend(frameon=False, loc="lower right")
    save(figure, FIGURES / "headline.svg")


if __name__ == "__main__":
    asked = arguments(__doc__, only="", seeds=3)
    found, chosen = kept("headline"), [name for name in RUNS if asked.only in name]
    seeds = range(1, asked.seeds + 1)
    fill("headline", found, {(name, str(seed)): (one, *RUNS[name], seed) for name in chosen for seed in seeds})
    for name in chosen:
        values = [run["accuracy"] for run in found[name].values()]
        print(f"{name:<45} {mean_and_spread(values, sign='+-')}  ({len(values)} seeds)")
    if BARE in found:
        draw(found)
