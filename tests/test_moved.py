"""Modules of fedveil 0.2 by their old names."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fedveil.errors import ConfigError
from fedveil.experiment.plugins import load_plugins
from fedveil.moved import MOVED, place

PLUGIN = """
from typing import Literal
from pydantic import Field
from fedveil.methods.adaptive import debiased_norms
from fedveil.methods.base import MethodConfig, Setting, gaussian_plan
from fedveil.methods.method_registry import register
from fedveil.release.plan import Plan, Policy, Released, Upload
"""
"""The imports of the example in docs/adding-a-method.md of 0.2."""
NAMED = (
    "fedveil.adversary.replay",
    "fedveil.configuration.config_files",
    "fedveil.network.superlink",
    "fedveil.pages.figures.partition_figure",
    "fedveil.run.result",
    "fedveil.statement.certify",
)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_of_nothing_else_and_a_new_one_of_something(old: str) -> None:
    assert importlib.util.find_spec(f"fedveil.{MOVED[old]}") is not None
    assert not (Path(__file__).parents[1] / "src/fedveil" / old.replace(".", "/")).with_suffix(".py").exists()


@pytest.mark.parametrize("old", NAMED)
def test_an_old_name_warns_and_gives_the_same_module(old: str) -> None:
    for name in [name for name in sys.modules if place(name)]:
        sys.modules.pop(name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    assert f"{old} is {place(old)} now; the old name works through 0.3" in [str(warning.message) for warning in told]
    assert {warning.category for warning in told} == {DeprecationWarning}
    assert module is importlib.import_module(place(old))
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == place(old)


def test_an_unknown_module_is_not_found() -> None:
    for name in ("fedveil.nowhere", "fedveil.methods.nowhere"):
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            importlib.import_module(name)
    with warnings.catch_warnings(), pytest.raises(ModuleNotFoundError):
        warnings.simplefilter("ignore")
        importlib.import_module("fedveil.run.nowhere")


def test_a_program_under_its_old_name_runs() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "always", "-m", "fedveil.network.superlink", "--help"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "--network" in ran.stdout
    assert "fedveil.network.superlink is fedveil.deploy.superlink now" in ran.stderr


def test_a_plugin_of_0_2_is_refused_by_what_it_lacks_and_not_by_a_module(tmp_path: Path) -> None:
    (tmp_path / "plugin_of_0_2.py").write_text(PLUGIN)
    with warnings.catch_warnings(), pytest.raises(ConfigError, match="cannot import name 'Policy'"):
        warnings.simplefilter("ignore")
        load_plugins([str(tmp_path / "plugin_of_0_2.py")])
