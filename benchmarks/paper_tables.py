"""What recipes gave, kept for the pages of the papers (docs/papers).

    fedveil reproduce RECIPE [--scale paper] [--only AXIS=LABEL] --data-dir DIR
    python benchmarks/paper_tables.py reproduced            # the folder that the recipes share

Every result.json below the folder goes into benchmarks/results/paper_tables.json: rows by their labels and the user's settings,
a number for each seed. A row that is there already is replaced; when the settings of a small scale have changed, rows that
they concern are dropped. `tests/studies/test_paper_tables.py` fails while rows of settings that a recipe, or its preset, no
longer has are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedveil.studies.reproduce.recipe import rows
from fedveil.studies.reproduce.recipe_files import Scale, load_recipe, settings_digest

OUT = Path(__file__).resolve().parent / "results" / "paper_tables.json"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    kept: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    found = sorted(parser.parse_args().folder.rglob("result.json"))
    results = {path: json.loads(path.read_text()) for path in found}
    old = [path for path, result in results.items() if not all("settings" in row for row in result["rows"])]
    for path in old:
        print(f"{path}: left out, its rows have no digest of their settings: run the recipe again (finished runs stay)")
        del results[path]
    for result in results.values():
        put(kept, result)
    OUT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    print(f"{OUT}: {len(results)} results")


if __name__ == "__main__":
    main()
