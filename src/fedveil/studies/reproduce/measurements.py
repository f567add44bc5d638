"""What is done with a row's configuration: measurements by name. Most read a finished run; some need no training at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.configuration.config import Config
from fedveil.errors import ConfigError, nearest
from fedveil.run.assembly import prepare
from fedveil.run.history_files import Row
from fedveil.run.recorded_run import read_run
from fedveil.statement.certify import certify_config
from fedveil.studies.reproduce import recipe_attacks as attacks
from fedveil.studies.reproduce.collect import Measured
from fedveil.studies.twin import Change, twin_runs


@dataclass(frozen=True)
class Measure:
    """A measurement.

    trains: whether it needs the row's run. series: from the configuration, the run's directory (None where it does not train),
    a folder in which it may leave files, and its options.
    """

    summary: str
    trains: bool
    series: Callable[..., Measured]

    def checked(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options without `name`; ConfigError for one that this measurement does not have."""
        given = {key: value for key, value in options.items() if key != "name"}
        allowed = list(inspect.signature(self.series).parameters)[3:]
        for key in given:
            if key not in allowed:
                raise ConfigError(f"measure.{key}: unknown{nearest(key, allowed)}; it takes {', '.join(allowed) or 'nothing'}")
        return given


def of_run(config: Config, run: Path | None, folder: Path) -> Measured:
    """The history's columns, and the mean of the clients' accuracies of the global model."""
    assert run is not None
    data = read_run(run)
    found: dict[str, list[tuple[int, float]]] = {name: _points(data.history, name) for name in data.columns}
    found["client_accuracy"] = _means(data.clients)
    return found


def of_statement(config: Config, run: Path | None, folder: Path) -> Measured:
    """Claimed epsilon, and the proven one in the configuration's own view."""
    found = {}
    for view in certify_config(config).views:
        if view.view is config.privacy.view:
            found["proven_epsilon"] = [(1, view.proven.epsilon)]
        if view.claimed is not None:
            found["claimed_epsilon"] = [(1, view.claimed.epsilon)]
    return found


def of_twins(config: Config, run: Path | None, folder: Path, *, client: int = 0, change: Change = "labels") -> Measured:
    """||w_t - w'_t|| after each round of two runs that differ in one client's data, and the first one's last accuracy."""
    distances, history = twin_runs(config, client, change)
    scored = [(int(row["round"]) + 1, float(row["test_accuracy"])) for row in history if "test_accuracy" in row]
    return {"sensitivity": list(enumerate(distances, 1)), "test_accuracy": scored}


def of_partition(config: Config, run: Path | None, folder: Path, *, curious: int = 0) -> Measured:
    """Labels and examples that the curious client and the others hold."""
    prepared = prepare(config)
    counts = prepared.partition.label_counts(prepared.dataset.y_train, prepared.dataset.info.classes)
    others = np.delete(counts, curious, 0)
    figures = {
        "labels_curious": (counts[curious] > 0).sum(),
        "labels_others": np.median((others > 0).sum(1)),
        "examples_curious": counts[curious].sum(),
        "examples_least": others.sum(1).min(),
        "examples_most": others.sum(1).max(),
    }
    return {name: [(1, float(value))] for name, value in figures.items()}


def _points(rows: list[Row], column: str) -> list[tuple[int, float]]:
    return [(int(row["round"]) + 1, float(row[column])) for row in rows if isinstance(row.get(column), float)]


def _means(clients: list[Row]) -> list[tuple[int, float]]:
    by_round: dict[int, list[float]] = {}
    for row in clients:
        if isinstance(row.get("accuracy"), float):
            by_round.setdefault(int(row["round"]) + 1, []).append(row["accuracy"])
    return [(t, sum(values) / len(values)) for t, values in sorted(by_round.items())]


MEASURES: dict[str, Measure] = {
    "run": Measure("train, and read the history", True, of_run),
    "statement": Measure("certify", False, of_statement),
    "twin": Measure("train twice on data that differ in one client, and compare the models", False, of_twins),
    "partition": Measure("deal the data out, and count", False, of_partition),
    "inversion": Measure("reconstruct images from single-example uploads at the initial model", False, attacks.inversion),
    "inversion-after": Measure("train, then reconstruct images from single-example uploads", True, attacks.inversion),
    "labels-after": Measure("train, then read labels off the model's outputs", True, attacks.label_reconstruction),
    "attribute-after": Measure("train, then infer an attribute from the model's features", True, attacks.attribute_inference),
    "extraction-after": Measure("train, then train a student on the model's answers", True, attacks.knowledge_extraction),
    "clients-after": Measure("train, then tell which client sent which upload", True, attacks.client_identification),
}
