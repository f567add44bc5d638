"""The recipes by name and by paper, and the data that they need; nothing is trained, timed or read for this."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError, nearest
from fedveil.experiment.presets import path_of
from fedveil.registry import registered_files
from fedveil.studies.reproduce.recipe import Recipe, RecipeRow, rows

RECIPES = "recipes/*/*.toml"


def recipe_names() -> list[str]:
    """Return all recipes, `method/table`, in the order of the papers."""
    recipes = registered_files(RECIPES)
    order = list(dict.fromkeys(name.split("/")[0] for name in recipes))
    return sorted(
        recipes,
        key=lambda name: (order.index(name.split("/")[0]), "/fig" in name, int(re.sub(r"\D", "", name.split("/")[1]) or 0)),
    )


def recipes_of(name: str) -> list[str]:
    """Return the recipes that a name stands for: the recipe itself, a file, or all of a paper.

    Raises:
        ConfigError: an unknown name; names the nearest one.
    """
    every = recipe_names()
    if name in every or Path(name).suffix == ".toml":
        return [name]
    if of_paper := [one for one in every if one.split("/")[0] == name]:
        return of_paper
    papers = dict.fromkeys(one.split("/")[0] for one in every)
    raise ConfigError(f"unknown recipe {name!r}{nearest(name, [*every, *papers])}; `fedveil reproduce` lists the recipes")


def listed_recipe(name: str) -> Recipe:
    """Return one of fedveil's own recipes, without the checks of `load_recipe`."""
    return Recipe.model_validate(tomllib.loads(registered_files(RECIPES)[name].read_text(encoding="utf-8")))


def data_of(recipe: Recipe) -> list[str]:
    """Return the data sets that the rows which can be run need."""
    return list(dict.fromkeys(_data_of(recipe, row) for row in rows(recipe) if not row.missing))


def _data_of(recipe: Recipe, row: RecipeRow) -> str:
    layers: list[Mapping[str, Any]] = [recipe.set, *(entry.set for entry in row.entries)]
    for layer in reversed(layers):
        if "data.name" in layer or "data" in layer:
            return str(layer.get("data.name") or layer["data"]["name"])
    return _data_of_preset(next((entry.preset for entry in reversed(row.entries) if entry.preset), recipe.preset))


@cache
def _data_of_preset(preset: str) -> str:
    return str(tomllib.loads(path_of(preset).read_text(encoding="utf-8"))["data"]["name"])
