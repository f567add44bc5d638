"""An audit in the terminal, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from fedveil.adversary.audit_run import audit_config, audit_run
from fedveil.configuration.config_files import load_config
from fedveil.errors import ConfigError
from fedveil.statement.statement import Statement


def audit_with_progress(
    target: Path, overrides: Sequence[str], n: int, confidence: float, canaries: int = 0, *, quiet: bool = False
) -> Statement:
    """Audit a configuration file, or a run directory whose statement is then written anew; shows on stderr what is attacked.

    Raises:
        ConfigError: overrides for a run, whose configuration is fixed.
    """
    if target.is_dir() and overrides:
        raise ConfigError("--set does not go with a run directory: a run is audited as it was configured")
    columns = SpinnerColumn(), TextColumn("auditing: {task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("preparing", total=None)

        def on_step(what: str) -> None:
            progress.update(task, description=what)

        if target.is_dir():
            return audit_run(target, n=n, confidence=confidence, canaries=canaries, on_step=on_step)
        return audit_config(load_config(target, overrides), n=n, confidence=confidence, canaries=canaries, on_step=on_step)
