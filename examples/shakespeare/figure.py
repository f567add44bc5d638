"""Bits a character against proven epsilon: python examples/shakespeare/figure.py; finished runs are kept and not repeated."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from next_character import load, train

from fedveil.data.dataset import Dataset
from fedveil.drawing.figure_style import BLUE, MUTED, ORANGE, blank, quiet, save

OUT = Path(__file__).with_name("results.json")
PICTURE = Path(__file__).parents[2] / "docs" / "figures" / "example-shakespeare.svg"
EPSILONS, SEEDS = (8.0, 2.0, None), (0, 1, 2)


def measured(data: Dataset, epsilon: float | None, seed: int) -> dict[str, float]:
    """Of one run on the held-out roles."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(data, epsilon, seed, out=Path(folder) / "run")
    last, found = result.history[-1], {} if epsilon is None else {"proven": result.privacy.proven.epsilon}
    return {"bits": last["test_bits"], "accuracy": last["test_accuracy"], **found}


def counted(data: Dataset) -> dict[str, float]:
    """Bits a character of frequencies and of pairs, counted without privacy in the training roles, with one added to each."""
    size = data.info.vocabulary
    pairs = np.ones((size, size))
    np.add.at(pairs, (data.x_train.ravel(), data.y_train.ravel()), 1)
    single, pair = pairs.sum(0) / pairs.sum(), pairs / pairs.sum(1, keepdims=True)
    return {
        "unigram": float(-np.log2(single[data.y_test]).mean()),
        "bigram": float(-np.log2(pair[data.x_test, data.y_test]).mean()),
    }


def picture(results: dict[str, dict[str, dict[str, float]]], baselines: dict[str, float]) -> None:
    """Each seed, their mean and standard deviation."""
    figure = blank(6, 3.4)
    axis = figure.subplots()
    private = {float(level): [run["bits"] for run in runs.values()] for level, runs in results.items() if level != "none"}
    for epsilon, bits in private.items():
        axis.plot([epsilon] * len(bits), bits, "o", color=BLUE, alpha=0.5)
    means = [(e, statistics.mean(bits), statistics.stdev(bits)) for e, bits in sorted(private.items())]
    axis.errorbar(*zip(*means, strict=True), color=BLUE, capsize=4, label="DP-FedAvg, mean and spread of three seeds")
    bare = [run["bits"] for run in results["none"].values()]
    axis.axhspan(min(bare), max(bare), color=ORANGE, alpha=0.4, label="the same clip, no noise")
    for (name, bits), dash in zip(baselines.items(), ("--", ":"), strict=True):
        axis.axhline(bits, color=MUTED, linestyle=dash, label=f"{name}, counted without privacy")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(private), [f"{e:g}" for e in sorted(private)])
    axis.set(xlabel="proven epsilon (a role; aggregate view, delta = 5e-4)", ylabel="bits a character, unseen roles")
    quiet(axis)
    axis.legend(frameon=False, fontsize=8)
    save(figure, PICTURE)


def main() -> None:
    torch.set_num_threads(1)
    data = load()
    kept = json.loads(OUT.read_text()) if OUT.exists() else {"runs": {}}
    kept["baselines"] = counted(data)
    for seed in SEEDS:
        for epsilon in EPSILONS:
            runs = kept["runs"].setdefault("none" if epsilon is None else f"{epsilon:g}", {})
            if str(seed) not in runs:
                runs[str(seed)] = measured(data, epsilon, seed)
                print(epsilon, seed, runs[str(seed)], flush=True)
            OUT.write_text(json.dumps(kept, indent=1) + "\n")
    picture(kept["runs"], kept["baselines"])


if __name__ == "__main__":
    main()
