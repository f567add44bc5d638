"""Small runs on digits for the tests of reports and plots; made once for all of them."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Any

import pytest

from fedveil.experiment.config import parse
from fedveil.experiment.run import run

CLIENTS, ROUNDS, SHOWN = 12, 4, 6


def raw(**privacy: Any) -> dict[str, Any]:
    """12 clients with labels of their own, 4 rounds, tests on each client."""
    return {
        "data": {
            "name": "digits",
            "partition": {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.5},
            "client_test_fraction": 0.2,
        },
        "model": {"name": "linear"},
        "method": {"name": "dp-fedavg", "clip": 0.5},
        "training": {"sampling": "poisson", "rounds": ROUNDS, "clients_per_round": SHOWN, "local_epochs": 1, "batch_size": 16},
        "privacy": {"epsilon": 6.0, "delta": 1e-3, **privacy},
        "run": {"seed": 1, "seeded_noise": True, "engine": "inline"},
    }


def make(factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`one` and `other` differ in their seed, `loose` in epsilon; `server` promises something to each client by itself."""
    return _made(factory.getbasetemp())


@functools.cache
def _made(folder: Path) -> dict[str, Path]:
    configs = {"one": raw(), "other": raw(), "loose": raw(epsilon=40.0), "server": raw(view="server")}
    configs["other"]["run"]["seed"] = 2
    return {name: run(parse(config), folder / name).path for name, config in configs.items()}


def table(path: Path) -> list[dict[str, str]]:
    """A CSV file as it is."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
