"""One cell of a grid in a worker: run it, or go on with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedveil.configuration.config import Config
from fedveil.configuration.config_files import read_config
from fedveil.configuration.public_setting import task_of
from fedveil.federation.history import columns_of
from fedveil.run.resume import begun
from fedveil.run.run import run
from fedveil.studies.grid.cell import as_begun, engine_of
from fedveil.studies.worker_pool import Job


def cell_job(name: str, config: Config, path: Path) -> Job:
    """The job that runs this configuration in `path`: in one process, with an engine that cannot give up a client."""
    sections = config.model_dump(mode="json")
    sections["run"]["engine"], sections["training"]["client_timeout"] = engine_of(config), None
    return Job(name, f"{__name__}:run_cell", {"path": str(path), "config": sections})


def run_cell(arguments: dict[str, Any], report: Callable[[Any], None]) -> None:
    """Run `config` in `path`, from where it stands; reports (round, seconds, main metric or None) after each round."""
    path = Path(arguments["path"])
    resume = begun(path)
    if path.exists() and not resume:
        shutil.rmtree(path)

    config = Config.model_validate(arguments["config"])
    if resume:
        config = as_begun(config, read_config(path / "config.toml"))
    name = columns_of(task_of(config)).main.name

    def on_round(record: dict[str, Any]) -> None:
        report([record["round"], record["seconds"], record.get(name)])

    run(config, path, on_round, resume=resume)
