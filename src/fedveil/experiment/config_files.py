"""Configurations from files, presets and run directories; recorded plugins run only if they are trusted.

A run directory may come from a stranger, and so may the digest that it records. The digest shows that this is the code of the
run, and a user who trusts it has read the code. It covers the plugin's own file, not the files that it imports.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.data.own.data_source import PATHS, user_path
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, parse, toml_values
from fedveil.experiment.given_paths import is_run, require_configuration, require_run
from fedveil.experiment.model_section import WHOLE, network_of
from fedveil.experiment.plugins import digests, load_plugins, module_of
from fedveil.registry import owner

_log = logging.getLogger(__name__)


def check_plugins(plugins: Sequence[str], run: Path, *, trusted: bool, key: str = "run.plugins") -> None:
    """Refuse the plugins of a run directory, named by `key`, unless they are trusted or already imported in this process.

    Raises:
        ConfigError: they are not trusted; or a file is missing or differs from its recorded digest, trusted or not.
    """
    recorded, now = _recorded(run), digests(plugins)
    wrong = [f"{plugin!r} (SHA-256 {now[module_of(plugin)]})" for plugin in plugins if not _same(plugin, recorded, now)]
    if wrong:
        raise ConfigError(
            f"{key}: {', '.join(wrong)}: not the code whose digest {run / 'versions.json'} records, so it does not run: "
            f"restore the run's file, or name another file in your own configuration"
        )
    if not trusted and not all(module_of(plugin) in sys.modules for plugin in plugins):
        listed = ", ".join(f"{plugin!r} (SHA-256 {now[module_of(plugin)]})" for plugin in plugins)
        raise ConfigError(
            f"{key}: the run directory {run} names code that would run: {listed}, as recorded. Read it; if you trust it and "
            f"what it imports, add --trust-plugins"
        )


def _same(plugin: str, recorded: dict[str, str], now: dict[str, str]) -> bool:
    return recorded.get(f"plugin {module_of(plugin)}") == f"sha256 {now[module_of(plugin)]}"


def _recorded(run: Path) -> dict[str, str]:
    try:
        recorded = json.loads((run / "versions.json").read_text(encoding="utf-8"))
        return {str(name): str(text) for name, text in recorded.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"run.plugins: {run / 'versions.json'}, which records the plugins' digests, cannot be read: {error}"
        ) from None


LARGEST = 16 * 2**20
"""Largest number of bytes read from a configuration: /dev/zero has no end."""


def load_config(path: str | Path, overrides: Sequence[str] = (), *, trust_plugins: bool = False, model: object = None) -> Config:
    """Read a TOML file and apply overrides: `section.key=value`, or `section={...}` to replace a whole section.

    Args:
        trust_plugins: allow plugins that a run directory names, which may be a stranger's (see `check_plugins`). Those of a
            user's own configuration, and those in `overrides`, are always allowed. The module of an import path in model.name
            counts as a plugin; it is imported when the model is built.
        model: a module, or a function that makes one, which replaces the model in the file.

    Raises:
        ConfigError: the file cannot be read, is not a configuration, or names plugins that may not run.
    """
    config = read_config(path, overrides)
    folder = Path(path).absolute().parent
    overridden = {item.partition("=")[0].strip() for item in overrides}
    if config.run.plugins and is_run(folder) and not overridden & {"run", "run.plugins"}:
        check_plugins(config.run.plugins, folder, trusted=trust_plugins)
    if config.installed and is_run(folder) and not overrides:
        _warn_of_other_code(config, folder)
    if config.data.code and is_run(folder) and not overridden & {"data", "data.features"}:
        check_plugins(config.data.code, folder, trusted=trust_plugins, key="data.features")
    if config.model.code and is_run(folder) and not overridden & {"model", "model.name"}:
        admit = partial(check_plugins, config.model.code, folder, trusted=trust_plugins, key="model.name")
        config = config.model_copy(update={"model": replace(config.model, admit=admit)})
    return config if model is None else with_model(config, model)


def _warn_of_other_code(config: Config, run: Path) -> None:
    """Warn if an installed distribution has another version or other code than when the run was made."""
    recorded, now = _recorded(run), digests([point.module for point in config.installed])
    for point in config.installed:
        if not _same(point.module, recorded, now):
            name = "" if point.dist is None else point.dist.name
            before = f"{name} {recorded.get(f'distribution {name}', 'of an unknown version')}"
            _log.warning("%s was made with %s, whose %s had other code than %s here", run, before, point.module, owner(point))


def with_model(config: Config, model: object) -> Config:
    """Return the configuration with a model that is passed in; the model must match what a run recorded of its model."""
    network = network_of(model)
    if network.source is None:
        raise ConfigError(f"model = {model!r}: hand over an nn.Module, or a class or function that makes one")
    before = config.model
    parts = before.parts if network.parts == WHOLE else network.parts
    recorded = before.recorded if before.name == network.name else None
    return config.model_copy(update={"model": replace(network, parts=parts, recorded=recorded)})


def load_recorded(run: Path, *, trust_plugins: bool = False) -> Config:
    """Return the configuration of a run directory; unless trusted, its plugins must already have been imported.

    Raises:
        ConfigError: not a run directory, or as `load_config`.
    """
    require_run(run)
    return load_config(run / "config.toml", trust_plugins=trust_plugins)


def import_recorded(target: Path) -> None:
    """Import the plugins of a run directory, or of a configuration in one, which the user trusts.

    Raises:
        ConfigError: as `load_config`; or a plugin cannot be imported.
    """
    config = load_recorded(target, trust_plugins=True) if target.is_dir() else load_config(target, trust_plugins=True)
    load_plugins(config.code)


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration as `load_config` does, without checking whether its plugins may run."""
    require_configuration(Path(path))
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST + 1)
        text = content.decode("utf-8-sig")
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
