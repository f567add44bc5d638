"""What is kept of the recipes for the papers' pages was measured with the settings and labels that the recipes have now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedveil.studies.reproduce.recipe import rows
from fedveil.studies.reproduce.recipe_files import changes, load_recipe, settings_digest

KEPT: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "results" / "paper_tables.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_table_is_of_todays_recipe(name: str) -> None:
    recipe = load_recipe(name)
    axes, columns = [axis.name for axis in recipe.axes], [column.label for column in recipe.columns]
    by_labels = {row.labels: row for row in rows(recipe)}
    for scale, table in KEPT[name].items():
        assert table["small"] == (json.loads(json.dumps(changes(recipe))) if scale == "small" else {}), f"{scale}: run it again"
        assert table["rows"]
        for row in table["rows"]:
            today = by_labels[tuple(row["labels"][axis] for axis in axes)]
            assert row["settings"] == settings_digest(recipe, today, scale, row["overrides"]), (
                f"{scale}, {row['labels']}: run it again"
            )
            for column, value in row["values"].items():
                assert value["paper"] == today.published[columns.index(column)]
                assert value["ours"]
