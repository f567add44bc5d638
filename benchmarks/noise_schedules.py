"""LaDP-FL's baselines beside DP-FedAvg at equal proven epsilon, on the embedded digits.

Run: python benchmarks/noise_schedules.py. Prints the table of docs/methods/time-varying-dp.md.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from fedveil.experiment.config import Config, configure
from fedveil.experiment.run import run

METHODS: dict[str, dict[str, Any]] = {
    "DP-FedAvg": {"name": "dp-fedavg"},
    "NbAFL": {"name": "nbafl", "clip": 2.0},
    "Time-Varying DP, v = 0.9": {"name": "time-varying-dp", "decay": 0.9},
    "DPA-LDP, kappa = 0.65": {"name": "dpa-ldp", "contraction": 0.65},
    "Sensitive DP": {"name": "sensitive-dp"},
    "AdapLDP": {"name": "adapldp"},
}
SEEDS = (1, 2, 3)


def setting(method: dict[str, Any], epsilon: float, seed: int) -> Config:
    """240 clients of 5 or 6 digits, all in each of 10 rounds, clip 0.5; a linear model; two passes at rate 0.2."""
    return configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 240}},
        model="linear",
        method={"clip": 0.5, **method} | ({"variant": "proven"} if method["name"] != "dp-fedavg" else {}),
        training={
            "rounds": 10, "sampling": "fixed", "local_epochs": 2, "batch_size": 3, "optimizer": {"lr": 0.2}, "evaluate_every": 10,
        },
        privacy={"epsilon": epsilon, "delta": 1e-3, "unit": "client", "adjacency": "zero_out", "view": "aggregate"},
        run={"seed": seed, "engine": "inline", "seeded_noise": True},
    )  # fmt: skip


def accuracies(method: dict[str, Any], epsilon: float) -> list[float]:
    """Test accuracy in per cent after the last round, of each seed."""
    found = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            found.append(100 * run(setting(method, epsilon, seed), Path(folder) / "run").accuracy)
    return found


def main() -> None:
    """Print the table."""
    print(f"| | {' | '.join(METHODS)} |\n|---{'|---' * len(METHODS)}|")
    for epsilon in (1, 4):
        cells = [accuracies(method, epsilon) for method in METHODS.values()]
        shown = (f"{statistics.mean(cell):.1f} ± {statistics.stdev(cell):.1f}" for cell in cells)
        print(f"| epsilon {epsilon} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
