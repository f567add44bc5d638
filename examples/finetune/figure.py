"""Accuracy against proven epsilon of three trainable parts: python examples/finetune/figure.py; finished runs are kept."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

import fedveil as fv
from fedveil.drawing.figure_style import MUTED, blank, quiet, save, style
from fedveil.models import model_registry

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs" / "figures" / "example-finetune.svg"
PARTS: dict[str, list[str]] = {
    "head, 650 parameters": [],
    "LoRA and head, 1,418": ['model.lora={ rank = 2, targets = ["fc1", "fc2"] }'],
    "whole network, 17,226": ['model.trainable=["*"]'],
}
LEVELS, SEEDS = ("0.5", "1", "2", "none"), ("0", "1", "2")


def accuracy(part: str, level: str, seed: str, *more: str) -> float:
    """Of one run on the test set; without privacy: the same clip, no noise."""
    privacy = "privacy={ noise_multiplier = 0.0 }" if level == "none" else f"privacy.epsilon={level}"
    config = fv.load_config(HERE / "finetune.toml", [*PARTS[part], privacy, f"run.seed={seed}", 'run.engine="inline"', *more])
    with tempfile.TemporaryDirectory() as folder:
        return fv.train(config, Path(folder) / "run").accuracy


def untouched() -> float:
    """Test accuracy of the public network as it is."""
    data = fv.load("digits")
    network = model_registry.build("mlp", (1, 8, 8), 10, seed=0, hidden=[128, 64])
    network.load_state_dict(load_file(HERE / "mnist-mlp.safetensors"))
    with torch.no_grad():
        return float((network(torch.from_numpy(data.standardise(data.x_test))).argmax(1).numpy() == data.y_test).mean())


def picture(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Mean and standard deviation over the seeds; without privacy at the right."""
    figure = blank(6, 3.4)
    axis = figure.subplots()
    for index, (part, levels) in enumerate(results.items()):
        values = [[100 * value for value in levels[level].values()] for level in LEVELS]
        mean, spread = [statistics.mean(v) for v in values], [statistics.stdev(v) for v in values]
        axis.errorbar(range(len(LEVELS)), mean, spread, capsize=3, label=part, **style(index))
    axis.axhline(100 * untouched(), color=MUTED, linestyle="-.", label="the public network, untouched")
    axis.set_xticks(range(len(LEVELS)), [*LEVELS[:-1], "no noise"])
    axis.set(xlabel="proven epsilon (a client of 20 pictures; aggregate view, delta = 1e-3)", ylabel="test accuracy (%)")
    quiet(axis)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, PICTURE)


def main() -> None:
    torch.set_num_threads(1)
    out = HERE / "results.json"
    results = json.loads(out.read_text()) if out.exists() else {}
    for seed in SEEDS:
        for part in PARTS:
            for level in LEVELS:
                runs = results.setdefault(part, {}).setdefault(level, {})
                if seed not in runs:
                    runs[seed] = accuracy(part, level, seed)
                    out.write_text(json.dumps(results, indent=1) + "\n")
    for part, levels in results.items():
        print(part, {level: round(statistics.mean(runs.values()), 3) for level, runs in levels.items()})
    picture(results)


if __name__ == "__main__":
    main()
