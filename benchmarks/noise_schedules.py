"""LaDP-FL's baselines beside DP-FedAvg at equal proven epsilon, on the embedded digits.

Run: python benchmarks/noise_schedules.py. Prints the table of docs/methods/time-varying-dp.md.
"""

from __future__ import annotations

from typing import Any

from fedveil.experiment.config import Config, configure
from harness import accuracy, arguments, markdown, mean_and_spread

PROVEN = {"variant": "proven"}
METHODS: dict[str, dict[str, Any]] = {
    "DP-FedAvg": {"name": "dp-fedavg"},
    "NbAFL": {"name": "nbafl", "clip": 2.0, **PROVEN},
    "Time-Varying DP, v = 0.9": {"name": "time-varying-dp", "decay": 0.9, **PROVEN},
    "DPA-LDP, kappa = 0.65": {"name": "dpa-ldp", "contraction": 0.65, **PROVEN},
    "Sensitive DP": {"name": "sensitive-dp", **PROVEN},
    "AdapLDP": {"name": "adapldp", **PROVEN},
}


def setting(method: dict[str, Any], epsilon: float, seed: int, rounds: int) -> Config:
    """240 clients of 5 or 6 digits, all in each of 10 rounds, clip 0.5; a linear model; two passes at rate 0.2."""
    training = {"rounds": rounds, "sampling": "fixed", "local_epochs": 2, "batch_size": 3, "evaluate_every": rounds}
    return configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 240}},
        model="linear",
        method={"clip": 0.5, **method},
        training=training | {"optimizer": {"lr": 0.2}},
        privacy={"epsilon": epsilon, "delta": 1e-3, "unit": "client", "adjacency": "zero_out", "view": "aggregate"},
        run={"seed": seed, "engine": "inline", "seeded_noise": True},
    )


if __name__ == "__main__":
    asked = arguments(__doc__, seeds=3, rounds=10)
    rows = []
    for epsilon in (1, 4):
        seeds = range(1, asked.seeds + 1)
        each = ([100 * accuracy(setting(method, epsilon, s, asked.rounds)) for s in seeds] for method in METHODS.values())
        rows.append([f"epsilon {epsilon}", *map(mean_and_spread, each)])
    print(markdown(["", *METHODS], rows))
