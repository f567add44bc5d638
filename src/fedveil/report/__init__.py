"""Everything that shows a run: report, comparison and explorer pages, figures, trackers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedveil.report.trackers import mlflow, tensorboard

__all__ = ["mlflow", "tensorboard"]

REGISTERED = {
    "tracker.tensorboard": "fedveil.report.trackers:tensorboard",
    "tracker.mlflow": "fedveil.report.trackers:mlflow",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("fedveil.report.trackers"), name)
