"""Starter projects, and the configuration of the demonstration."""

from __future__ import annotations

import keyword
import runpy
from collections.abc import Iterator
from pathlib import Path

from fedveil.data.catalogue import CATALOGUE
from fedveil.errors import ConfigError, nearest
from fedveil.experiment.config import Config, parse
from fedveil.ledger.files import new_folder
from fedveil.methods.method_registry import METHODS

_TEMPLATES = Path(__file__).parent / "templates"
"""Folder of templates: one for each task, and `shared`, the project `starter` except for its data, which make_*.py writes."""

PROJECTS = tuple(sorted(folder.name for folder in _TEMPLATES.iterdir() if folder.is_dir() and folder.name != "shared"))
"""Tasks for which a starter project exists."""


def new_project(name: str, folder: str | Path = ".", task: str = "classification") -> Path:
    """Write the project `name` into a new directory of that name, atomically.

    Args:
        name: of the project, its data set and its modules. folder: an existing directory. task: one of `PROJECTS`.

    Raises:
        ConfigError: the name is invalid or taken, the task is unknown, the directory exists, or the folder is not writable.
    """
    _check(name)
    if task not in PROJECTS:
        raise ConfigError(f"--task {task}: there is no project for it{nearest(task, PROJECTS)}; choose {', '.join(PROJECTS)}")
    target = Path(folder) / name
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already: nothing was written; choose another name or --dir")
    try:
        with new_folder(target) as project:
            _write(project, name, task)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; choose a --dir that exists and may be written") from error
    return target


def _check(name: str) -> None:
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name) or name.startswith("_"):
        raise ConfigError(f"{name!r} cannot name a project and its modules; give a letter, then letters, digits and _")
    if name in METHODS or name in CATALOGUE:
        raise ConfigError(f"{name!r} is the name of a {'method' if name in METHODS else 'data set'} of fedveil: choose another")


def _write(project: Path, name: str, task: str) -> None:
    """Write the shared files and those of the task; a file that both have begins with the shared part."""
    for file, text in (*_texts(_TEMPLATES / "shared"), *_texts(_TEMPLATES / task)):
        with (project / file.replace("starter", name)).open("a", encoding="utf-8") as out:
            out.write(text.replace("starter", name))
    (program,) = project.glob("make_*.py")
    runpy.run_path(str(program))


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield names and contents of a folder's files."""
    for file in sorted(folder.iterdir()):
        if file.is_file():
            yield file.name.replace("gitignore", ".gitignore"), file.read_text(encoding="utf-8")


def demo_config() -> Config:
    """Return the demonstration: 360 clients with about 4 digits each of scikit-learn; DP-FedAvg, client level, aggregate view."""
    return parse(
        {
            "data": {"name": "digits", "partition": {"kind": "iid", "clients": 360}},
            "model": {"name": "linear"},
            "method": {"name": "dp-fedavg", "clip": 0.5},
            "training": {
                "rounds": 40,
                "clients_per_round": 120,
                "local_epochs": 2,
                "batch_size": 4,
                "optimizer": {"name": "sgd", "lr": 0.1},
            },
            "privacy": {"epsilon": 8.0, "delta": 1e-4},
        }
    )
