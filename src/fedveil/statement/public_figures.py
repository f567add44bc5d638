"""What a run directory adds to its statement: the public figures of its last evaluation, its data set, its closing digest."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil.accounting.formatting import number
from fedveil.errors import ConfigError
from fedveil.statement.institution_facts import fact
from fedveil.statement.statement_text import Item


@dataclass(frozen=True)
class RunFigures:
    """Public facts of a run; what a run that has not ended, or an older one, lacks is empty.

    Args:
        data: name of the data set. rounds: finished ones. ended: why no more. metrics: of the last evaluation on test data.
        closing: digest of the closed ledger, 64 hex digits.
    """

    data: str = ""
    rounds: int | None = None
    ended: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    closing: str = ""

    def training(self) -> list[Item]:
        """What was trained on, and how long."""
        found = [fact(f"data set: {self.data}", "data.json: name")] if self.data else []
        if self.rounds is None:
            return [*found, fact("the run has not ended", "summary.json")]
        ended = f", ended {self.ended}" if self.ended else ""
        return [*found, fact(f"{self.rounds} rounds finished{ended}", "summary.json: rounds", "summary.json: ended")]

    def evaluation(self) -> list[Item]:
        """The figures of the last evaluation; private figures are never among them."""
        return [fact(f"{name}: {number(value)}", f"summary.json: final.{name}") for name, value in self.metrics.items()]

    def checking(self) -> list[Item]:
        """The digest under which everybody can check the run."""
        if not self.closing:
            return [fact("the ledger is not closed: the run has no closing digest", "ledger.sqlite: closing")]
        text = f"closing digest {self.closing}, to be checked by `fedveil verify RUN --pin DIGEST`"
        return [fact(text, "ledger.sqlite: closing")]


def read_run_figures(run: Path, closing: str) -> RunFigures:
    """The public figures of a run directory; nothing of its private folder is read.

    Args:
        closing: the digest that verification found at the end of the ledger, or an empty string.

    Raises:
        ConfigError: a file of it is damaged.
    """
    summary, card = (_json(run / name) for name in ("summary.json", "data.json"))
    final = summary.get("final", {})
    metrics = {name: value for name, value in sorted(final.items()) if name.startswith("test_") and isinstance(value, float)}
    return RunFigures(card.get("name", ""), summary.get("rounds"), summary.get("ended", ""), metrics, closing)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if isinstance(value, dict):
            return value
        problem = "not an object"
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error)
    raise ConfigError(f"{path} cannot be read ({problem}): give a run directory as `fedveil run` left it")
