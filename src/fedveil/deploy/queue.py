"""Runs that one server makes one after the other, each from a configuration in a folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedveil.errors import ConfigError, FedveilError
from fedveil.ledger.files import head_path

if TYPE_CHECKING:
    from fedveil.experiment.result import Result

_log = logging.getLogger(__name__)

State = Literal["new", "begun", "finished"]


def state_of(out: Path) -> State:
    """Return how far the run in a directory has come."""
    if (out / "summary.json").exists():
        return "finished"
    ledger = out / "ledger.sqlite"
    return "begun" if ledger.exists() or head_path(ledger).exists() else "new"


def serve_queue(
    folder: Path, out: Path, start: Callable[[Path, Path, bool], Result], tell: Callable[[str], None]
) -> dict[str, str]:
    """Make the runs of all configurations of a folder, in the order of their names, and return the reasons of those that failed.

    A finished run is left alone, and one that has begun is resumed. A failing one does not stop the next. A configuration that is
    added meanwhile has its turn.

    Args:
        out: folder of the run directories, each named after its configuration. start: called with the configuration, the run
            directory, and whether to resume it.

    Raises:
        ConfigError: the folder has no configuration.
    """
    if not any(folder.glob("*.toml")):
        raise ConfigError(f"{folder} holds no configuration: put files NAME.toml into it")
    done, failed = set[Path](), dict[str, str]()
    while waiting := sorted(set(folder.glob("*.toml")) - done):
        config, run = waiting[0], out / waiting[0].stem
        done.add(config)
        if (state := state_of(run)) == "finished":
            tell(f"{config.name}: {run} has ended before")
            continue
        tell(f"{config.name}: {'goes on' if state == 'begun' else 'begins'} in {run}; {len(waiting) - 1} more are waiting")
        try:
            result = start(config, run, state == "begun")
            tell(
                f"{config.name}: run {run} has ended (fingerprint {result.closing}){f': {result.ended}' if result.ended else ''}"
            )
        except (FedveilError, OSError) as problem:
            failed[config.name] = str(problem)
            tell(f"{config.name}: cannot be run: {problem}")
        except Exception as problem:  # a fault of fedveil or of a plugin
            _log.exception("%s", config)
            failed[config.name] = repr(problem)
            tell(f"{config.name}: cannot be run, by an internal fault: {problem!r}")
    return failed
