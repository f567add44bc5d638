"""Accuracy at equal proven guarantee: the presets `utility/...` at several epsilons, and what each ingredient gives.

    FEDVEIL_DATA=... python benchmarks/utility.py [--seeds 5] [--part main|cifar|ablation|hospitals|stand-in] [--page]

Writes benchmarks/results/utility.json, where finished runs are kept and not repeated, and the tables of docs/utility.md and
docs/guide.md (`--page` writes these alone). Noise is seeded, so the figures can be had again. A run takes about 20 seconds on an
idle core; features of CIFAR-10 are made once, in minutes (docs/utility.md says what the frozen network needs).

The settings of the hospitals are the best of `stand-in`: MNIST, pooled to 49 features, among 30 clients of 275 examples. The
hospitals' own seeds begin at 101, and no run before had them.
"""

from __future__ import annotations

import statistics
from itertools import product
from pathlib import Path
from typing import Any

from fedveil.experiment.config_files import load_config
from fedveil.experiment.presets import path_of
from harness import HERE, ROOT, Case, accuracy, arguments, fill, kept, markdown, mean_and_spread, put

PRESETS = {
    "main": {"no public data": "utility/fashion-mnist", "MNIST declared public": "utility/fashion-mnist-public"},
    "cifar": {"cifar-10, no public data": "utility/cifar-10", "cifar-10, frozen EfficientNet-lite0": "utility/cifar-10-public"},
}
EPSILONS = {"main": (0.25, 0.5, 1.0, 2.0), "cifar": (2.0,)}
PIXELS = "data={name='fashion-mnist', partition={kind='iid', clients=1000, examples_per_client=60}}"
SGD = "training.server_optimizer={name='sgd', lr=0.02, momentum=0.9, relative_to_clip=true}"
ABLATION: dict[str, list[str]] = {
    "the preset": [],
    "features not whitened": ["public={}"],
    "raw pixels": ["public={}", PIXELS],
    "random start instead of zero": ["model.start=random"],
    "server SGD with momentum instead of FedAdam": [SGD],
    "no momentum": ["training.server_optimizer.betas=[0.0, 0.99]"],
    "one local step instead of five": ["training.local_epochs=1"],
    "clip 1 instead of 0.05 (few updates are clipped)": ["method.clip=1.0"],
    "60 rounds at twice the rate": ["training.rounds=60", "training.server_optimizer.lr=0.0125"],
    "mean of the models of the last third": ["run.final_model=tail"],
}
ABLATED = 0.5
HOSPITALS = ROOT / "examples" / "hospitals"
PLAIN = "{name='sgd', lr=1.0}"
HOSPITAL_ROWS: dict[str, tuple[str, list[str]]] = {
    "record | server | 1": ("by-record.toml", []),
    "record | server | 4": ("by-record.toml", ["privacy.epsilon=4.0"]),
    "client | aggregate | 1": ("by-client.toml", ["privacy.epsilon=1.0"]),
    "client | aggregate | 2": ("by-client.toml", []),
    "client | aggregate | 8": ("by-client.toml", ["privacy.epsilon=8.0"]),
    "client | server | 8": ("by-client.toml", ["privacy.epsilon=8.0", "privacy.view=server"]),
    "none | none | none": ("by-client.toml", ["method={name='fedavg'}", "privacy={}", f"training.server_optimizer={PLAIN}"]),
}
STAND_IN = (
    "data={name='mnist', partition={kind='iid', clients=30, examples_per_client=275}, "
    f"features='{HERE / 'pooled_pictures.py'}:pooled'}}"
)
STAND_IN_GRID: dict[str, dict[str, tuple[float, ...]]] = {
    "by-record.toml": {
        "training.rounds": (10, 20, 40),
        "training.example_clip": (0.25, 0.5, 1.0),
        "training.optimizer.lr": (1.0, 3.0, 6.0),
    },
    "by-client.toml": {
        "training.rounds": (20, 40),
        "method.clip": (0.125, 0.25, 0.5, 1.0, 2.0),
        "training.server_optimizer.lr": (0.01, 0.02, 0.04, 0.08, 0.16),
    },
}
PARTS = ("main", "cifar", "ablation", "stand-in", "hospitals")
FIRST_SEED = {"hospitals": 101}
Results = dict[str, dict[str, float]]


def jobs(part: str) -> dict[str, tuple[Path, list[str]]]:
    """Each row's configuration and overrides, by name."""
    if part == "hospitals":
        return {f"hospitals, {name}": (HOSPITALS / file, changed) for name, (file, changed) in HOSPITAL_ROWS.items()}
    if part == "stand-in":
        each = ((file, keys, values) for file, keys in STAND_IN_GRID.items() for values in product(*keys.values()))
        changed = [(file, [f"{key}={value}" for key, value in zip(keys, values, strict=True)]) for file, keys, values in each]
        return {f"stand-in, {file}, {', '.join(cell)}": (HOSPITALS / file, [STAND_IN, *cell]) for file, cell in changed}
    if part == "ablation":
        fixed, preset = f"privacy.epsilon={ABLATED}", path_of("utility/fashion-mnist")
        return {f"ablation, {name}": (preset, [fixed, *changed]) for name, changed in ABLATION.items()}
    rows = product(PRESETS[part].items(), EPSILONS[part])
    return {f"{name}, {e:g}": (path_of(preset), [f"privacy.epsilon={e}"]) for (name, preset), e in rows}


def percent(path: Path, overrides: list[str], seed: int) -> float:
    """Test accuracy in percent at the end of one run."""
    fixed = ["run.seeded_noise=true", "training.evaluate_every=1000", f"run.seed={seed}"]
    return 100 * accuracy(load_config(path, [*fixed, *overrides]))


def cases(part: str, seeds: int) -> dict[tuple[str, ...], Case]:
    """All runs of a part."""
    first = FIRST_SEED.get(part, 1)
    each = product(range(first, first + seeds), jobs(part).items())
    return {(row, str(seed)): (percent, *job, seed) for seed, (row, job) in each}


def cell(results: Results, row: str) -> str:
    """Mean, spread and number of seeds."""
    values = results.get(row, {}).values()
    return f"{mean_and_spread(values)} ({len(values)})" if values else ""


def write(results: Results) -> None:
    """The pages' tables by part."""
    for part, epsilons in EPSILONS.items():
        rows = [[name, *(cell(results, f"{name}, {e:g}") for e in epsilons)] for name in PRESETS[part]]
        put("utility.md", f"<!-- {part} -->", markdown(["epsilon", *(f"{e:g}" for e in epsilons)], rows))
    ablation = [[name, cell(results, f"ablation, {name}")] for name in ABLATION]
    put("utility.md", "<!-- ablation -->", markdown([f"at epsilon {ABLATED:g}", "accuracy"], ablation))
    hospitals = [[*name.split(" | "), cell(results, f"hospitals, {name}")] for name in HOSPITAL_ROWS]
    put("guide.md", "<!-- hospitals -->", markdown(["protected", "against", "epsilon", "accuracy"], hospitals))


if __name__ == "__main__":
    asked = arguments(__doc__, seeds=5, part=str, page=False)
    results: Results = kept("utility")
    todo: dict[Any, Case] = {}
    for part in () if asked.page else (asked.part,) if asked.part else PARTS:
        todo |= cases(part, asked.seeds)
    fill("utility", results, todo, 2)
    for file in STAND_IN_GRID:
        looked = [row for row in jobs("stand-in") if file in row and results.get(row)]
        best = max(looked, key=lambda row: statistics.mean(results[row].values()), default="")
        print(f"best of the stand-in: {best} {cell(results, best)}")
    write(results)
