"""Trackers, which follow a run round by round, and the values that they get.

They get the contents of the run directory: its training losses and clients' accuracies are computed from private data without
noise, so a tracker must be as private as the run directory.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fedveil.errors import FedveilError
from fedveil.experiment.config import flat
from fedveil.experiment.run_directory import layer_cells, present
from fedveil.federation.history import Columns
from fedveil.registry import Registry

if TYPE_CHECKING:
    from fedveil.federation.history import Row
    from fedveil.statement.statement import Statement


@dataclass(frozen=True)
class RunInfo:
    """Information for a tracker when a run begins or is resumed.

    Args:
        run: the run's id. path: its directory. config: the whole configuration by section. layers: names of the model's layers.
        history: rows of earlier rounds, if the run is resumed; a tracker adds those that it lacks.
        columns: descriptions of a row's numbers; marked private once a round has stored a value in its private half.
    """

    run: str
    path: Path
    config: Mapping[str, Any]
    statement: Statement
    layers: tuple[str, ...]
    history: Sequence[Row] = ()
    columns: Columns = field(default_factory=Columns)


def numbers(record: Row, layers: Sequence[str], columns: Columns | None = None) -> dict[str, float]:
    """Return every number of a row that is not a client's, by name; a layer's as `column/layer`."""
    columns = columns or Columns()
    values_by_name = {k: float(v) for k, v in record.items() if isinstance(v, int | float) and columns[k].kind == "number"}
    for column, values in layer_cells(record, len(layers), columns).items():
        values_by_name.update({f"{column.name}/{layer}": float(v) for layer, v in zip(layers, values, strict=True)})
    return values_by_name


def settings(begun: RunInfo) -> dict[str, Any]:
    """Return the configuration as `section.key: value`, and the three views' claimed and proven guarantees as text."""
    keys = flat(present(begun.config))
    values = {key: json.dumps(value) if isinstance(value, list) else value for key, value in keys.items()}
    for numbers in begun.statement.views:
        reason = f": {numbers.proven.reason}" if numbers.proven.reason else ""
        values[f"statement.proven.{numbers.view.value}"] = f"{numbers.proven}{reason}"
        if numbers.claimed is not None:
            values[f"statement.claimed.{numbers.view.value}"] = str(numbers.claimed)
    return values


def epsilons(statement: Statement) -> dict[str, float]:
    """Return claimed and proven epsilon by view, if finite."""
    values = {f"proven_epsilon/{v.view.value}": v.proven.epsilon for v in statement.views}
    values |= {f"claimed_epsilon/{v.view.value}": v.claimed.epsilon for v in statement.views if v.claimed is not None}
    return {key: epsilon for key, epsilon in values.items() if math.isfinite(epsilon)}


Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker(Protocol):
    """Follower of a run. An error in `begin` ends the run before training; a later error only disables the tracker."""

    @property
    def name(self) -> str:
        """Return the name for messages."""
        ...

    def begin(self, begun: RunInfo) -> None:
        """Called before the first round."""
        ...

    def round(self, record: Row) -> None:
        """Called after each round, with the history's new row."""
        ...

    def end(self, status: Status) -> None:
        """Called when all files of the run are written, or when it was cut short."""
        ...


TRACKERS: Registry[Callable[[], Tracker]] = Registry("run.track", "tracker", {})


def tracker_named(name: str) -> Tracker:
    """Return a new tracker by its name in `run.track`.

    Raises:
        ConfigError: no installed package provides it.
    """
    return TRACKERS.find(name)()


@contextmanager
def following(trackers: Sequence[Tracker], begun: RunInfo) -> Iterator[Callable[[Row], None]]:
    """Begin with all trackers, pass each round's row to them, and end them however the run ends.

    A tracker that fails after training has begun is not called again, and a warning says so; the run goes on.

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
                    f"{tracker.name} failed and is not called again in this run ({type(error).__name__}: {error}); "
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
