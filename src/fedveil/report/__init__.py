"""Everything that shows a run: report, comparison and explorer pages, figures, trackers."""

from __future__ import annotations

from fedveil.report.trackers import mlflow, tensorboard

__all__ = ["mlflow", "tensorboard"]
