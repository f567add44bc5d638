"""Accuracy at equal proven guarantee: the presets `utility/...` at several epsilons, and what each ingredient gives.

    FEDVEIL_DATA=... python benchmarks/utility.py [--seeds 5] [--part main|cifar|ablation|hospitals|stand-in] [--page]

Writes benchmarks/results/utility.json, where finished runs are kept and not repeated, and the tables of docs/utility.md and
docs/guide.md (`--page` writes these alone). Noise is seeded, so the figures can be had again. A run takes about 20 seconds on an
idle core; features of CIFAR-10 are made once, in minutes (docs/utility.md says what the frozen network needs).

The settings of the hospitals are the best of `stand-in`: MNIST, pooled to 49 features, among 30 clients of 275 examples. The
hospitals' own seeds begin at 101, and no run before had them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from pathlib import Path

import torch

from fedveil.executors.inline import Inline
from fedveil.experiment.assembly import federation
from fedveil.experiment.config_files import load_config, path_of
from fedveil.experiment.resolve import opened
from fedveil.federation.fit import fit
from fedveil.federation.progress import start
from fedveil.ledger.ledger import Ledger

HERE = Path(__file__).resolve().parent
OUT, PAGE, GUIDE = HERE / "results" / "utility.json", HERE.parent / "docs" / "utility.md", HERE.parent / "docs" / "guide.md"
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
HOSPITALS = HERE.parent / "examples" / "hospitals"
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
        cells = [(file, list(grid), values) for file, grid in STAND_IN_GRID.items() for values in product(*grid.values())]
        changed = [(file, [f"{key}={value}" for key, value in zip(keys, values, strict=True)]) for file, keys, values in cells]
        return {f"stand-in, {file}, {', '.join(cell)}": (HOSPITALS / file, [STAND_IN, *cell]) for file, cell in changed}
    if part == "ablation":
        fixed = f"privacy.epsilon={ABLATED}"
        preset = path_of("utility/fashion-mnist")
        return {f"ablation, {name}": (preset, [fixed, *changed]) for name, changed in ABLATION.items()}
    rows = product(PRESETS[part].items(), EPSILONS[part])
    return {f"{name}, {e:g}": (path_of(preset), [f"privacy.epsilon={e}"]) for (name, preset), e in rows}


def accuracy(path: Path, overrides: list[str], seed: int) -> float:
    """Test accuracy in percent at the end of one run."""
    torch.set_num_threads(1)
    fixed = ["run.seeded_noise=true", "training.evaluate_every=1000", f"run.seed={seed}"]
    config = load_config(path, [*fixed, *overrides])
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.sqlite"
        Ledger.create(ledger, "r").close()
        job = federation(*opened(config), ledger, "r")
        progress = start(job)
        fit(job, Inline(job.context), progress)
    return 100 * float(progress.history[-1]["test_accuracy"])


def cell(results: Results, row: str) -> str:
    """Mean, spread and number of seeds."""
    values = list(results.get(row, {}).values())
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread} ({len(values)})"


def mean_of(results: Results, row: str) -> float:
    """Mean accuracy over the seeds."""
    return statistics.mean(results[row].values())


def markdown(rows: list[list[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def tables(results: Results) -> dict[str, str]:
    """The pages' tables by part."""
    found = {}
    for part, epsilons in EPSILONS.items():
        rows = [["epsilon", *(f"{e:g}" for e in epsilons)], ["---"] * (len(epsilons) + 1)]
        rows += [[name, *(cell(results, f"{name}, {e:g}") for e in epsilons)] for name in PRESETS[part]]
        found[part] = markdown(rows)
    ablation = [[f"at epsilon {ABLATED:g}", "accuracy"], ["---", "---"]]
    ablation += [[name, cell(results, f"ablation, {name}")] for name in ABLATION]
    hospitals = [["protected | against | epsilon", "accuracy"], ["--- | --- | ---", "---"]]
    hospitals += [[name, cell(results, f"hospitals, {name}")] for name in HOSPITAL_ROWS]
    return {**found, "ablation": markdown(ablation), "hospitals": markdown(hospitals)}


def put(part: str, table: str) -> None:
    """Put a table between its marks on its page."""
    page = GUIDE if part == "hospitals" else PAGE
    before, mark, after = page.read_text(encoding="utf-8").partition(f"<!-- {part} -->\n")
    page.write_text(before + mark + table + "\n<!-- end -->" + after.partition("<!-- end -->")[2], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    results: Results = json.loads(OUT.read_text()) if OUT.exists() else {}
    parts = () if options.page else (options.part,) if options.part else PARTS
    with ProcessPoolExecutor(2) as pool:
        begun = {}
        for part in parts:
            first = FIRST_SEED.get(part, 1)
            for seed, (row, (path, overrides)) in product(range(first, first + options.seeds), jobs(part).items()):
                if str(seed) not in results.setdefault(row, {}):
                    begun[pool.submit(accuracy, path, overrides, seed)] = row, str(seed)
        for done in as_completed(begun):
            row, number = begun[done]
            results[row][number] = done.result()
            OUT.write_text(json.dumps(results, indent=1) + "\n")
            print(row, cell(results, row), flush=True)
    for file in STAND_IN_GRID:
        best = max(
            (row for row in jobs("stand-in") if file in row and results.get(row)), key=partial(mean_of, results), default=""
        )
        print(f"best of the stand-in: {best} {cell(results, best)}")
    for part, table in tables(results).items():
        put(part, table)


if __name__ == "__main__":
    main()
