"""The figure of an example: its score against the proven epsilon, three seeds, beside the run without noise and the baseline.

    pip install --no-deps -r examples/requirements.txt
    python benchmarks/examples.py flights        # or wages, yeast; some minutes each

Writes examples/NAME/figure.json and examples/NAME/figure.svg; finished runs are kept and not repeated. Noise is seeded, so the
figures can be had again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedveil.data.dataset import Dataset
from fedveil.drawing.figure_style import BLUE, MUTED, ORANGE, blank, legend_below, quiet, save
from fedveil.run.run import run

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
EPSILONS = (None, 8.0, 2.0, 0.5)
SEEDS = (1, 2, 3)
SHOWN = {  # column of the figure, its axis, its baseline, what the picture is of
    "flights": ("auc", "AUC", "any constant answer", "Flights over an hour late: 3,046 planes learn, others are the test"),
    "wages": ("r2", "R²", "the mean wage", "Wages: 3,517 women learn, others are the test"),
    "yeast": ("hamming", "wrong labels, of 14 (%)", "never a label", "Functions of yeast genes: 103 measurements, 14 labels"),
}


def example(name: str) -> ModuleType:
    """The module of examples/NAME/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / name / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one(module: ModuleType, data: Dataset, epsilon: float | None, seed: int) -> dict[str, float]:
    """The last evaluation of one run; every engine gives the same."""
    config = module.configuration(epsilon, seed)
    config = config.model_copy(update={"run": config.run.model_copy(update={"engine": "inline", "seeded_noise": True})})
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = run(config, Path(folder) / "run", data=data)
    scores = {name[5:]: round(float(v), 5) for name, v in result.history[-1].items() if name.startswith("test_")}
    noise = {"noise_multiplier": round(result.privacy.noise_multiplier or 0.0, 4)}
    return scores | noise | {"seconds": round(time.perf_counter() - began, 1)}


def baseline(name: str, data: Dataset) -> float:
    """What no model at all reaches in the figure's column."""
    if name == "flights":
        return 0.5
    if name == "wages":
        return float(1 - np.mean((data.y_test - data.y_train.mean()) ** 2) / data.y_test.var())
    return float(data.y_test.mean())


def of(results: dict[str, dict[str, dict[str, float]]], epsilon: float | None, column: str) -> list[float]:
    return [scores[column] for scores in results[str(epsilon)].values()]


def picture(name: str, found: dict[str, Any], path: Path) -> None:
    """Seeds as dots and their mean as a line over epsilon; the run without privacy as a band, the baseline as a line."""
    column, label, idle, title = SHOWN[name]
    factor = 100 if "%" in label else 1
    finite = sorted(epsilon for epsilon in EPSILONS if epsilon)
    values = {epsilon: [factor * v for v in of(found["runs"], epsilon, column)] for epsilon in EPSILONS}
    figure = blank(6, 3.6)
    axis = figure.subplots()
    free = values[None]
    axis.axhspan(min(free), max(free), color=ORANGE, alpha=0.3, label="without noise (lowest to highest seed)", linewidth=1)
    axis.axhline(factor * found["baseline"], color=MUTED, linestyle="--", label=f"baseline: {idle}")
    axis.plot(finite, [statistics.mean(values[e]) for e in finite], "-", color=BLUE, label="mean of three seeds")
    for seed in zip(*(values[e] for e in finite), strict=True):
        axis.plot(finite, seed, "o", color=BLUE, alpha=0.6, markersize=5)
    axis.set_xscale("log")
    axis.set_xticks(finite, [f"{epsilon:g}" for epsilon in finite])
    axis.minorticks_off()
    axis.set_xlabel("proven ε (client level, zero-out, aggregate view)")
    axis.set_ylabel(label)
    axis.set_title(title, loc="left", fontsize=10.5)
    quiet(axis)
    legend_below(figure, axis)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(SHOWN))
    name = parser.parse_args().name
    kept = EXAMPLES / name / "figure.json"
    module = example(name)
    data = module.load()
    found = json.loads(kept.read_text()) if kept.exists() else {"baseline": round(baseline(name, data), 5), "runs": {}}
    column = SHOWN[name][0]
    for epsilon in EPSILONS:
        runs = found["runs"].setdefault(str(epsilon), {})
        for seed in SEEDS:
            if str(seed) not in runs:
                runs[str(seed)] = one(module, data, epsilon, seed)
                kept.write_text(json.dumps(found, indent=1) + "\n")
        values = of(found["runs"], epsilon, column)
        print(f"epsilon {epsilon}: {column} {statistics.mean(values):.3f} +- {statistics.stdev(values):.3f}", flush=True)
    print(f"baseline: {found['baseline']:.3f}")
    picture(name, found, kept.with_suffix(".svg"))


if __name__ == "__main__":
    main()
