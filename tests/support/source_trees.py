"""The project's files, and their syntax trees, each parsed once."""

from __future__ import annotations

import ast
import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def project_files(root: Path = ROOT) -> tuple[Path, ...]:
    """The files that the sdist ships, sorted: nothing that runs, builds and editors leave in a working tree."""
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    left = [line.strip("/") for line in (root / ".gitignore").read_text().split()]
    listed = [root / name for name in build["targets"]["sdist"]["only-include"]]
    files = [file for entry in listed for file in ((entry,) if entry.is_file() else entry.rglob("*")) if file.is_file()]
    return tuple(
        sorted(file for file in files if not any(fnmatch(part, name) for part in file.relative_to(root).parts for name in left))
    )


def files_in(folder: Path, ending: str = "") -> list[Path]:
    """The project's files below a folder."""
    return [file for file in project_files() if str(file).startswith(f"{folder}/") and file.name.endswith(ending)]
