"""Trackers that people use already: TensorBoard and MLflow follow a run as it goes. Neither is imported unless it is asked for.

What they are told is what the run directory holds: training losses and clients' accuracies in it are computed from private
data without noise, so a tracker must be as private as the run directory.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fedveil.errors import ConfigError, FedveilError
from fedveil.experiment.trackers.event_files import TensorBoard
from fedveil.experiment.trackers.mlflow_run import Mlflow
from fedveil.experiment.trackers.values import Begun

if TYPE_CHECKING:
    from fedveil.federation.fit import Record

Status = Literal["FINISHED", "FAILED", "KILLED"]


_MLFLOW = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""MLflow's settings where the environment has none: tell nobody else; give up an absent server in seconds instead of minutes."""


class Tracker(Protocol):
    """Something that follows a run. What `begin` raises ends the run before training; afterwards it costs the tracker only."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def begin(self, begun: Begun) -> None:
        """Before the first round."""
        ...

    def round(self, record: Record) -> None:
        """After each round, with the history's new row."""
        ...

    def end(self, status: Status) -> None:
        """When all files of the run are written, or when it was cut short."""
        ...


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
    return Mlflow(library, uri, experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedveil")


TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": tensorboard, "mlflow": mlflow}


@contextmanager
def following(trackers: Sequence[Tracker], begun: Begun) -> Iterator[Callable[[Record], None]]:
    """Begin with all trackers, hand each round's row to them, and end them however the run ends.

    A tracker that fails after training has begun is told nothing more, and a warning says so; the run goes on.

    Raises:
        FedveilError: a tracker cannot begin.
    """
    active: list[Tracker] = []

    def each(tell: Callable[[Tracker], None]) -> None:
        for tracker in list(active):
            try:
                tell(tracker)
            except Exception as error:
                active.remove(tracker)
                warnings.warn(
                    f"{tracker.name} failed and is told nothing more of this run ({type(error).__name__}: {error}); "
                    f"everything is in {begun.path}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    status: Status = "FAILED"
    try:
        for tracker in trackers:
            try:
                tracker.begin(begun)
            except Exception as error:
                raise FedveilError(
                    f"{tracker.name} cannot follow the run: {type(error).__name__}: {error}; nothing was trained: "
                    f"leave it out of run.track, or put it right and resume {begun.path}"
                ) from error
            active.append(tracker)
        yield lambda record: each(lambda tracker: tracker.round(record))
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        each(lambda tracker: tracker.end(status))


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"run.track asks for {extra}, which cannot be imported ({error}): pip install 'fedveil[{extra}]', or leave it out"
        ) from error
