"""Compare methods at equal guarantee over seeds: plan, run the grid, rank, test, and leave tables and pictures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedveil.configuration.config import Config, without_free_keys
from fedveil.errors import ConfigError
from fedveil.studies.compare.comparison_plan import By, Planned, plan
from fedveil.studies.compare.comparison_rows import Row, blocks, rows_of
from fedveil.studies.compare.comparison_text import problem_sentences, promise_sentences, sample_sentences, short_names
from fedveil.studies.grid.run_grid import CellState, run_grid

METRICS = {
    "test_accuracy": "test accuracy of the final model",
    "test_f1": "F1 score of the final model",
    "mean_personal_accuracy": "mean accuracy of the clients' own models on their own test examples",
}
"""What can be compared, larger is better."""


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Args:
        path: its directory, with a run directory for each cell. config: what all methods share. by: which guarantee is equal.
        metric: the column compared. methods, epsilons, partitions, seeds: as asked for.
        rows: one a method, partition and epsilon, in the asked order.
    """

    path: Path
    config: Config
    by: By
    metric: str
    methods: tuple[str, ...]
    epsilons: tuple[float, ...]
    partitions: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def names(self) -> dict[str, str]:
        """The methods under short names."""
        return short_names(self.methods)

    @property
    def what(self) -> str:
        """The compared number in words."""
        return METRICS[self.metric]

    @property
    def blocks(self) -> dict[tuple[str, float], list[Row]]:
        """By partition and epsilon, the rows that may be compared with each other, best first."""
        return blocks(self.rows)

    @property
    def failed(self) -> bool:
        """Whether a row that could be run has no number."""
        return any(row.states and not row.values for row in self.rows)

    @property
    def problems(self) -> dict[str, list[str]]:
        """What was not run or went wrong, each with the guarantees at which it did."""
        return problem_sentences(self.rows, self.names, self.by)

    @property
    def sentences(self) -> list[str]:
        """The sample, the test and its limits, and what the epsilons mean."""
        most = max((sum(r.complete for r in block) for block in self.blocks.values()), default=0)
        return [*sample_sentences(self.seeds, most, self.what), *promise_sentences(self.rows, self.by)]


def compare(
    config: Config,
    methods: Sequence[str],
    epsilons: Sequence[float],
    seeds: int | Sequence[int] = 3,
    *,
    partitions: Sequence[str] = (),
    by: By = "proven",
    metric: str = "test_accuracy",
    out: str | Path | None = None,
    jobs: int | None = None,
    on_step: Callable[[str], None] | None = None,
    on_start: Callable[[Sequence[Planned], Sequence[CellState]], None] | None = None,
    on_change: Callable[[CellState, float | None], None] | None = None,
) -> Comparison:
    """Run every method at every epsilon with every seed, and compare them at equal guarantee.

    The same call continues an interrupted comparison; more methods, epsilons or seeds in the same directory extend it.

    Args:
        config: what all methods share; its method section counts for that method only.
        methods: `name` or `name:key=value:key=value`. epsilons: guarantees; inf is a run without noise.
        seeds: how many, counted from `run.seed`, or which. Each has its own initial model, partition, batches and noise.
        partitions: `kind:key=value:...`; none for that of the configuration.
        by: `proven`, the proven variants at equal proven epsilon; `claimed`, the published ones at equal claimed epsilon.
        metric: a key of `METRICS`. out: directory; by default one under runs/ that belongs to this configuration.
        jobs: cells at a time; by default the cores. on_step: told what is being checked.
        on_start: given the rows, and the states of their cells, before training. on_change: as in `run_grid`.

    Raises:
        ConfigError: nothing to compare, an impossible argument, or a directory of another comparison.
    """
    if by not in ("proven", "claimed"):
        raise ConfigError(f"--by {by}: there are proven and claimed")
    if metric not in METRICS:
        raise ConfigError(f"--metric {metric}: there are {', '.join(METRICS)}")
    if isinstance(seeds, int):
        if seeds < 1:
            raise ConfigError(f"--seeds {seeds}: at least 1 seed is needed, 3 or more to see a spread")
        seeds = range(config.run.seed, config.run.seed + seeds)
    if not methods or not epsilons or not seeds:
        raise ConfigError("give at least one method, one epsilon and one seed")
    planned = plan(config, methods, epsilons, seeds, partitions, by, on_step, metric)
    cells = [cell for row in planned for cell in row.cells]
    if not cells:
        reasons = "; ".join(dict.fromkeys(f"{row.method}: {row.reason}" for row in planned))
        raise ConfigError(f"no method can be run in this setting. {reasons}")
    folder = Path(out) if out is not None else default_out(config)

    def begin(states: Sequence[CellState]) -> None:
        if on_start is not None:
            on_start(planned, states)

    states = run_grid(cells, folder, jobs, begin, on_change)
    rows = rows_of(planned, {s.cell.name: s for s in states}, metric)
    return Comparison(folder, config, by, metric, tuple(methods), tuple(epsilons), tuple(partitions), tuple(seeds), tuple(rows))


def default_out(config: Config) -> Path:
    """The directory of the comparisons of a configuration: the same for the same configuration, so that they continue."""
    shared = without_free_keys(config.model_dump(mode="json", exclude={"run": {"seed"}}))
    digest = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs") / f"compare-{config.data.name}-{digest}"
