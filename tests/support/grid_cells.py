"""Small cells for the tests of grids and comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedveil.experiment.config import Config, configure
from fedveil.ledger.ledger import Ledger
from fedveil.studies.cell import Cell


def small(method: str = "dp-fedavg", seed: int = 0, rounds: int = 3, **options: Any) -> Config:
    """Sixty clients of embedded digits, a linear model, seeded noise."""
    return configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 60}},
        model={"name": "linear"},
        method={"name": method, **options},
        training={"rounds": rounds, "clients_per_round": 6, "batch_size": 16, "sampling": "fixed"},
        privacy={"epsilon": 8.0, "delta": 1e-3},
        run={"seed": seed, "seeded_noise": True},
    )


def cells(seeds: int = 2, rounds: int = 3, methods: tuple[str, ...] = ("dp-fedavg", "aldp-fl")) -> list[Cell]:
    """Every method with every seed."""
    return [Cell(f"{m}/seed-{s}", small(m, s, rounds), {"method": m, "seed": s}) for m in methods for s in range(1, seeds + 1)]


def content(path: Path) -> dict[str, Any]:
    """What a run directory holds for everybody, without its name."""
    with Ledger.open(path / "ledger.sqlite") as ledger:
        charged = [{**entry.__dict__, "run": ""} for _, _, entry in ledger.entries()]
    return {
        "model": (path / "model.safetensors").read_bytes(),
        "history": (path / "history.csv").read_text(),
        "statement": (path / "statement.json").read_text(),
        "ledger": charged,
        "summary": {k: v for k, v in json.loads((path / "summary.json").read_text()).items() if k in ("rounds", "ended")},
    }
