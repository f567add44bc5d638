"""The examples, loaded as a newcomer runs them, and short private runs of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fedveil as fv
from fedveil.data.dataset import Dataset
from fedveil.experiment.result import Result

ROOT = Path(__file__).parents[2]
LONGEST = 40


def example(name: str, *packages: str) -> ModuleType:
    """The module of examples/NAME/NAME.py; the test skips where its data are not installed."""
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install --no-deps -r examples/requirements.txt")
    path = ROOT / "examples" / name / f"{name}.py"
    assert len(path.read_text().splitlines()) <= LONGEST
    return _loaded(f"example_{name}", path)


def figures() -> ModuleType:
    """The program that draws the figures of the examples."""
    return _loaded("example_figures", ROOT / "benchmarks" / "examples.py")


def _loaded(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # a dataclass looks up its module there
    spec.loader.exec_module(module)
    return module


def short_run(module: ModuleType, data: Dataset, folder: Path, rounds: int) -> Result:
    """A run at epsilon = 8 with few rounds, whose record has been verified."""
    config = module.configuration(8.0, rounds=rounds)
    config = config.model_copy(update={"run": config.run.model_copy(update={"engine": "stacked", "seeded_noise": True})})
    result = fv.train(config, folder / "run", data=data)
    found = fv.verification(result.path)
    assert found.outcome == "verified", found.findings
    assert 7.9 < result.privacy.proven.epsilon <= 8.0
    return result
