"""Several runs side by side: their scores, and what is claimed, proven and audited of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.accounting.formatting import at_least, at_most
from fedveil.api.run import History, Run, open_run
from fedveil.errors import ConfigError
from fedveil.statement.statement_text import variant_of


class Comparison:
    """Runs side by side; `rows` has a dict for each, `report` writes them as one page."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)

    @property
    def rows(self) -> History:
        """One row a run: method, variant, score, and the three epsilons of the run's own view."""
        return History([_row(run) for run in self.runs])

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        return self.rows.frame()

    def report(self, out: str | Path = "report.html") -> Path:
        """Write the runs as one self-contained HTML page and return its path."""
        from fedveil.pages.report import write_report

        return write_report([run.path for run in self.runs], out)

    def __repr__(self) -> str:
        return "\n".join(f"{row['run']}: " + ", ".join(f"{k} {v}" for k, v in row.items() if k != "run") for row in self.rows)

    def _repr_html_(self) -> str:
        return self.rows._repr_html_()


def compare(runs: Sequence[Run | str | Path]) -> Comparison:
    """Return runs, or run directories, side by side.

    Raises:
        ConfigError: no run, or a directory that is none.
    """
    if not runs:
        raise ConfigError("there is nothing to compare: give at least one run")
    return Comparison([run if isinstance(run, Run) else open_run(run) for run in runs])


def _row(run: Run) -> dict[str, Any]:
    statement = run.privacy
    claimed, audited = statement.own.claimed, statement.own.audited
    return {
        "run": str(run.path),
        "method": statement.method,
        "variant": variant_of(statement),
        "score": run.score,
        "claimed": None if claimed is None else at_most(claimed.epsilon),
        "proven": at_most(statement.proven.epsilon),
        "audited": None if audited is None else at_least(audited.epsilon),
        "scope": str(statement.scope),
    }
