"""Run one configuration from start to end and leave a run directory behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedveil.experiment.rundir as rundir
from fedveil.experiment.build import federation, new_run_id, prepare
from fedveil.experiment.certify import certify
from fedveil.experiment.config import calibrated_setting
from fedveil.federation.engines import engine
from fedveil.federation.fit import Progress, Record, fit, start
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.statement import Statement

if TYPE_CHECKING:
    from fedveil.data.dataset import Dataset
    from fedveil.data.partition import Partition
    from fedveil.experiment.config import Config
    from fedveil.params import FlatModel


@dataclass(frozen=True)
class Result:
    """What a run gave.

    Args:
        model: the final model. history: one record a round. privacy: the statement. path: the run directory.
        ended: why the run stopped before its last round, or an empty string.
    """

    model: FlatModel
    history: list[Record]
    privacy: Statement
    path: Path
    ended: str = ""

    @property
    def accuracy(self) -> float:
        """Test accuracy of the final model, in [0, 1]."""
        return float(next(r["test_accuracy"] for r in reversed(self.history) if "test_accuracy" in r))


def run(
    config: Config,
    out: str | Path | None = None,
    on_round: Callable[[Record], None] | None = None,
    *,
    data: Dataset | None = None,
    partition: Partition | None = None,
) -> Result:
    """Train as configured.

    Args:
        data, partition: used instead of the configured ones.
        out: the run directory, which must be new or empty; by default runs/<method>-<data>-<id>.
        on_round: called with the history's new row after each round.

    Raises:
        ConfigError, DataError: before anything is trained.
    """
    run_id = new_run_id()
    prepared = prepare(config, data, partition)
    method, setting = calibrated_setting(config, prepared.population)
    vacuous, seeded = config.privacy.allow_vacuous_delta, config.run.seeded_noise
    batch_norm = config.model.get("norm") == "batch"
    statement = certify(method, setting, seeded_noise=seeded, allow_vacuous_delta=vacuous, batch_norm=batch_norm)
    path = rundir.create(Path(out) if out is not None else Path("runs") / f"{method.name}-{prepared.dataset.info.name}-{run_id}")
    rundir.write_config(path / "config.toml", config)
    rundir.write_versions(path / "versions.json")
    _write_statement(path, statement)
    dealt, source, given = prepared.partition, prepared.dataset, data is not None or partition is not None
    rundir.write_partition(path / "partition.json", dealt, source.y_train, source.info.classes, given=given)
    Ledger.create(path / "ledger.sqlite", run_id, {"method": method.name}).close()
    job = federation(config, prepared, path / "ledger.sqlite", run_id)
    progress = start(job)

    def after(progress: Progress) -> None:
        rundir.write_history(path, progress.history, job.context.door.layout)
        if on_round is not None:
            on_round(progress.history[-1])

    ended = fit(job, engine(config.run.engine, job.context, config.training.client_timeout), progress, after)
    model = job.context.model
    model.load(progress.model)
    rundir.write_model(path / "model.safetensors", progress.model, model.layout)
    result = Result(model, progress.history, statement, path, ended)
    rundir.write_json(path / "summary.json", summary(result, run_id))
    return result


def summary(result: Result, run_id: str) -> dict[str, Any]:
    """The run in a few numbers (`summary.json`)."""
    last = {k: v for k, v in result.history[-1].items() if not isinstance(v, list | dict)} if result.history else {}
    return {
        "run": run_id,
        "rounds": len(result.history),
        "ended": result.ended or "after its last round",
        "seconds": sum(r["seconds"] for r in result.history),
        "final": last,
    }


def _write_statement(path: Path, statement: Statement) -> None:
    rundir.write_json(path / "statement.json", statement.to_dict())
    rundir.write_text(path / "statement.md", statement.to_markdown())
