"""Runs that end early and are resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from federation_runs import SPACED, config, prepared, small_digits
from fedveil.experiment.config import Config
from fedveil.experiment.run import run
from fedveil.ledger.ledger import Entry, Ledger

CASES = {
    "dp-fedavg aggregate": ({"name": "dp-fedavg"}, "aggregate", "inline"),
    "dp-fedavg server": ({"name": "dp-fedavg"}, "server", "pool"),
    "aldp-fl published": ({"name": "aldp-fl", "variant": "published"}, "server", "pool"),
    "aldp-fl proven": ({"name": "aldp-fl"}, "aggregate", "pool"),
    "noisy-fedavg": ({"name": "noisy-fedavg"}, "server", "inline"),
    "fedglp-adp": ({"name": "fedglp-adp"}, "server", "pool"),
    "fedanc": ({"name": "fedanc", "pretraining_steps": 20}, "server", "inline"),
    "adaptive-clipping": ({"name": "adaptive-clipping"}, "aggregate", "pool"),
    "dp-scaffold": ({"name": "dp-scaffold"}, "server", "pool"),
    "banded-mf": ({"name": "banded-mf", "separation": 2}, "aggregate", "inline"),
}


def case(name: str, **more: Any) -> Config:
    """A run of six rounds of one of CASES."""
    method, view, engine = CASES[name]
    sections = {"training": {"rounds": 6}, **(SPACED if method["name"] == "banded-mf" else {}), **more}
    return config(method, view, run={"engine": engine}, **sections)


def go(configuration: Config, path: Path, resume: bool = False) -> Any:
    """Run or resume it in a directory."""
    return run(configuration, path, data=small_digits(), partition=prepared(configuration).partition, resume=resume)


def entries(path: Path) -> list[Entry]:
    """The releases in a run directory's ledger, by round and client."""
    with Ledger.open(path / "ledger.sqlite") as ledger:
        return sorted((e for _, _, e in ledger.entries()), key=lambda e: (e.round, e.client))


def interrupted(configuration: Config, path: Path, at: int) -> None:
    """A run that ends between the charge of round `at` and its checkpoint."""
    import fedveil.experiment.run as module

    real = module.Checkpoints.begin

    def begin(self: Any, progress: Any) -> None:
        if progress.round == at:
            raise KeyboardInterrupt
        real(self, progress)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.Checkpoints, "begin", begin)
        go(configuration, path)


def same_end(path: Path, calm: Path) -> None:
    """Model, history and ledger are those of a run that nothing disturbed."""
    assert (path / "model.safetensors").read_bytes() == (calm / "model.safetensors").read_bytes()
    tables = sorted(table.relative_to(calm) for table in calm.rglob("*.csv"))
    assert tables == sorted(table.relative_to(path) for table in path.rglob("*.csv"))
    assert {"history.csv", "layers.csv"} <= {table.name for table in tables}
    for table in tables:
        assert len((path / table).read_text().splitlines()) == len((calm / table).read_text().splitlines())
        assert table.name != "layers.csv" or (path / table).read_bytes() == (calm / table).read_bytes()
    one, other = ([{**e.__dict__, "run": ""} for e in entries(p)] for p in (path, calm))
    assert one == other
    assert not list(path.rglob("*.part"))
