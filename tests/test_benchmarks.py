"""The benchmarks, which nothing else runs: what they import is there, and their federations train."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

from fedveil.engines.inline import Inline
from fedveil.federation.fit import one_round
from fedveil.federation.progress import start
from fedveil.methods.dp_fedavg import DPFedAvg

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OF_AN_EXTRA = "fedveil.flower."


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.name)
def test_what_a_benchmark_imports_from_fedveil_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("fedveil.") and OF_AN_EXTRA not in f"{node.module}.":
            module = importlib.import_module(str(node.module))
            for name in node.names:
                assert hasattr(module, name.name) or importlib.import_module(f"{node.module}.{name.name}")


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
