"""What recipes gave, kept for the pages of the papers (docs/papers).

    fedveil reproduce RECIPE [--scale paper] [--only AXIS=LABEL] --data-dir DIR
    python benchmarks/paper_tables.py reproduced            # the folder that the recipes share

Every result.json below the folder goes into benchmarks/results/paper_tables.json: rows by their labels and the user's settings,
a number for each seed. A row that is there already is replaced; when the settings of a small scale have changed, rows that
they concern are dropped. `tests/studies/test_paper_tables.py` fails while rows of settings that a recipe, or its preset, no
longer has are kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fedveil.studies.reproduce.recipe import rows
from fedveil.studies.reproduce.recipe_files import Scale, load_recipe, settings_digest
from harness import keep, kept


def of_today(name: str, scale: Scale, kept: dict[str, Any]) -> bool:
    """Whether the recipe would give this row the settings that it was measured with."""
    recipe = load_recipe(name)
    axes = [axis.name for axis in recipe.axes]
    row = next((row for row in rows(recipe) if dict(zip(axes, row.labels, strict=True)) == kept["labels"]), None)
    return row is not None and kept["settings"] == settings_digest(recipe, row, scale, kept["overrides"])


def put(kept: dict[str, Any], result: dict[str, Any]) -> None:
    """Add one recipe's result to what is kept."""
    tables = kept.setdefault(result["recipe"], {})
    table = tables.setdefault(result["scale"], {"small": result["small"], "rows": []})
    if table["small"] != result["small"]:
        table["small"] = result["small"]
        table["rows"] = [row for row in table["rows"] if of_today(result["recipe"], result["scale"], row)]
    for row in result["rows"]:
        values = {value["column"]: {"paper": value["paper"], "ours": value["seeds"]} for value in row["values"] if value["seeds"]}
        if values:
            one = {"labels": row["labels"], "overrides": result["overrides"], "settings": row["settings"], "values": values}
            others = [old for old in table["rows"] if any(old[key] != one[key] for key in ("labels", "overrides"))]
            table["rows"] = [*others, one]


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) == 2 else sys.exit(__doc__)
    tables: dict[str, Any] = kept("paper_tables")
    for path in sorted(folder.rglob("result.json")):
        result = json.loads(path.read_text())
        if all("settings" in row for row in result["rows"]):
            put(tables, result)
            print(path)
        else:
            print(f"{path}: left out, its rows have no digest of their settings: run the recipe again (finished runs stay)")
    keep("paper_tables", dict(sorted(tables.items())))
