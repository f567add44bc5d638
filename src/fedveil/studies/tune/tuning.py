"""Tuning on a public proxy: it costs the protected data nothing, since nothing of them is used."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.configuration.config import Config, parse
from fedveil.errors import FedveilError
from fedveil.run.run_directory import write_config, write_json
from fedveil.studies.grid.cell import Listener
from fedveil.studies.grid.run_grid import run_grid
from fedveil.studies.tune.proxy_grid import TuningSpec, overrides
from fedveil.tasks.column import Column


@dataclass(frozen=True)
class TriedSetting:
    """One setting with its scores on the proxy's test set, one a seed; NaN where a run failed, with the reason."""

    setting: Mapping[str, Any]
    scores: tuple[float, ...]
    error: str = ""

    @property
    def mean(self) -> float:
        """Of the scores."""
        return statistics.mean(self.scores)


@dataclass(frozen=True)
class Tuned:
    """The outcome: trials, best first; the configuration with the best one's keys; the metric that decided."""

    trials: tuple[TriedSetting, ...]
    config: Config
    metric: Column


def tune_on(spec: TuningSpec, out: Path, jobs: int | None = None, listener: Listener | None = None) -> Tuned:
    """Run the grid on the proxy, in `out`, where an interrupted one continues; write `tuned.toml` and `tuning.json` there.

    Raises:
        FedveilError: no setting could be run.
    """
    cells = spec.cells()
    states = run_grid(cells, out, jobs, listener)
    metric = cells[0].main
    trials = []
    for i, setting in enumerate(spec.settings()):
        own = [state for state in states if state.cell.labels["setting"] == i]
        error = next((state.error for state in own if state.error), "")
        scores = tuple(float("nan") if state.score is None or state.error else state.score for state in own)
        trials.append(TriedSetting(setting, scores, error))
    right = sorted((t for t in trials if not t.error), key=lambda t: -metric.sign * t.mean)
    if not right:
        raise FedveilError(f"no setting could be run on {spec.proxy}; the first reason: {trials[0].error}")
    chosen = parse(json.loads(spec.config.model_dump_json()), overrides(right[0].setting))
    tuned = Tuned((*right, *(t for t in trials if t.error)), chosen, metric)
    write_config(out / "tuned.toml", chosen.resolved())
    write_json(out / "tuning.json", record(spec, tuned))
    return tuned


def record(spec: TuningSpec, tuned: Tuned) -> dict[str, Any]:
    """What was tried, on what, and what came out."""
    return {
        "on": spec.proxy,
        "metric": tuned.metric.name,
        "runs": len(tuned.trials) * spec.seeds,
        "chosen": dict(tuned.trials[0].setting),
        "trials": [{"setting": dict(t.setting), "scores": list(t.scores), "error": t.error} for t in tuned.trials],
    }
