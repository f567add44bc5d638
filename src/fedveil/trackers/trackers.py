"""Trackers that people use already: TensorBoard and MLflow follow a run as it goes. Neither is imported unless it is asked for.

What they are told is what the run directory holds: training losses and clients' accuracies in it are computed from private
data without noise, so a tracker must be as private as the run directory.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError
from fedveil.trackers.event_files import TensorBoard
from fedveil.trackers.mlflow_run import Mlflow

if TYPE_CHECKING:
    from fedveil.run.tracking import Tracker

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
    return Mlflow(library, uri, experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedveil")


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"run.track asks for {extra}, which cannot be imported ({error}): pip install 'fedveil[{extra}]', or leave it out"
        ) from error
