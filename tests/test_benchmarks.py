"""The benchmarks, which nothing else runs: their federations train."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from fedveil.executors.inline import Inline
from fedveil.federation.fit import one_round
from fedveil.federation.progress import start
from fedveil.methods.fedavg import DPFedAvg

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_a_federation_of_the_benchmarks_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("sides", "limit"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    sides = importlib.import_module("sides")
    job = sides.federation("W0", DPFedAvg(), sides.setting("W0"))
    progress = start(job)
    first = progress.model.clone()
    with Inline(job.context) as engine:
        one_round(job, engine, progress)
    assert not progress.model.equal(first)
    assert len(progress.history) == 1
