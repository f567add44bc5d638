"""Rows that learned nothing: where two of them are compared, their difference says nothing."""

from __future__ import annotations

from fedveil.studies.reproduce.reproduction import Reproduction, RowOutcome

ACCURACIES = ("test_accuracy", "mean_personal_accuracy", "mean_personal_test_accuracy", "client_accuracy")
"""Series that are accuracies."""
NEAR, SHARE = 1.5, 0.05
"""At chance is an accuracy of at most NEAR times that of guessing, and no further above it than SHARE of the way to 1."""


def chance_remarks(done: Reproduction) -> list[str]:
    """One sentence for each column and data set of which two or more rows are at chance."""
    found = []
    for i, column in enumerate(done.recipe.columns):
        if column.of not in ACCURACIES or column.relative:
            continue
        by_level: dict[float, list[str]] = {}
        for outcome in done.outcomes:
            level = _at_chance(outcome, i, column.times)
            if level is not None:
                by_level.setdefault(level, []).append(f"{', '.join(outcome.row.labels)} {outcome.mean(i):.3g}")
        for level, rows in by_level.items():
            if len(rows) > 1:
                arms = "both arms" if len(rows) == 2 else f"{len(rows)} arms"
                found.append(
                    f"{arms} are at chance ({column.label}: {'; '.join(rows)}, against {column.times * level:.3g} by "
                    "guessing): their difference says nothing."
                )
    return [text[0].upper() + text[1:] for text in found]


def _at_chance(outcome: RowOutcome, column: int, times: float) -> float | None:
    """The chance level of a row that is not above it, else None."""
    ours = outcome.mean(column)
    guess = outcome.chance
    if ours is None or guess is None or ours > times * min(NEAR * guess, guess + SHARE * (1 - guess)):
        return None
    return guess
