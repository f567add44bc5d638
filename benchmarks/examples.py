"""The figure of an example: its score against the proven epsilon, three seeds, beside runs without noise and baselines.

    pip install --no-deps -r examples/requirements.txt
    python benchmarks/examples.py flights        # or finetune, shakespeare, wages, yeast; some minutes each

Writes examples/NAME/figure.json and examples/NAME/figure.svg; finished runs are kept and not repeated.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import fedveil as fv
from fedveil.data.dataset import Dataset
from fedveil.drawing import MUTED, blank, legend_below, quiet, save, style
from fedveil.experiment.result import Result
from fedveil.experiment.run import run
from fedveil.models import model_registry

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PARTS: dict[str, list[str]] = {
    "head, 650 parameters": [],
    "LoRA and head, 1,418": ['model.lora={ rank = 2, targets = ["fc1", "fc2"] }'],
    "whole network, 17,226": ['model.trainable=["*"]'],
}


@dataclass(frozen=True)
class Example:
    """What is run and shown.

    column: of the last evaluation, with `axis` as its words. train: data, series, epsilon (None: `bare`), seed and a new folder.
    baselines: scores of what needs no training, by name.
    """

    title: str
    column: str
    axis: str
    protects: str
    bare: str
    load: Callable[[], Dataset]
    train: Callable[[Dataset, str, float | None, int, Path], Result]
    baselines: Callable[[Dataset], dict[str, float]]
    series: tuple[str, ...] = ("DP-FedAvg",)
    epsilons: tuple[float, ...] = (0.5, 2.0, 8.0)
    seeds: tuple[int, ...] = (1, 2, 3)


def module(name: str, file: str) -> Any:
    """The module `file` of the example `name`, imported as a newcomer runs it."""
    sys.path.insert(0, str(EXAMPLES / name))
    try:
        return importlib.import_module(file)
    finally:
        sys.path.pop(0)


def table(name: str, baseline: str, score: Callable[[Dataset], float]) -> dict[str, Any]:
    """How the example of a table loads, trains and compares; its noise is seeded, so the same figures come again."""

    def train(data: Dataset, series: str, epsilon: float | None, seed: int, folder: Path) -> Result:
        config = module(name, name).configuration(epsilon, seed)
        config = config.model_copy(update={"run": config.run.model_copy(update={"engine": "inline", "seeded_noise": True})})
        return run(config, folder, data=data)

    return {"load": lambda: module(name, name).load(), "train": train, "baselines": lambda data: {baseline: score(data)}}


def mean_answer(data: Dataset) -> float:
    """R² of the training mean."""
    return float(1 - np.mean((data.y_test - data.y_train.mean()) ** 2) / data.y_test.var())


def trained_part(data: Dataset, part: str, epsilon: float | None, seed: int, folder: Path) -> Result:
    """Without an epsilon: the same clip, no noise."""
    privacy = "privacy={ noise_multiplier = 0.0 }" if epsilon is None else f"privacy.epsilon={epsilon}"
    overrides = [*PARTS[part], privacy, f"run.seed={seed}", 'run.engine="inline"']
    return run(fv.load_config(EXAMPLES / "finetune" / "finetune.toml", overrides), folder)


def untouched(data: Dataset) -> float:
    """Test accuracy of the public network as it is."""
    network = model_registry.build("mlp", (1, 8, 8), 10, seed=0, hidden=[128, 64])
    network.load_state_dict(load_file(EXAMPLES / "finetune" / "mnist-mlp.safetensors"))
    with torch.no_grad():
        return float((network(torch.from_numpy(data.standardise(data.x_test))).argmax(1).numpy() == data.y_test).mean())


def trained_on_plays(data: Dataset, series: str, epsilon: float | None, seed: int, folder: Path) -> Result:
    result: Result = module("shakespeare", "next_character").train(data, epsilon, seed, out=folder)
    return result


def counted(data: Dataset) -> dict[str, float]:
    """Bits a character of frequencies and of pairs, counted without privacy in the training roles, with one added to each."""
    size = data.info.vocabulary
    pairs = np.ones((size, size))
    np.add.at(pairs, (data.x_train.ravel(), data.y_train.ravel()), 1)
    single, pair = pairs.sum(0) / pairs.sum(), pairs / pairs.sum(1, keepdims=True)
    return {
        "letters, counted without privacy": float(-np.log2(single[data.y_test]).mean()),
        "pairs of letters, counted without privacy": float(-np.log2(pair[data.x_test, data.y_test]).mean()),
    }


FREE, CLIPPED = "no clip,\nno noise", "same clip,\nno noise"
SHOWN = {
    "finetune": Example(
        *("Fine-tuning: 70 clients of 20 pictures, a network from MNIST", "accuracy", "test accuracy (%)", "a client", CLIPPED),
        load=lambda: fv.load("digits"),
        train=trained_part,
        baselines=lambda data: {"the public network, untouched": untouched(data)},
        series=tuple(PARTS),
        epsilons=(0.5, 1.0, 2.0),
        seeds=(0, 1, 2),
    ),
    "flights": Example(
        *("Flights over an hour late: 3,046 planes learn, others are the test", "auc", "AUC", "a plane", FREE),
        **table("flights", "any constant answer", lambda data: 0.5),
    ),
    "shakespeare": Example(
        *("Next character: 914 roles learn, others are the test", "bits", "bits a character, unseen roles", "a role", CLIPPED),
        load=lambda: module("shakespeare", "next_character").load(),
        train=trained_on_plays,
        baselines=counted,
        epsilons=(2.0, 8.0),
        seeds=(0, 1, 2),
    ),
    "wages": Example(
        *("Wages: 3,517 women learn, others are the test", "r2", "R²", "a woman", CLIPPED),
        **table("wages", "the mean wage", mean_answer),
    ),
    "yeast": Example(
        *("Functions of yeast genes: 103 measurements, 14 labels", "hamming", "wrong labels, of 14 (%)", "a gene", FREE),
        **table("yeast", "never a label", lambda data: float(data.y_test.mean())),
    ),
}


def levels(shown: Example) -> dict[str, float | None]:
    """What is run, by its name among the results."""
    return {f"{epsilon:g}": epsilon for epsilon in shown.epsilons} | {"none": None}


def one(shown: Example, data: Dataset, series: str, epsilon: float | None, seed: int) -> dict[str, float]:
    """The last evaluation of one run; every engine gives the same."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = shown.train(data, series, epsilon, seed, Path(folder) / "run")
    scores = {name[5:]: round(float(v), 5) for name, v in result.history[-1].items() if name.startswith("test_")}
    noise = {"noise_multiplier": round(result.privacy.noise_multiplier or 0.0, 4)}
    return scores | noise | {"seconds": round(time.perf_counter() - began, 1)}


def picture(shown: Example, found: dict[str, Any], path: Path) -> None:
    """Seeds, their mean and standard deviation over epsilon, runs without noise at the right, baselines as lines."""
    factor = 100 if "%" in shown.axis else 1
    figure = blank(6, 3.9)
    axis = figure.subplots()
    for index, (series, runs) in enumerate(found["runs"].items()):
        values = [[factor * scores[shown.column] for scores in runs[level].values()] for level in levels(shown)]
        mean, spread = [statistics.mean(v) for v in values], [statistics.stdev(v) for v in values]
        look = style(index)
        axis.errorbar(range(len(values) - 1), mean[:-1], spread[:-1], capsize=3, label=series, **look)
        axis.errorbar(len(values) - 1, mean[-1], spread[-1], capsize=3, **look | {"linestyle": "none"})
        for seed in zip(*values, strict=True):
            axis.plot(range(len(values)), seed, ".", color=look["color"], alpha=0.5)
    for (name, value), dash in zip(found["baselines"].items(), ("-.", ":"), strict=False):
        axis.axhline(factor * value, color=MUTED, linestyle=dash, label=f"baseline: {name}")
    axis.set_xticks(range(len(levels(shown))), [shown.bare if level == "none" else level for level in levels(shown)])
    words = f"proven ε of {shown.protects} (zero-out, aggregate view); mean, standard deviation, single seeds"
    axis.set_xlabel(words, fontsize=8)
    axis.set_ylabel(shown.axis)
    axis.set_title(shown.title, loc="left", fontsize=10.5)
    quiet(axis)
    legend_below(figure, axis)
    save(figure, path)


def main(name: str) -> None:
    """Run what is missing, print means over seeds, draw."""
    from harness import fill, has, keep, kept, mean_and_spread  # beside this file, which tests load by its path

    shown, path = SHOWN[name], EXAMPLES / name / "figure.json"
    found = kept(path, {"baselines": {}, "runs": {}})
    each = [(series, level, seed) for seed in shown.seeds for series in shown.series for level in levels(shown)]
    missing = [(series, level, seed) for series, level, seed in each if not has(found["runs"], (series, level, str(seed)))]
    if missing or not found["baselines"]:
        data = shown.load()
        found["baselines"] = {label: round(score, 5) for label, score in shown.baselines(data).items()}
        keep(path, found)
        rows = {("runs", s, level, str(seed)): (one, shown, data, s, levels(shown)[level], seed) for s, level, seed in missing}
        fill(path, found, rows)
    for series, by_level in found["runs"].items():
        for level, runs in by_level.items():
            print(f"{series}, epsilon {level}: {shown.column} {mean_and_spread((r[shown.column] for r in runs.values()), 3)}")
    print({label: round(value, 3) for label, value in found["baselines"].items()})
    picture(shown, found, path.with_suffix(".svg"))


if __name__ == "__main__":
    if sys.argv[1:2] not in [[name] for name in SHOWN]:
        sys.exit(f"{__doc__}\nNAME is one of {', '.join(sorted(SHOWN))}")
    torch.set_num_threads(1)
    main(sys.argv[1])
