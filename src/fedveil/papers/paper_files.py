"""Where each paper keeps its files: `presets/METHOD/ROW.toml`, `recipes/METHOD/TABLE.toml` and `notes/METHOD.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parent


def paper_files(kind: Literal["presets", "recipes"]) -> dict[str, Path]:
    """The files of all papers by name, `METHOD/ROW`, sorted."""
    return {f"{path.parent.name}/{path.stem}": path for path in sorted(ROOT.glob(f"*/{kind}/*/*.toml"), key=_name)}


def paper_notes() -> dict[str, Path]:
    """What the explorer says of each paper's methods, by the method's name, sorted."""
    return {path.stem: path for path in sorted(ROOT.glob("*/notes/*.toml"), key=lambda path: path.stem)}


def _name(path: Path) -> tuple[str, str]:
    return path.parent.name, path.stem
