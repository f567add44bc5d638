"""Noisy-FedAvg and Noisy-FedProx by schedule on the embedded digits: noise, claim, accuracy, global sensitivity.

Run: python benchmarks/noisy_methods.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fedveil.accounting.types import View
from fedveil.experiment.config import Config, configure
from fedveil.experiment.run import run
from fedveil.studies.twin import twin_sensitivity

SCHEDULES = ("constant", "cyclic", "stage-wise", "iterative")
METHODS: dict[str, dict[str, Any]] = {
    "Noisy-FedAvg": {"name": "noisy-fedavg"},
    "Noisy-FedProx, alpha = 2": {"name": "noisy-fedprox", "proximal": 2.0, "smoothness": 1.0},
}


def setting(method: dict[str, Any], schedule: str, epsilon: float | None, adjacency: str) -> Config:
    """100 clients of 14 digits, all in each of 20 rounds; K = 5 steps of rate 0.3 with V = 1; a linear model."""
    return configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 100}},
        model="linear",
        method=method if epsilon is not None else {**method, "sigma": 0.1},
        training={
            "rounds": 20, "sampling": "fixed", "local_steps": 5, "batch_size": 7, "batch_clip": 1.0, "schedule": schedule,
            "optimizer": {"lr": 0.3}, "evaluate_every": 20,
        },
        privacy={"epsilon": epsilon, "delta": 1e-3, "adjacency": adjacency},
        run={"seed": 1, "engine": "inline", "seeded_noise": True},
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    print("| method | schedule | sigma | claimed epsilon | accuracy | sensitivity after 1, 5, 10, 20 rounds |")
    print("|---|---|---|---|---|---|")
    for name, method in METHODS.items():
        for schedule in SCHEDULES:
            with tempfile.TemporaryDirectory() as folder:
                result = run(setting(method, schedule, 8.0, "replace_one"), Path(folder) / "run")
            claim = next((v.claimed for v in result.privacy.views if v.view is View.FINAL and v.claimed is not None), None)
            sigma = result.history[-1]["layer_noise_std"][0] * 10
            curve = twin_sensitivity(setting(method, schedule, None, "replace_one"), 0)
            shown = ", ".join(f"{curve[t - 1]:.4f}" for t in (1, 5, 10, 20))
            claimed = f"{claim.epsilon:.3g}" if claim is not None else "none"
            print(f"| {name} | {schedule} | {sigma:.3f} | {claimed} | {result.accuracy:.3f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
