"""What the package says of itself: one version, typed names, bounds and extras that are listed. `.ci/packages.py` installs it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

import fedveil
from fedveil.cli.machine_commands import _OPTIONAL
from source_trees import project_files

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
    (newest, *_) = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
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


LEFT = (
    *("runs/a/history.csv", "runs/mine/notes.md", "build/site/index.html", "build/lib/fedveil/x.py", "dist/x.whl", "site/a.md"),
    *("node_modules/x/README.md", ".venv/x.py", "results/rows.csv", "presets/x.toml", "out/config.toml", "report/page.html"),
    *("docs/notebooks/.ipynb_checkpoints/first-run-checkpoint.ipynb", "docs/.ipynb_checkpoints/data-checkpoint.md"),
    *("src/fedveil/run/.ipynb_checkpoints/run.py", "src/fedveil/gone/__pycache__/x.pyc", "examples/wages/runs/a/model.md"),
)
"""Files that runs, builds and editors leave in a working tree."""


@pytest.mark.slow
@pytest.mark.heavy
def test_the_tests_of_the_tree_pass_in_one_that_was_used(tmp_path: Path) -> None:
    files = project_files()
    for name in [file.relative_to(ROOT) for file in files]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    for left in LEFT:
        (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / left).write_text("class Gone(: `runs/a/report.html` [x](gone.md) " + "word " * 40)
    assert [file.relative_to(tmp_path) for file in project_files(tmp_path)] == [file.relative_to(ROOT) for file in files]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_docs.py", "-k", "path or found"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheel_works_with_the_lowest_and_the_newest_dependencies() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "packages.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3500)
    assert done.returncode == 0, done.stderr
    for line in ("lowest: works", "newest: works", "pipx run: works"):
        assert line in done.stdout.splitlines()
