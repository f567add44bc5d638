"""Configurations from files, presets and run directories; recorded plugins run only when they are trusted.

A run directory may come from a stranger, and so may the digest that it records: the digest tells that this is the code of the
run, and whoever trusts it has read it. It covers the plugin's own file, not what that file imports.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.data.own.data_source import PATHS, user_path
from fedveil.errors import ConfigError, unknown
from fedveil.experiment.config import Config, parse, toml_values
from fedveil.experiment.model_section import WHOLE, network_of
from fedveil.experiment.plugins import digests, load_plugins, module_of
from fedveil.registry import registered_files


def presets() -> Mapping[str, Path]:
    """The files of all presets by name, METHOD/ROW."""
    return registered_files("presets/*/*.toml")


def names(method: str = "*") -> list[str]:
    """The presets of a method, or all, sorted."""
    return [name for name in sorted(presets(), key=lambda name: name.split("/")) if method in ("*", name.partition("/")[0])]


def path_of(name: str) -> Path:
    """The file of a preset.

    Raises:
        ConfigError: unknown; names the nearest.
    """
    if name not in names():
        method = name.partition("/")[0]
        there = names(method) or names()
        raise unknown("--preset", name, "preset", there, "`fedveil methods METHOD` lists those of a method")
    return presets()[name]


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


_LEFT_BY_RUNS = ("versions.json", "statement.json", "ledger.sqlite")


def is_run(folder: Path) -> bool:
    """Whether a folder holds what a run leaves: its configuration may be a stranger's."""
    return any((folder / name).exists() for name in _LEFT_BY_RUNS)


def check_plugins(plugins: Sequence[str], run: Path, *, trusted: bool, key: str = "run.plugins") -> None:
    """Refuse the plugins of a run directory, named by `key`, unless they are trusted or this process has imported them already.

    Raises:
        ConfigError: not trusted; or a file that is not there, or has another digest than the recorded one, trusted or not.
    """
    recorded, now = _recorded(run), digests(plugins)
    wrong = [f"{plugin!r} (SHA-256 {now[module_of(plugin)]})" for plugin in plugins if not _same(plugin, recorded, now)]
    if wrong:
        raise ConfigError(
            f"{key}: {', '.join(wrong)}: not the code whose digest {run / 'versions.json'} records, so it does not run: "
            f"put the run's own file there, or name another in a configuration of yours"
        )
    if not trusted and not all(module_of(plugin) in sys.modules for plugin in plugins):
        shown = ", ".join(f"{plugin!r} (SHA-256 {now[module_of(plugin)]})" for plugin in plugins)
        raise ConfigError(
            f"{key}: the run directory {run} names code that would run: {shown}, as recorded. Read it; if you trust it and "
            f"what it imports, add --trust-plugins"
        )


def _same(plugin: str, recorded: dict[str, str], now: dict[str, str]) -> bool:
    return recorded.get(f"plugin {module_of(plugin)}") == f"sha256 {now[module_of(plugin)]}"


def _recorded(run: Path) -> dict[str, str]:
    try:
        found = json.loads((run / "versions.json").read_text(encoding="utf-8"))
        return {str(name): str(text) for name, text in found.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"run.plugins: {run / 'versions.json'}, which records the plugins' digests, cannot be read: {error}"
        ) from None


LARGEST = 16 * 2**20
"""Bytes of a configuration that are read: /dev/zero has no end."""


def load_config(path: str | Path, overrides: Sequence[str] = (), *, trust_plugins: bool = False, model: object = None) -> Config:
    """Read a TOML file and apply overrides: `section.key=value`, or `section={...}` for a whole section anew.

    Args:
        trust_plugins: allow plugins that a run directory names, which may be a stranger's (see `recorded_plugins`); those of a
            configuration of one's own, and those in `overrides`, are allowed anyhow. The module of an import path in model.name
            is a plugin in this respect; it is imported when the model is built.
        model: a module, or what makes one, handed over in the place of the one that the file describes.

    Raises:
        ConfigError: it cannot be read, is no configuration, or names plugins that may not run.
    """
    config = read_config(path, overrides)
    folder = Path(path).absolute().parent
    overridden = {item.partition("=")[0].strip() for item in overrides}
    if config.run.plugins and is_run(folder) and not overridden & {"run", "run.plugins"}:
        check_plugins(config.run.plugins, folder, trusted=trust_plugins)
    if config.data.code and is_run(folder) and not overridden & {"data", "data.features"}:
        check_plugins(config.data.code, folder, trusted=trust_plugins, key="data.features")
    if config.model.code and is_run(folder) and not overridden & {"model", "model.name"}:
        admit = partial(check_plugins, config.model.code, folder, trusted=trust_plugins, key="model.name")
        config = config.model_copy(update={"model": replace(config.model, admit=admit)})
    return config if model is None else with_model(config, model)


def with_model(config: Config, model: object) -> Config:
    """The configuration with a module, or what makes one, handed over; what a run recorded of its model must hold for it."""
    own = network_of(model)
    if own.source is None:
        raise ConfigError(f"model = {model!r}: hand over an nn.Module, or a class or function that makes one")
    before = config.model
    parts = before.parts if own.parts == WHOLE else own.parts
    recorded = before.recorded if before.name == own.name else None
    return config.model_copy(update={"model": replace(own, parts=parts, recorded=recorded)})


def load_recorded(run: Path, *, trust_plugins: bool = False) -> Config:
    """The configuration of a run directory; unless they are trusted, its plugins must have been imported before.

    Raises:
        ConfigError: not a run directory, or as `load_config`.
    """
    if not (run / "config.toml").is_file() or not is_run(run):
        raise ConfigError(f"{run} is not a run directory: give one that `fedveil run` left")
    return load_config(run / "config.toml", trust_plugins=trust_plugins)


def import_recorded(target: Path) -> None:
    """Import the plugins of a run directory, or of a configuration in one, which the user trusts.

    Raises:
        ConfigError: as `load_config`; or a plugin cannot be imported.
    """
    config = load_recorded(target, trust_plugins=True) if target.is_dir() else load_config(target, trust_plugins=True)
    load_plugins(config.code)


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, for reading only: whether its plugins may run is not asked."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST + 1)
        text = content.decode("utf-8-sig")
    except IsADirectoryError:
        inside = Path(path) / "config.toml"
        hint = f"give {inside}" if inside.is_file() else "give a TOML file"
        raise ConfigError(f"{path} is a folder, and a configuration is wanted here: {hint}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML, which is text in UTF-8: {error}") from None
    if len(content) > LARGEST:
        raise ConfigError(f"{path} is larger than {LARGEST // 2**20} MiB: no configuration is")
    try:
        raw = toml_values(text)
    except ConfigError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    section, privacy, model = raw.get("run"), raw.get("privacy"), raw.get("model")
    if isinstance(section, dict) and isinstance(section.get("plugins"), list):
        section["plugins"] = [
            _beside(Path(path), plugin) if str(plugin).endswith(".py") else plugin for plugin in section["plugins"]
        ]
    if isinstance(privacy, dict) and privacy.get("budget"):
        privacy["budget"] = _beside(Path(path), privacy["budget"])
    data = raw.get("data")
    source = data.get("source") if isinstance(data, dict) else None
    if isinstance(data, dict) and ".py:" in str(data.get("features")):
        data["features"] = _beside(Path(path), data["features"])
    if isinstance(source, dict):
        source |= {key: _beside(Path(path), source[key]) for key in PATHS if key in source}
    if isinstance(model, dict):
        model |= {key: _beside(Path(path), model[key]) for key in ("weights",) if key in model}
        if ".py:" in str(model.get("name")):
            model["name"] = _beside(Path(path), model["name"])
    return parse(raw, overrides)


def _beside(config: Path, file: Any) -> Any:
    return str(config.parent / user_path(file)) if isinstance(file, str) else file
