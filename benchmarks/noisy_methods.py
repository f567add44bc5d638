"""Noisy-FedAvg and Noisy-FedProx by schedule on the embedded digits: noise, claim, accuracy, global sensitivity.

Run: python benchmarks/noisy_methods.py
"""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from fedveil.accounting.types import View
from fedveil.experiment.config import Config, configure
from fedveil.experiment.run import run
from fedveil.studies.twin import twin_sensitivity
from harness import arguments, markdown

SCHEDULES = ("constant", "cyclic", "stage-wise", "iterative")
METHODS: dict[str, dict[str, Any]] = {
    "Noisy-FedAvg": {"name": "noisy-fedavg"},
    "Noisy-FedProx, alpha = 2": {"name": "noisy-fedprox", "proximal": 2.0, "smoothness": 1.0},
}


def setting(method: dict[str, Any], schedule: str, epsilon: float | None, rounds: int) -> Config:
    """100 clients of 14 digits, all in each of 20 rounds; K = 5 steps of rate 0.3 with V = 1; a linear model."""
    steps = {"local_steps": 5, "batch_size": 7, "batch_clip": 1.0, "schedule": schedule, "optimizer": {"lr": 0.3}}
    return configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 100}},
        model="linear",
        method=method if epsilon is not None else {**method, "sigma": 0.1},
        training={"rounds": rounds, "sampling": "fixed", "evaluate_every": rounds, **steps},
        privacy={"epsilon": epsilon, "delta": 1e-3, "adjacency": "replace_one"},
        run={"seed": 1, "engine": "inline", "seeded_noise": True},
    )


def row(name: str, schedule: str, rounds: int) -> list[str]:
    """One run at epsilon 8, and the distances of twin runs at sigma = 0.1."""
    with tempfile.TemporaryDirectory() as folder:
        result = run(setting(METHODS[name], schedule, 8.0, rounds), Path(folder) / "run")
    claim = next((v.claimed for v in result.privacy.views if v.view is View.FINAL and v.claimed is not None), None)
    curve = twin_sensitivity(setting(METHODS[name], schedule, None, rounds), 0, "labels")
    shown = ", ".join(f"{curve[t - 1]:.4f}" for t in (1, 5, 10, 20) if t <= rounds)
    sigma = f"{result.history[-1]['layer_noise_std'][0] * 10:.3f}"
    return [name, schedule, sigma, f"{claim.epsilon:.3g}" if claim else "none", f"{result.accuracy:.3f}", shown]


if __name__ == "__main__":
    head = ["method", "schedule", "sigma", "claimed epsilon", "accuracy", "sensitivity after 1, 5, 10, 20 rounds"]
    rounds = arguments(__doc__, rounds=20).rounds
    print(markdown(head, [row(name, schedule, rounds) for name, schedule in product(METHODS, SCHEDULES)]))
