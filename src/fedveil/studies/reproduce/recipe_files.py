"""Load and check recipes by name, and convert their rows to configurations."""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from fedveil.errors import ConfigError, nearest, refusal
from fedveil.experiment.config import Config, override, parse
from fedveil.experiment.presets import names as preset_names
from fedveil.experiment.presets import path_of
from fedveil.registry import registered_files
from fedveil.studies.reproduce.measurements import MEASURES
from fedveil.studies.reproduce.recipe import COLLECTORS, Overrides, Printed, Recipe, RecipeRow, number
from fedveil.studies.reproduce.recipe_list import RECIPES, recipe_names

Scale = Literal["small", "paper"]
SCALES: tuple[Scale, ...] = ("small", "paper")


@dataclass(frozen=True)
class RowJob:
    """The job of one row: its configuration, and the options of the measurement."""

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
    """Return the checked job of one row.

    Args:
        seed: added to the seed of the base configuration. overrides: the user's, `section.key=value` or `measure.key=value`,
            applied last.

    Raises:
        ConfigError: the configuration or an option is invalid; the message names the row.
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
    try:
        for item in overrides:
            override(raw, item)
        options = MEASURES[recipe.measure["name"]].checked(raw.pop("measure"))
        config = parse(raw)
    except ConfigError as problem:
        raise ConfigError(f"row {', '.join(row.labels)}: {problem}") from None
    return RowJob(config.model_copy(update={"run": config.run.model_copy(update={"seed": config.run.seed + seed})}), options)


def settings_digest(recipe: Recipe, row: RecipeRow, scale: Scale, overrides: Sequence[str] = ()) -> str:
    """Return 16 hexadecimal digits of a digest of a row's explicit options, its measurement and its columns.

    Options with default values are not part of it, so new options and changed defaults do not change the digest.
    """
    job = job_of(recipe, row, scale, overrides=overrides)
    given = job.config.model_dump(mode="json", exclude_unset=True)
    columns = [column.model_dump(mode="json") for column in recipe.columns]
    what = [given, recipe.measure["name"], job.options, columns]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def changes(recipe: Recipe) -> dict[str, Any]:
    """Return the changes of the small scale in all rows, by key; and the changes of single entries, by label."""
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


def load_recipe(name: str | Path) -> Recipe:
    """Load a recipe by name or file.

    Raises:
        ConfigError: the name is unknown (the message names the nearest), or the file is not a recipe (the message says why).
    """
    path = Path(name)
    if path.suffix != ".toml":
        if str(name) not in recipe_names():
            raise ConfigError(
                f"unknown recipe {str(name)!r}{nearest(str(name), recipe_names())}; `fedveil reproduce` lists the recipes"
            )
        path = registered_files(RECIPES)[str(name)]
    try:
        text = path.read_text(encoding="utf-8")
        as_printed = {k: v for k, v in tomllib.loads(text, parse_float=Printed).items() if k in ("published", "stated")}
        recipe = Recipe.model_validate({**tomllib.loads(text), **as_printed})
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{path} is not a recipe: {refusal(error, Recipe)}") from None
    problem = _problem(recipe)
    if problem:
        raise ConfigError(f"{path} is not a recipe: {problem}")
    return recipe


def _problem(recipe: Recipe) -> str:
    """Return an error of a recipe that its types do not exclude, or an empty string."""
    labels = {axis.name: [entry.label for entry in axis.entries] for axis in recipe.axes}
    if len(labels) < len(recipe.axes) or any(len(set(own)) < len(own) for own in labels.values()):
        return "each axis needs a name of its own, and labels that differ"
    pictures = ["dots", "curves", *(name for name, own in labels.items() if all(number(label) is not None for label in own))]
    if recipe.picture not in pictures:
        return f"picture = {recipe.picture!r}: unknown; there are {', '.join(pictures)}"
    wanted: list[Mapping[str, Any]] = [recipe.small.keep, *({k: (v,) for k, v in c.relative.items()} for c in recipe.columns)]
    for mentioned in wanted:
        for axis, chosen in mentioned.items():
            if axis not in labels or not set(chosen) <= set(labels[axis]):
                return f"{axis} = {', '.join(chosen)}: no such axis or label; there are {labels}"
    for where, entry in ((axis.name, entry) for axis in recipe.axes for entry in axis.entries):
        others = [label for name, own in labels.items() if name != where for label in own]
        for label in sorted(set(entry.small_with) - set(others)):
            return f"{where} = {entry.label}: small_with.{label}: no label of another axis; there are {', '.join(others)}"
    presets = {recipe.preset, *(entry.preset for axis in recipe.axes for entry in axis.entries)} - {""}
    for preset in sorted(presets - set(preset_names())):
        return f"unknown preset {preset!r}{nearest(preset, preset_names())}"
    if not recipe.missing and not recipe.preset and any(not e.preset and not e.missing for e in recipe.axes[0].entries):
        return "preset: missing; give one for all rows, or one with each entry of the first axis"
    if recipe.measure.get("name") not in MEASURES:
        return f"measure.name = {recipe.measure.get('name')!r}: unknown; there are {', '.join(MEASURES)}"
    for column in recipe.columns:
        if column.collect not in COLLECTORS:
            return f"column {column.label}: collect = {column.collect!r}: unknown; there are {', '.join(COLLECTORS)}"
        if not column.of and not column.missing and not recipe.missing:
            return f"column {column.label}: say what it is `of`, or why it or the recipe is missing"
    return _misshapen(recipe)


def _misshapen(recipe: Recipe) -> str:
    if not recipe.published:
        return ""
    lengths = [len(axis.entries) for axis in recipe.axes] + ([len(recipe.columns)] if len(recipe.columns) > 1 else [])
    level: list[Any] = [recipe.published]
    for name, length in zip([*(axis.name for axis in recipe.axes), "columns"], lengths, strict=False):
        if any(not isinstance(part, list) or len(part) != length for part in level):
            return f"published: every list over {name} needs {length} values, in the order of the axes"
        level = [value for part in level for value in part]
    if any(not isinstance(value, int | float | str) for value in level):
        return "published: values are numbers or text"
    return ""
