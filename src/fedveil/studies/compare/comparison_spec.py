"""What a comparison is asked to compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedveil.configuration.config import Config
from fedveil.configuration.public_setting import task_of
from fedveil.errors import ConfigError
from fedveil.federation.history import columns_of
from fedveil.tasks.column import Column

By = Literal["proven", "claimed"]


@dataclass(frozen=True)
class ComparisonSpec:
    """Every method at every epsilon with every seed, at equal guarantee.

    Args:
        config: what all methods share; its method section counts for that method only.
        methods: `name` or `name:key=value:key=value`; a key with a dot is one of another section.
        epsilons: guarantees; inf is a run without noise.
        seeds: each has its own initial model, partition, batches and noise (see `seeds_from`).
        partitions: `kind`, `kind:value` or `kind:key=value:...`; none for that of the configuration.
        by: `proven`, the proven variants at equal proven epsilon; `claimed`, the published ones at equal claimed epsilon.
        metric: the number that is compared, a column of the history after the last round; empty: the main metric of the
            task.

    Raises:
        ConfigError: nothing to compare, something given twice, or an impossible value.
    """

    config: Config
    methods: Sequence[str]
    epsilons: Sequence[float]
    seeds: Sequence[int]
    partitions: Sequence[str] = ()
    by: By = "proven"
    metric: str = ""

    def __post_init__(self) -> None:
        if self.by not in ("proven", "claimed"):
            raise ConfigError(f"--by {self.by}: there are proven and claimed")
        known = columns_of(task_of(self.config)).comparable
        if self.metric and self.metric not in known:
            raise ConfigError(f"--metric {self.metric}: there are {', '.join(known)}")
        if not self.methods or not self.epsilons or not self.seeds:
            raise ConfigError("give at least one method, one epsilon and one seed")
        _distinct("--methods", self.methods)
        _distinct("--epsilon", [f"{e:g}" for e in self.epsilons])
        _distinct("--seeds", [str(s) for s in self.seeds])
        _distinct("--partition", self.partitions)
        if bad := [e for e in self.epsilons if not e > 0]:
            raise ConfigError(f"--epsilon {bad[0]:g}: an epsilon is a number above 0, or inf for no noise")
        if self.by == "claimed" and math.inf in self.epsilons:
            raise ConfigError(
                "--epsilon inf is a run without noise, of which nothing is claimed: leave it out, or use --by proven"
            )


def column_of(config: Config, metric: str) -> Column:
    """The column that is compared: `metric`, or the main one of the task."""
    columns = columns_of(task_of(config))
    return columns[metric] if metric else columns.main


def seeds_from(config: Config, count: int) -> range:
    """So many seeds, from that of the configuration on."""
    if count < 1:
        raise ConfigError(f"--seeds {count}: at least 1 seed is needed, 3 or more to see a spread")
    return range(config.run.seed, config.run.seed + count)


def _distinct(option: str, values: Sequence[str]) -> None:
    if len(set(values)) < len(values):
        raise ConfigError(f"{option} names {next(v for v in values if list(values).count(v) > 1)} twice: give each once")
