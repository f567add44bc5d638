"""Real run directories of six kinds for the tests of verification; made once for all of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from federation_runs import SPACED, config, prepared, small_digits
from fedveil.experiment.config import Config
from fedveil.experiment.run import run

_RECORD = {"privacy": {"epsilon": 8.0, "delta": 1e-3, "unit": "record"}, "training": {"example_clip": 1.0, "batch_clip": None}}
KINDS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "poisson": ({"name": "dp-fedavg"}, "aggregate", {"training": {"sampling": "poisson"}}),
    "server": ({"name": "dp-fedavg"}, "server", {}),
    "banded": ({"name": "banded-mf", "separation": 2}, "aggregate", SPACED),
    "records": ({"name": "dp-fedavg"}, "server", _RECORD),
    "adaptive": ({"name": "fedglp-adp"}, "server", {}),
    "published": ({"name": "aldp-fl", "variant": "published"}, "server", {}),
}
"""Method, view, and the sections that differ from `federation_runs.config`; nothing is proven of the last."""


def small_run(configuration: Config, path: Path) -> Path:
    """A run of it on a tenth of the digits, with noise as in earnest; returns its directory."""
    earnest = configuration.model_copy(update={"run": configuration.run.model_copy(update={"seeded_noise": False})})
    return run(earnest, path, data=small_digits(), partition=prepared(earnest).partition).path


def made(factory: pytest.TempPathFactory, kind: str) -> Path:
    """A run directory of that kind; never to be changed."""
    return _made(factory.getbasetemp(), kind)


@functools.cache
def _made(folder: Path, kind: str) -> Path:
    return small_run(_config(kind), folder / f"verified-{kind}")


def _config(name: str) -> Config:
    method, view, sections = KINDS[name]
    return config(method, view, **sections)
