"""Configurations from files: their own paths, overrides, and what a run directory recorded; plugins run only when trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.configuration.config import Config, parse
from fedveil.configuration.network import WHOLE, network_of
from fedveil.configuration.plugins import load_plugins
from fedveil.configuration.recorded_plugins import check_plugins, is_run
from fedveil.configuration.toml_text import toml_values
from fedveil.data.own.data_source import PATHS, user_path
from fedveil.errors import ConfigError

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
