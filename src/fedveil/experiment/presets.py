"""Ready configurations by name, METHOD/ROW."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.registry import registered_files


def presets() -> Mapping[str, Path]:
    """Return the files of all presets by name, METHOD/ROW."""
    return registered_files("presets/*/*.toml")


def names(method: str = "*") -> list[str]:
    """Return the presets of a method, or all, sorted."""
    return [name for name in sorted(presets(), key=lambda name: name.split("/")) if method in ("*", name.partition("/")[0])]


def path_of(name: str) -> Path:
    """Return the file of a preset.

    Raises:
        ConfigError: the preset is unknown; names those near it.
    """
    if name not in presets():
        near = names(name.partition("/")[0]) or difflib.get_close_matches(name, names(), n=5, cutoff=0.4)
        hint = f"; near it are {', '.join(near)}" if near else ""
        message = f"--preset {name}: unknown preset{hint}; `fedveil methods METHOD` lists those of a method"
        raise ConfigError(message, key="--preset", value=name, allowed=names())
    return presets()[name]


def title(name: str) -> str:
    """Return the first sentence of a preset's comment."""
    head = path_of(name).read_text(encoding="utf-8").split("\n[")[0]
    comment = [line.lstrip("# ") for line in head.splitlines() if line.startswith("#")]
    return re.split(r"(?<!Fig)(?<!Figs)\.(?: |$)", " ".join(comment))[0]


_BOTH = "both a configuration file and --preset: give one of them"
_NEITHER = (
    "no configuration: give a file (`fedveil new NAME` writes one to start from) or --preset NAME "
    "(`fedveil methods METHOD` lists them); `fedveil demo` needs neither"
)


def chosen(config: Path | None, preset: str | None) -> Path:
    """Return the configuration file that a command was given, directly or as a preset's name.

    Raises:
        ConfigError: neither or both were given.
    """
    if (config is None) == (preset is None):
        raise ConfigError(_BOTH if config is not None else _NEITHER)
    if preset is not None:
        return path_of(preset)
    assert config is not None
    return config
