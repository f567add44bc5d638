"""Trackers that people use already: TensorBoard and MLflow follow a run as it goes. Neither is imported unless it is asked for.

What they are told is what the run directory holds: training losses and clients' accuracies in it are computed from private
data without noise, so a tracker must be as private as the run directory.
"""

from __future__ import annotations

import fcntl
import importlib
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w

from fedveil.errors import ConfigError
from fedveil.experiment.run_directory import DECLARED, PRIVATE, TABLES, present
from fedveil.experiment.tracking import RunInfo, epsilons, numbers, settings
from fedveil.ledger.files import owner_only_folder
from fedveil.statement.statement_layout import to_markdown

if TYPE_CHECKING:
    from fedveil.experiment.tracking import Tracker
    from fedveil.federation.history import Columns, Row


class TensorBoard:
    """The tracker (see `trackers.tensorboard`)."""

    name = "TensorBoard"

    def __init__(self, path: str | Path | None) -> None:
        self._path = path

    def begin(self, begun: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = begun.path / "tensorboard" if self._path is None else Path(self._path)
        folder.parent.mkdir(parents=True, exist_ok=True)
        owner_only_folder(folder)  # it holds private figures
        fresh, done = not any(folder.glob("events.*")), len(begun.history)
        self._begun, self._last = begun, dict[str, float]()
        self._writer: Any = SummaryWriter(str(folder), purge_step=None if fresh or not done else done - 1)
        if fresh or not done:
            config = tomli_w.dumps(present(begun.config))
            self._writer.add_text("configuration", f"```toml\n{config}```")
            self._writer.add_text("privacy statement", to_markdown(begun.statement))
            for key, epsilon in epsilons(begun.statement).items():
                self._writer.add_scalar(key, epsilon, 0)
        for record in begun.history if fresh else begun.history[-1:]:
            self.round(record)
        self._writer.flush()

    def round(self, record: Row) -> None:
        step = record["round"]
        columns = self._begun.columns
        values = numbers(record, self._begun.layers, columns)
        for key, value in values.items():
            self._writer.add_scalar(key if "/" in key else f"history/{key}", value, step)
        for key in (key for key in record if columns[key].kind == "client"):
            known = [value for value in record[key] if value is not None]
            if known:
                self._writer.add_histogram(f"clients/{key}", np.asarray(known), step)
        self._last |= {key: value for key, value in values.items() if key.startswith("test_")}
        self._writer.flush()

    def end(self, status: str) -> None:
        self._writer.add_text("columns", _described(self._begun.columns))
        plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in settings(self._begun).items()}
        reached = epsilons(self._begun.statement) | {f"last/{key}": value for key, value in self._last.items()}
        self._writer.add_hparams(plain, {f"hparams/{key}": v for key, v in reached.items()}, run_name=".")
        self._writer.close()


def _described(columns: Columns) -> str:
    """Return the meaning of the scalars' names, as a Markdown table."""
    numbers = [column for column in columns.values() if column.kind in ("number", "layer")]
    rows = [f"| {c.name} | {c.words} | {c.axis} | {c.better or ''} | {'' if c.public else 'private'} |" for c in numbers]
    return "\n".join(["| name | what | unit | better | |", "| --- | --- | --- | --- | --- |", *rows])


_ARTIFACTS = ("report.html", "statement.json", "statement.md", "config.toml", "versions.json", "summary.json")


class _Mlflow:
    """The tracker (see `trackers.mlflow`)."""

    name = "MLflow"

    def __init__(self, library: Any, uri: str | None, experiment: str) -> None:
        self._library, self._uri, self._experiment = library, uri, experiment

    def begin(self, begun: RunInfo) -> None:
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
                from fedveil.report.report import write_report

                write_report([self._begun.path])
            for name in (*_ARTIFACTS, *TABLES, DECLARED, *(f"{PRIVATE}/{table}" for table in TABLES)):
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
    """Let runs begin one after another: MLflow fails if two create its database or an experiment at the same time."""
    with (Path(tempfile.gettempdir()) / f"fedveil-mlflow-{os.getuid()}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


_MLFLOW = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""MLflow's settings where the environment has none: tell nobody else; give up an absent server in seconds instead of minutes."""


def tensorboard(path: str | Path | None = None) -> Tracker:
    """A tracker that writes TensorBoard's event files.

    Args:
        path: folder for them; by default `tensorboard` in the run directory.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    _library("tensorboard", "tensorboard")
    return TensorBoard(path)


def mlflow(uri: str | None = None, experiment: str | None = None) -> Tracker:
    """A tracker that logs to MLflow.

    Args:
        uri: the tracking server or store; by default what MLflow itself takes (MLFLOW_TRACKING_URI, else a local database).
        experiment: its name; by default MLFLOW_EXPERIMENT_NAME, else `fedveil`.

    Raises:
        ConfigError: MLflow is not installed.
    """
    for variable, value in _MLFLOW.items():
        os.environ.setdefault(variable, value)
    library = _library("mlflow", "mlflow")
    return _Mlflow(library, uri, experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedveil")


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"run.track asks for {extra}, which cannot be imported ({error}): pip install 'fedveil[{extra}]', or leave it out"
        ) from error
