"""From a recipe's rows to checked configurations, at the paper's scale or the small one."""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedveil.configuration.config import Config, parse
from fedveil.configuration.presets import path_of
from fedveil.errors import ConfigError
from fedveil.studies.reproduce.measurements import MEASURES
from fedveil.studies.reproduce.recipe import Overrides, Recipe, RecipeRow

Scale = Literal["small", "paper"]
SCALES: tuple[Scale, ...] = ("small", "paper")


@dataclass(frozen=True)
class RowJob:
    """What is done for one row: its configuration, and the options of the measurement."""

    config: Config
    options: dict[str, Any]


def job_of(
    recipe: Recipe,
    row: RecipeRow,
    scale: Scale,
    *,
    seed: int = 0,
    data_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> RowJob:
    """The checked job of one row.

    Args:
        seed: added to the seed of the base configuration. overrides: the user's, `section.key=value`, applied last.

    Raises:
        ConfigError: a configuration or an option that cannot be; names the row.
    """
    preset = next((entry.preset for entry in reversed(row.entries) if entry.preset), recipe.preset)
    raw = {**tomllib.loads(path_of(preset).read_text(encoding="utf-8")), "measure": dict(recipe.measure)}
    layers: list[Overrides] = [recipe.set, *(entry.set for entry in row.entries)]
    if scale == "small":
        layers += [recipe.small.set, *(entry.small for entry in row.entries)]
        layers += [entry.small_with[label] for entry in row.entries for label in row.labels if label in entry.small_with]
    for layer in layers:
        for key, value in layer.items():
            _put(raw, key, copy.deepcopy(value))
    if data_dir is not None:
        _put(raw, "data.data_dir", str(data_dir))
    measure = raw.pop("measure")
    try:
        options = MEASURES[recipe.measure["name"]].checked(measure)
        config = parse(raw, overrides)
    except ConfigError as problem:
        raise ConfigError(f"row {', '.join(row.labels)}: {problem}") from None
    return RowJob(config.model_copy(update={"run": config.run.model_copy(update={"seed": config.run.seed + seed})}), options)


def settings_digest(recipe: Recipe, row: RecipeRow, scale: Scale, overrides: Sequence[str] = ()) -> str:
    """16 hexadecimal digits of all options that preset, recipe and user give a row, of what is measured and of its columns.

    Options that nobody gives do not count: neither a new one nor a default that was changed is seen.
    """
    job = job_of(recipe, row, scale, overrides=overrides)
    given = job.config.model_dump(mode="json", exclude_unset=True)
    columns = [column.model_dump(mode="json") for column in recipe.columns]
    what = [given, recipe.measure["name"], job.options, columns]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def changes(recipe: Recipe) -> dict[str, Any]:
    """What the small scale changes in all rows, by key; and what single entries change, by their label."""
    own: dict[str, Any] = {}
    for entry in (entry for axis in recipe.axes for entry in axis.entries):
        own |= {f"{key} ({entry.label})": value for key, value in entry.small.items()}
        for label, overrides in entry.small_with.items():
            own |= {f"{key} ({entry.label}, {label})": value for key, value in overrides.items()}
    return {**recipe.small.set, **own}


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    target = raw
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{key}: {section} is not a section")
    target[last] = value
