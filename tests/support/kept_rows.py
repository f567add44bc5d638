"""Rows of the papers' tables that are kept in benchmarks/results, by recipe and labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
KEPT: dict[str, Any] = json.loads((RESULTS / "paper_tables.json").read_text(encoding="utf-8"))
ON_FASHION = ["data.name=fashion-mnist"]
LABELS = ["measure.change=labels"]
"""Sensitivity to all labels of a client; without it, to one record."""
ACCURACY = "average accuracy (%)"


def kept(recipe: str, column: str, *labels: str, scale: str = "small", overrides: list[str] | None = None) -> list[float]:
    """The seeds of the one kept row that has all these labels, or nothing."""
    rows = [
        row["values"][column]["ours"]
        for row in KEPT[recipe][scale]["rows"]
        if row["overrides"] == (overrides or []) and set(labels) <= set(row["labels"].values())
    ]
    assert len(rows) < 2
    return rows[0] if rows else []
