"""What the package says of itself: one version, typed names, bounds and extras that are listed. `.ci/packages.py` installs it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

import fedveil
from fedveil.cli.machine_commands import _OPTIONAL

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def stub_places() -> dict[str, str]:
    """Each public name of the stub, and where it comes from, as `module:name`."""
    found, renamed = {}, {}
    for node in ast.parse((ROOT / "src" / "fedveil" / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            found |= {name.name: (f"{node.module}:{name.name}", name.asname) for name in node.names}
        elif isinstance(node, ast.Assign):
            assert isinstance(node.targets[0], ast.Name)
            assert isinstance(node.value, ast.Name)
            renamed[node.targets[0].id] = found[node.value.id][0]
    return {name: place for name, (place, public) in found.items() if public} | renamed


def test_the_stub_has_every_public_name_at_its_place() -> None:
    places = {name: place if ":" in place else f"{place}:{name}" for name, place in fedveil._places().items()}
    assert stub_places() == places


def test_there_is_one_version() -> None:
    assert PROJECT["dynamic"] == ["version"]
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    (newest, *_) = re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    here = Version(fedveil.__version__)
    assert cited == newest
    assert here > Version(newest) if here.is_devrelease else here == Version(newest)


def test_every_dependency_has_a_lower_bound() -> None:
    extras = (one for many in PROJECT["optional-dependencies"].values() for one in many)
    assert [one for one in (*PROJECT["dependencies"], *extras) if ">=" not in one and not one.startswith("fedveil[")] == []


def test_every_extra_is_explained_and_doctor_knows_those_of_a_user() -> None:
    table = (ROOT / "docs" / "install.md").read_text()
    assert [name for name in PROJECT["optional-dependencies"] if f"| `{name}` |" not in table] == []
    assert set(_OPTIONAL) == set(PROJECT["optional-dependencies"]) - {"dev", "docs"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheel_works_with_the_lowest_and_the_newest_dependencies() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "packages.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3500)
    assert done.returncode == 0, done.stderr
    for line in ("lowest: works", "newest: works", "pipx run: works"):
        assert line in done.stdout.splitlines()
