"""What a tracker gets of a run: its settings, its numbers, its guarantees."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.configuration.config import flat
from fedveil.federation.history import Columns
from fedveil.run.history_files import layer_cells
from fedveil.run.run_directory import present

if TYPE_CHECKING:
    from fedveil.federation.history import Row
    from fedveil.statement.statement import Statement


@dataclass(frozen=True)
class Begun:
    """What a tracker gets when a run begins or goes on.

    Args:
        run: the run's id. path: its directory. config: the whole configuration by section. layers: names of the model's layers.
        history: rows of the rounds finished before, if the run is resumed; what a tracker lacks of them it makes up for.
        columns: what the numbers of a row are, in words; marked private once a round has kept a value so.
    """

    run: str
    path: Path
    config: Mapping[str, Any]
    statement: Statement
    layers: tuple[str, ...]
    history: Sequence[Row] = ()
    columns: Columns = field(default_factory=Columns)


def numbers(record: Row, layers: Sequence[str], columns: Columns | None = None) -> dict[str, float]:
    """Every number of a row that is not a client's, by name; one of a layer as `column/layer`."""
    columns = columns or Columns()
    found = {k: float(v) for k, v in record.items() if isinstance(v, int | float) and columns[k].kind == "number"}
    for column, values in layer_cells(record, len(layers), columns).items():
        found.update({f"{column.name}/{layer}": float(v) for layer, v in zip(layers, values, strict=True)})
    return found


def settings(begun: Begun) -> dict[str, Any]:
    """The configuration as `section.key: value`, and the three views' claimed and proven guarantees as text."""
    keys = flat(present(begun.config))
    found = {key: json.dumps(value) if isinstance(value, list) else value for key, value in keys.items()}
    for numbers in begun.statement.views:
        reason = f": {numbers.proven.reason}" if numbers.proven.reason else ""
        found[f"statement.proven.{numbers.view.value}"] = f"{numbers.proven}{reason}"
        if numbers.claimed is not None:
            found[f"statement.claimed.{numbers.view.value}"] = str(numbers.claimed)
    return found


def epsilons(statement: Statement) -> dict[str, float]:
    """Claimed and proven epsilon by view, where finite."""
    found = {f"proven_epsilon/{v.view.value}": v.proven.epsilon for v in statement.views}
    found |= {f"claimed_epsilon/{v.view.value}": v.claimed.epsilon for v in statement.views if v.claimed is not None}
    return {key: epsilon for key, epsilon in found.items() if math.isfinite(epsilon)}
