"""Where each paper keeps its files: `presets/METHOD/ROW.toml`, `recipes/METHOD/TABLE.toml` and `notes/METHOD.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

ROOT = Path(__file__).parent


@cache
def paper_files(kind: Literal["presets", "recipes"]) -> Mapping[str, Path]:
    """The files of all papers by name, `METHOD/ROW`, sorted."""
    files = sorted(ROOT.glob(f"*/{kind}/*/*.toml"), key=_name)
    return MappingProxyType({f"{path.parent.name}/{path.stem}": path for path in files})


def paper_notes() -> dict[str, Path]:
    """What the explorer says of each paper's methods, by the method's name, sorted."""
    return {path.stem: path for path in sorted(ROOT.glob("*/notes/*.toml"), key=lambda path: path.stem)}


def _name(path: Path) -> tuple[str, str]:
    return path.parent.name, path.stem
