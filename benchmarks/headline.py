"""The README's headline results: accuracy on real data, mean and spread over seeds.

    FEDVEIL_DATA=... python benchmarks/headline.py [--only NAME] [--seeds 3]

Writes benchmarks/results/headline.json and docs/figures/headline.svg; finished runs are kept and not repeated. Noise is seeded,
so the figures can be had again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from fedveil.executors.inline import Inline
from fedveil.experiment.assembly import federation
from fedveil.experiment.config_files import load_config
from fedveil.experiment.resolve import opened
from fedveil.federation.fit import fit
from fedveil.federation.progress import start
from fedveil.ledger.ledger import Ledger

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent / "configs"
OUT = HERE / "results" / "headline.json"
DP = "fashion-mnist-dp-fedavg.toml"
RUNS: dict[str, tuple[str, list[str]]] = {
    "FedAvg, 20 clients Dirichlet(0.5)": ("fashion-mnist-fedavg.toml", []),
    "DP-FedAvg epsilon 8": (DP, ["privacy.epsilon=8.0"]),
    "DP-FedAvg epsilon 4": (DP, ["privacy.epsilon=4.0"]),
    "DP-FedAvg epsilon 2": (DP, ["privacy.epsilon=2.0"]),
    "the same without noise": ("fashion-mnist-no-noise.toml", []),
    "UCI HAR, 30 users, FedAvg": ("uci-har-users.toml", []),
    "UCI HAR, 30 users, DP-FedAvg epsilon 8": ("uci-har-users-dp.toml", []),
}


def one(config_file: str, overrides: list[str], seed: int) -> dict[str, float]:
    config = load_config(CONFIGS / config_file, [f"run.seed={seed}", "run.seeded_noise=true", *overrides])
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        Ledger.create(path, "r").close()
        job = federation(*opened(config), path, "r")
        progress = start(job)
        fit(job, Inline(job.context), progress)
    last = progress.history[-1]
    return {
        "accuracy": 100 * last["test_accuracy"],
        "best": 100 * max(r["test_accuracy"] for r in progress.history if "test_accuracy" in r),
        "noise_multiplier": job.setting.noise_multiplier or 0.0,
        "rounds": len(progress.history),
        "seconds": time.perf_counter() - began,
    }


def picture(results: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Accuracy against proven epsilon, with the same training without noise as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axis = figure.subplots()
    for epsilon in (2, 4, 8):
        values = [r["accuracy"] for r in results.get(f"DP-FedAvg epsilon {epsilon}", {}).values()]
        axis.plot([epsilon] * len(values), values, "o", color="#0072B2", alpha=0.6, label="one seed" if epsilon == 2 else None)
        axis.plot(epsilon, statistics.mean(values), "_", markersize=26, markeredgewidth=2, color="#0072B2")
    bare = [r["accuracy"] for r in results.get("the same without noise", {}).values()]
    axis.axhspan(min(bare), max(bare), color="#D55E00", alpha=0.25, label="the same training without noise (3 seeds)")
    axis.set(
        xlabel="proven epsilon (client level, zero-out, aggregate view, delta = 1e-5)",
        ylabel="test accuracy (%)",
        xticks=[2, 4, 8],
        ylim=(60, 80),
        title="DP-FedAvg on Fashion-MNIST, LeNet-5, 1,000 clients of 60 images",
    )
    axis.title.set_fontsize(10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    OUT.parent.mkdir(exist_ok=True)
    results = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name, (config, overrides) in RUNS.items():
        if options.only not in name:
            continue
        for seed in range(1, options.seeds + 1):
            if str(seed) not in results.setdefault(name, {}):
                results[name][str(seed)] = one(config, overrides, seed)
                OUT.write_text(json.dumps(results, indent=1) + "\n")
        values = [r["accuracy"] for r in results[name].values()]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name:<45} {statistics.mean(values):5.1f} +- {spread:.1f}  ({len(values)} seeds)", flush=True)
    if "the same without noise" in results:
        picture(results, HERE.parent / "docs" / "figures" / "headline.svg")


if __name__ == "__main__":
    main()
