"""A starter project: a configuration, a custom method and data set, and a test that runs them."""

from __future__ import annotations

import keyword
import tempfile
from pathlib import Path

import numpy as np

from fedveil.data.catalogue import CATALOGUE
from fedveil.errors import ConfigError
from fedveil.methods.method_registry import METHODS

TEMPLATES = Path(__file__).parent / "templates"
"""The project `starter`, complete but for its data and the dot of `.gitignore`; a new project is a copy under its own name."""

PEOPLE, READINGS = 360, 8


def new_project(name: str, folder: str | Path = ".") -> Path:
    """Write the project `name` into a new directory of that name; all of it, or nothing.

    Args:
        name: of the project, its method, its data set and its modules. folder: an existing directory.

    Raises:
        ConfigError: not a name, a name that is taken, a directory that exists, or a folder that cannot be written.
    """
    _check(name)
    target = Path(folder) / name
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already: nothing was written; choose another name or --dir")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as draft:
            project = Path(draft) / name
            project.mkdir()
            _write(project, name)
            project.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; choose a --dir that exists and may be written") from error
    return target


def _check(name: str) -> None:
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name) or name.startswith("_"):
        raise ConfigError(f"{name!r} cannot name a project and its modules; give a letter, then letters, digits and _")
    if name in METHODS or name in CATALOGUE:
        raise ConfigError(f"{name!r} is the name of a {'method' if name in METHODS else 'data set'} of fedveil: choose another")


def _write(project: Path, name: str) -> None:
    for template in TEMPLATES.iterdir():
        if template.is_file():
            file = template.name.replace("starter", name).replace("gitignore", ".gitignore")
            (project / file).write_text(template.read_text(encoding="utf-8").replace("starter", name), encoding="utf-8")
    np.savetxt(project / f"{name}.csv", example_readings(), "%g", ",", header=",".join(COLUMNS), comments="")


COLUMNS = ("person", "heart_rate", "cadence", "skin_temperature", "activity")


def example_readings() -> np.ndarray:
    """Made-up readings, always the same [360 * 8, 5]: person, beats and steps a minute, degrees Celsius, activity from 0 to 2."""
    draw = np.random.default_rng(0)
    person = np.repeat(np.arange(PEOPLE), READINGS)
    activity = draw.integers(0, 3, len(person))
    fitness = draw.normal(0, 8, PEOPLE)[person]
    heart_rate = np.array([68, 98, 145])[activity] + fitness + draw.normal(0, 9, len(person))
    cadence = np.maximum(np.array([0, 105, 165])[activity] + draw.normal(0, 25, len(person)), 0)
    skin = np.array([33.4, 32.8, 31.6])[activity] + draw.normal(0, 0.6, len(person))
    return np.column_stack([person, heart_rate.round(), cadence.round(), skin.round(1), activity])
