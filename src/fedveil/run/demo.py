"""The demonstration: client-level privacy on the embedded digits."""

from __future__ import annotations

from fedveil.configuration.config import Config, parse


def demo_config() -> Config:
    """360 clients with about 4 of scikit-learn's digits each; DP-FedAvg, client level, aggregate view."""
    return parse(
        {
            "data": {"name": "digits", "partition": {"kind": "iid", "clients": 360}},
            "model": {"name": "linear"},
            "method": {"name": "dp-fedavg", "clip": 0.5},
            "training": {
                "rounds": 40,
                "clients_per_round": 120,
                "local_epochs": 2,
                "batch_size": 4,
                "optimizer": {"name": "sgd", "lr": 0.1},
            },
            "privacy": {"epsilon": 8.0, "delta": 1e-4},
        }
    )
