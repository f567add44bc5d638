"""What a comparison runs: each method at each guarantee with each seed, checked and calibrated before anything is trained."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedveil.configuration.config import Config
from fedveil.configuration.public_setting import method_of
from fedveil.errors import ConfigError, FedveilError
from fedveil.statement.certify import certify_config
from fedveil.statement.statement import Statement
from fedveil.studies.compare.claim_targets import at_claim
from fedveil.studies.compare.comparability import Check
from fedveil.studies.compare.comparison_spec import By, ComparisonSpec, column_of
from fedveil.studies.compare.configured import configured, with_partitions
from fedveil.studies.grid.cell import Cell, Listener

SLACK = 1e-4
"""A proven epsilon may be this much above its target, relatively: noise is calibrated to rounding."""


@dataclass(frozen=True)
class Planned:
    """One row of the comparison, before it is run.

    Args:
        method: as it was asked for, options included. partition: likewise, or empty where there is one only.
        epsilon: the guarantee it is compared at; inf for a run without noise. cells: one a seed, none if it cannot be run.
        reason: why it cannot. statement: what it will promise.
    """

    method: str
    partition: str
    epsilon: float
    cells: tuple[Cell, ...]
    reason: str = ""
    statement: Statement | None = None


class ComparisonListener(Listener):
    """Follows a comparison; does nothing by itself."""

    def checking(self, what: str) -> None:
        """Before a method is checked: which, and with which partition."""

    def planned(self, rows: Sequence[Planned]) -> None:
        """When all methods are checked, before anything runs."""


def plan(spec: ComparisonSpec, listener: ComparisonListener | None = None) -> list[Planned]:
    """The rows of the comparison, those that cannot be run with their reason; the data of every seed are partitioned for that.

    A method that has no noise to calibrate is run once without any, as the reference.

    Raises:
        ConfigError: an unknown method, key, partition or value.
    """
    method_of(spec.config)  # its plugins may bring others of the methods
    check, listener = Check(column_of(spec.config, spec.metric)), listener or ComparisonListener()
    places = with_partitions(spec.config, spec.partitions)
    asked = [(configured(base, method, spec.by), method, partition) for partition, base in places for method in spec.methods]
    rows: list[Planned] = []
    for mine, method, partition in asked:
        listener.checking(f"{method} {partition}".strip())
        rows += (_checked(row, check) for row in _rows(mine, method, partition, spec))
    return rows


# --- one row ------------------------------------------------------------------------------------------------------------


def _rows(config: Config, method: str, partition: str, spec: ComparisonSpec) -> list[Planned]:
    """The rows of a method, one a guarantee; of one that has no noise at all, the reference."""
    reference = _without_noise(_privacy(config), method, partition, spec.seeds)
    if reference.cells:
        return [reference]
    free = _privacy(config, noise_multiplier=0.0)
    return [
        _row(config, method, partition, e, spec) if e < math.inf else _without_noise(free, method, partition, spec.seeds)
        for e in sorted(spec.epsilons)
    ]


def _checked(row: Planned, check: Check) -> Planned:
    """The row, without its cells where they could not give the number."""
    problem = check.problem([cell.config for cell in row.cells]) if row.cells else ""
    return replace(row, cells=(), reason=problem) if problem else row


def _row(config: Config, method: str, partition: str, epsilon: float, spec: ComparisonSpec) -> Planned:
    try:
        private = _privacy(config, epsilon=epsilon) if spec.by == "proven" else at_claim(config, epsilon)
        statement = certify_config(private)
        _same_guarantee(statement, epsilon, spec.by)
    except FedveilError as problem:
        return Planned(method, partition, epsilon, (), str(problem))
    name = f"{'claimed-' if spec.by == 'claimed' else ''}eps-{epsilon:g}"
    return Planned(method, partition, epsilon, _cells(private, method, partition, epsilon, name, spec.seeds), "", statement)


def _same_guarantee(statement: Statement, epsilon: float, by: By) -> None:
    """Refuse what does not keep the promise that the rows are compared at."""
    proven = statement.proven
    if by == "proven" and not proven.epsilon <= epsilon * (1 + SLACK):
        raise ConfigError(
            f"proven is {'no bound' if math.isinf(proven.epsilon) else f'epsilon = {proven.epsilon:g}'}"
            f"{f' ({proven.reason})' if proven.reason else ''}: not comparable at a proven epsilon of {epsilon:g}"
        )


def _without_noise(config: Config, method: str, partition: str, seeds: Sequence[int]) -> Planned:
    """The row of a configuration that is to be without noise."""
    try:
        statement = certify_config(config)
    except FedveilError as problem:
        return Planned(method, partition, math.inf, (), str(problem))
    if statement.proven.epsilon < math.inf:
        return Planned(method, partition, math.inf, (), "there is noise in it all the same")
    return Planned(method, partition, math.inf, _cells(config, method, partition, math.inf, "no-noise", seeds), "", statement)


def _cells(config: Config, method: str, partition: str, epsilon: float, name: str, seeds: Sequence[int]) -> tuple[Cell, ...]:
    labels: dict[str, str | float] = {"method": method, "partition": partition, "epsilon": epsilon}
    folder = "/".join(filter(None, (_slug(method), _slug(partition), name)))
    return tuple(
        Cell(
            f"{folder}/seed-{seed}",
            config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})}),
            {**labels, "seed": seed},
        )
        for seed in seeds
    )


def _privacy(config: Config, **promise: float) -> Config:
    """The configuration with this promise and no other."""
    section = config.privacy.model_copy(update={"epsilon": None, "noise_multiplier": None, **promise})
    return config.model_copy(update={"privacy": section})


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", text).strip("-")
