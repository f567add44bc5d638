"""A run of MLflow's, through its client: no global state of MLflow is set."""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.run.run_directory import DECLARED, PRIVATE, TABLES
from fedveil.run.tracking import Begun, epsilons, numbers, settings

if TYPE_CHECKING:
    from fedveil.federation.history import Row

ARTIFACTS = ("report.html", "statement.json", "statement.md", "config.toml", "versions.json", "summary.json")


class Mlflow:
    """The tracker (see `trackers.mlflow`)."""

    name = "MLflow"

    def __init__(self, library: Any, uri: str | None, experiment: str) -> None:
        self._library, self._uri, self._experiment = library, uri, experiment

    def begin(self, begun: Begun) -> None:
        self._begun = begun
        with _one_at_a_time():
            self._client = self._library.MlflowClient(tracking_uri=self._uri)
            known = self._client.get_experiment_by_name(self._experiment)
            where = self._client.create_experiment(self._experiment) if known is None else known.experiment_id
        before = self._client.search_runs([where], f"tags.`fedveil.run` = '{begun.run}'") if begun.history else []
        self._run = before[0].info.run_id if before else self._new(where)
        steps = [m.step for m in self._client.get_metric_history(self._run, "participants")] if before else []
        self._client.set_terminated(self._run, "RUNNING")
        for record in begun.history[max(steps, default=-1) + 1 :]:
            self.round(record)

    def _new(self, experiment: str) -> str:
        tags = {"fedveil.run": self._begun.run, "fedveil.path": str(self._begun.path.resolve())}
        run: str = self._client.create_run(experiment, run_name=self._begun.path.name, tags=tags).info.run_id
        self._run = run
        self._log(self._library.entities.Param, "params", ((k, str(v)) for k, v in settings(self._begun).items()), 100)
        self._measured(epsilons(self._begun.statement), 0)
        return run

    def round(self, record: Row) -> None:
        self._measured(numbers(record, self._begun.layers, self._begun.columns), record["round"])

    def end(self, status: str) -> None:
        try:
            if status == "FINISHED":
                from fedveil.pages.report import write_report

                write_report([self._begun.path])
            for name in (*ARTIFACTS, *TABLES, DECLARED, *(f"{PRIVATE}/{table}" for table in TABLES)):
                if (self._begun.path / name).is_file():
                    folder = PRIVATE if name.startswith(PRIVATE) else None
                    self._client.log_artifact(self._run, str(self._begun.path / name), folder)
        finally:
            self._client.set_terminated(self._run, status)

    def _measured(self, values: dict[str, float], step: int) -> None:
        """Log the finite ones: MLflow's databases would turn infinity into the largest float."""
        now = int(time.time() * 1000)
        finite = ((key, value, now, step) for key, value in values.items() if math.isfinite(value))
        self._log(self._library.entities.Metric, "metrics", finite, 1000)

    def _log(self, kind: Any, field: str, rows: Iterator[tuple[Any, ...]], most: int) -> None:
        while batch := [kind(*row) for row in islice(rows, most)]:
            self._client.log_batch(self._run, **{field: batch})


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Runs that begin together do so one after another: MLflow fails where two make its database or an experiment at once."""
    with (Path(tempfile.gettempdir()) / f"fedveil-mlflow-{os.getuid()}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
