"""Trackers that people use already: TensorBoard and MLflow follow a run as it goes."""

from fedveil.trackers.trackers import mlflow, tensorboard

__all__ = ["mlflow", "tensorboard"]
