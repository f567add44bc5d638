"""Compare methods at equal guarantee over seeds: plan, run the grid, rank, test, and leave tables and pictures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, without_free_keys
from fedveil.statement.statement_text import TextSection
from fedveil.studies.compare.comparison_plan import By, ComparisonListener, ComparisonSpec, column_of, plan
from fedveil.studies.compare.comparison_rows import (
    Row,
    assumptions_of,
    blocks,
    problem_sentences,
    promise_sentences,
    rows_of,
    sample_sentences,
    short_names,
)
from fedveil.studies.grid import run_grid
from fedveil.tasks.task import Column


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Args:
        path: its directory, with a run directory for each cell. rows: one per method, partition and epsilon, in the order of the
            specification. The other fields are those of `ComparisonSpec`.
    """

    path: Path
    config: Config
    by: By
    metric: str
    methods: Sequence[str]
    epsilons: Sequence[float]
    partitions: Sequence[str]
    seeds: Sequence[int]
    rows: tuple[Row, ...]

    @property
    def names(self) -> dict[str, str]:
        """The short names of the methods."""
        return short_names(self.methods)

    @property
    def column(self) -> Column:
        """The compared number."""
        return column_of(self.config, self.metric)

    @property
    def what(self) -> str:
        """The compared number in words."""
        return f"{self.column.phrase} after the last round"

    @property
    def blocks(self) -> dict[tuple[str, float], list[Row]]:
        """Blocks of rows that may be compared with each other, by partition and epsilon, best first."""
        return blocks(self.rows)

    @property
    def failed(self) -> bool:
        """Return whether a row has no result although it could be run."""
        return any(row.states and not row.values for row in self.rows)

    @property
    def problems(self) -> dict[str, list[str]]:
        """Sentences about rows that were not run or failed, each with its guarantees."""
        return problem_sentences(self.rows, self.names, self.by)

    @property
    def assumptions(self) -> TextSection:
        """The assumptions of the proven epsilons."""
        return assumptions_of(self.rows, self.names)

    @property
    def sentences(self) -> list[str]:
        """Sentences about the sample, the test and its limits, and the meaning of the epsilons."""
        most = max((sum(r.complete for r in block) for block in self.blocks.values()), default=0)
        return [*sample_sentences(self.seeds, most, self.what), *promise_sentences(self.rows, self.by)]


def compare(
    spec: ComparisonSpec, out: str | Path | None = None, jobs: int | None = None, listener: ComparisonListener | None = None
) -> Comparison:
    """Run every method at every epsilon with every seed, and compare them at equal guarantee.

    The same call continues an interrupted comparison; more methods, epsilons or seeds in the same directory extend it.

    Args:
        out: directory; by default one under runs/ that belongs to this configuration.
        jobs: cells in parallel; by default the number of cores. listener: called for checks, the plan and the progress of runs.

    Raises:
        ConfigError: no method can be run, or the directory belongs to another comparison.
    """
    listener = listener or ComparisonListener()
    planned = plan(spec, listener)
    cells = [cell for row in planned for cell in row.cells]
    if not cells:
        reasons = "; ".join(dict.fromkeys(f"{row.method}: {row.reason}" for row in planned))
        raise ConfigError(f"no method can be run in this setting. {reasons}")
    folder = Path(out) if out is not None else default_out(spec.config)
    listener.planned(planned)
    states = run_grid(cells, folder, jobs, listener)
    rows = rows_of(planned, {s.cell.name: s for s in states}, column_of(spec.config, spec.metric))
    return Comparison(path=folder, rows=tuple(rows), **{field.name: getattr(spec, field.name) for field in fields(spec)})


def default_out(config: Config) -> Path:
    """Return the directory for comparisons of a configuration, always the same, so that a comparison can continue."""
    shared = without_free_keys(config.resolved())
    shared["run"].pop("seed")
    digest = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs") / f"compare-{config.data.name}-{digest}"
