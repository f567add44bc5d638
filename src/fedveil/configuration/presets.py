"""Ready configurations: the settings of the papers, by name `method/row`."""

from __future__ import annotations

import re
from pathlib import Path

from fedveil.errors import ConfigError, unknown
from fedveil.papers.paper_files import paper_files


def names(method: str = "*") -> list[str]:
    """The presets of a method, or all."""
    return [name for name in paper_files("presets") if method in ("*", name.partition("/")[0])]


def path_of(name: str) -> Path:
    """The file of a preset.

    Raises:
        ConfigError: unknown; names the nearest.
    """
    if name not in names():
        method = name.partition("/")[0]
        there = names(method) or names()
        raise unknown("--preset", name, "preset", there, "`fedveil methods METHOD` lists those of a method")
    return paper_files("presets")[name]


def title(name: str) -> str:
    """The first sentence of a preset's comment."""
    head = path_of(name).read_text(encoding="utf-8").split("\n[")[0]
    comment = [line.lstrip("# ") for line in head.splitlines() if line.startswith("#")]
    return re.split(r"(?<!Fig)(?<!Figs)\.(?: |$)", " ".join(comment))[0]


_BOTH = "both a configuration file and --preset: give one of them"
_NEITHER = (
    "no configuration: give a file (`fedveil new NAME` writes one to start from) or --preset NAME "
    "(`fedveil methods METHOD` lists them); `fedveil demo` needs neither"
)


def chosen(config: Path | None, preset: str | None) -> Path:
    """The configuration that a command was given, as a file or as a preset's name.

    Raises:
        ConfigError: neither or both.
    """
    if (config is None) == (preset is None):
        raise ConfigError(_BOTH if config is not None else _NEITHER)
    if preset is not None:
        return path_of(preset)
    assert config is not None
    return config
