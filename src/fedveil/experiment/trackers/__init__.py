"""Trackers that people use already: TensorBoard and MLflow follow a run as it goes."""

from fedveil.experiment.trackers.trackers import Tracker, following, mlflow, tensorboard

__all__ = ["Tracker", "following", "mlflow", "tensorboard"]
