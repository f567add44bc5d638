"""All settings run on the private data, and looked at: each run's statement has the composed epsilon of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.configuration.public_setting import calibrated_setting
from fedveil.errors import FedveilError
from fedveil.run.run_directory import write_json
from fedveil.studies.grid.cell import Cell, CellState, Listener
from fedveil.studies.grid.run_grid import run_grid
from fedveil.studies.tune.private_data import SearchSpec
from fedveil.studies.tune.proxy_grid import combinations


@dataclass(frozen=True)
class Looked:
    """A run that was looked at: its state, its setting, and its score, better where higher."""

    state: CellState
    setting: Mapping[str, Any]
    score: float


def look_at_all(spec: SearchSpec, out: Path, jobs: int | None = None, listener: Listener | None = None) -> list[Looked]:
    """Run every setting in `out`, where an interrupted search continues; returns what ended, best first.

    Each has the noise at which it alone would cost privacy.epsilon; what is proven of it counts all of them.

    Raises:
        FedveilError: no setting could be run.
    """
    settings = combinations(spec.grid)
    noise = calibrated_setting(spec.candidates({"runs": 1})[0])[1].z
    configs = spec.candidates({"runs": len(settings)}, epsilon=None, noise_multiplier=noise)
    cells = [Cell(f"setting-{i}", config, {"setting": i}) for i, config in enumerate(configs)]
    states = run_grid(cells, out, jobs, listener)
    scores = [_score(spec, state) for state in states]
    ranked = sorted(((score, i) for i, score in enumerate(scores) if score is not None), reverse=True)
    if not ranked:
        raise FedveilError(f"no setting could be run; the first reason: {states[0].error}")
    trials = [{"setting": settings[i], "score": scores[i], "error": state.error} for i, state in enumerate(states)]
    write_json(out / "tuning.json", {"runs": len(settings), "chosen": cells[ranked[0][1]].name, "trials": trials})
    return [Looked(states[i], settings[i], score) for score, i in ranked]


def _score(spec: SearchSpec, state: CellState) -> float | None:
    """By which a run is chosen, better where higher; None where it failed."""
    if state.error or state.state != "done":
        return None
    if spec.score_noise is not None:
        return float(state.summary["selection_score"])
    return None if state.score is None else state.cell.main.sign * state.score
