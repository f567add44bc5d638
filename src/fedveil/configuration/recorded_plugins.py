"""Plugins that a run directory names run only when they are trusted, and only with the digest that the run recorded.

A run directory may come from a stranger, and so may the digest that it records: the digest tells that this is the code of the
run, and whoever trusts it has read it. It covers the plugin's own file, not what that file imports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fedveil.configuration.plugins import digests, module_of
from fedveil.errors import ConfigError

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
