"""How much accuracy noise leaves: runs that calibrate `fedveil.accounting.learnability.expected_share`.

    FEDVEIL_DATA=... python benchmarks/learnability.py [--page]

Each run has one noise level R: the noise gathered over all rounds against T steps of a full clip in one direction. Measured is
the share of the accuracy above chance that the same run keeps of what it reaches without noise. Writes
benchmarks/results/learnability.json, where finished runs are kept, and the table of docs/utility.md; prints the fitted constants.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import numpy as np

from fedveil.experiment.assembly import Prepared, prepare
from fedveil.experiment.config import Config, configure
from fedveil.experiment.resolve import data_spec, resolve
from harness import accuracy, arguments, fill, kept, markdown, put

LEVELS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
COORDINATES = {
    "pixels": ({}, {}),
    "features": ({"features": "oriented-gradients"}, {}),
    "whitened features": ({"features": "oriented-gradients"}, {"data": ["shapes"]}),
}
DATA = ("mnist", "fashion-mnist")
CHANCE = 0.1
COHORT, ROUNDS, CLIP = 50, 30, 0.05


def configuration(data: str, coordinates: str) -> Config:
    """A run without its noise."""
    own, public = COORDINATES[coordinates]
    server = {"name": "adam", "lr": 0.025, "betas": [0.9, 0.99], "eps": 0.02, "relative_to_clip": True}
    return configure(
        data={"name": data, "partition": {"kind": "iid", "clients": 500, "examples_per_client": 60}, **own},
        public=public,
        model={"name": "linear", "start": "zero"},
        method={"name": "dp-fedavg", "clip": CLIP},
        training={
            "rounds": ROUNDS,
            "clients_per_round": COHORT,
            "sampling": "poisson",
            "local_epochs": 2,
            "batch_size": 60,
            "optimizer": {"lr": 0.16 if own else 0.05},
            "server_optimizer": server,
            "evaluate_every": ROUNDS,
        },
        privacy={"noise_multiplier": 0.0},
        run={"seed": 1, "seeded_noise": True},
    )


@cache
def data_of(data: str, coordinates: str) -> Prepared:
    """The clients' data, the same for all levels."""
    return prepare(data_spec(configuration(data, coordinates)))


def one(data: str, coordinates: str, level: float) -> float:
    """Test accuracy at this level of noise."""
    config, prepared = configuration(data, coordinates), data_of(data, coordinates)
    z = level * COHORT * math.sqrt(ROUNDS / resolve(config, prepared.population).setting.layout.dimension)
    privacy = config.privacy.model_copy(update={"noise_multiplier": z})
    return accuracy(config.model_copy(update={"privacy": privacy}), prepared)


def shares(results: dict[str, dict[str, float]]) -> tuple[list[float], list[float]]:
    """Levels and the shares kept there, of all noisy runs."""
    levels, kept = [], []
    for row in results.values():
        best = row["0"] - CHANCE
        for level, reached in row.items():
            if level != "0":
                levels.append(float(level))
                kept.append((reached - CHANCE) / best)
    return levels, kept


def fitted(levels: list[float], kept: list[float]) -> tuple[float, float, float]:
    """(half, power, root mean square error) of 1 / (1 + (R / half)^power), by least squares over a grid."""
    r, y = np.array(levels), np.array(kept)
    grid = [(float(h), float(p)) for h, p in product(np.geomspace(0.05, 20, 200), np.linspace(0.3, 3, 109))]
    errors = [float(np.mean((1 / (1 + (r / h) ** p) - y) ** 2)) for h, p in grid]
    best = int(np.argmin(errors))
    return (*grid[best], math.sqrt(errors[best]))


if __name__ == "__main__":
    asked, results = arguments(__doc__, page=False), kept("learnability")
    each = () if asked.page else product(DATA, COORDINATES, LEVELS)
    fill("learnability", results, {(f"{data}, {where}", f"{level:g}"): (one, data, where, level) for data, where, level in each})
    head = ["accuracy, %", *(f"R = {level:g}" if level else "no noise" for level in LEVELS)]
    rows = [[name, *(f"{100 * row[f'{level:g}']:.1f}" for level in LEVELS)] for name, row in results.items()]
    put("utility.md", "<!-- learnability -->", markdown(head, rows))
    half, power, error = fitted(*shares(results))
    print(f"half {half:.3f}, power {power:.3f}, root mean square error {error:.3f}, {len(shares(results)[0])} noisy runs")
