"""What fits a guarantee: rounds, clients a round and unit, each with the noise that it needs and what may be learned under it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Literal

from fedveil.accounting.learnability import expected_share, gathered_ratio
from fedveil.accounting.types import Unit, View
from fedveil.configuration.public_setting import method_of, population_of, setting_of
from fedveil.errors import ConfigError
from fedveil.statement.advice import own_level

if TYPE_CHECKING:
    from fedveil.configuration.config import Config
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting

_ROUNDS = (0.25, 0.5, 1.0, 2.0)
_COHORTS = (0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True)
class PlannedRow:
    """One way to spend the guarantee.

    Args:
        unit, rounds, cohort: of the way. noise_multiplier: that it needs. gathered: R, noise against signal over all steps.
        share: of the accuracy above chance that may be kept (see `expected_share`). why_not: why it cannot be had, or empty.
    """

    unit: Unit
    rounds: int
    cohort: int
    noise_multiplier: float = float("nan")
    gathered: float = float("nan")
    share: float = float("nan")
    why_not: str = ""


def plan_table(config: Config) -> tuple[PlannedRow, ...]:
    """Rounds and clients a round around the configured ones, at client level and at record level, best first.

    Raises:
        ConfigError: privacy.epsilon is not set, or the method clips nothing.
    """
    method, s = method_of(config), setting_of(config, population_of(config))
    if s.epsilon is None:
        raise ConfigError("a plan needs the guarantee that it is made for: set privacy.epsilon")
    rows = [_row(method, one) for one in _ways(s, config.training.example_clip)]
    return tuple(sorted(rows, key=lambda row: (bool(row.why_not), row.gathered)))


def _ways(s: Setting, example_clip: float) -> Iterator[Setting]:
    rounds = sorted({max(1, round(s.rounds * factor)) for factor in _ROUNDS})
    cohorts = sorted({min(s.clients, max(1, round(s.cohort * factor))) for factor in _COHORTS} | {s.clients})
    for t, n in product(rounds, cohorts):
        scope = replace(s.scope, unit=Unit.CLIENT)
        sampling: Literal["poisson", "fixed"] = "poisson" if n < s.clients and scope.view is not View.SERVER else "fixed"
        yield replace(s, rounds=t, cohort=n, sampling=sampling, scope=scope, example_clip=None)
        if s.task.by_example:
            scope = replace(s.scope, unit=Unit.RECORD)
            yield replace(s, rounds=t, cohort=n, sampling="fixed", scope=scope, example_clip=example_clip)


def _row(method: Method, s: Setting) -> PlannedRow:
    try:
        found = method.calibrate(s)
        level, steps = own_level(method, found)
    except ConfigError as problem:
        return PlannedRow(s.scope.unit, s.rounds, s.cohort, why_not=str(problem))
    assert level.ratio is not None
    gathered = gathered_ratio(level.ratio, steps)
    return PlannedRow(s.scope.unit, s.rounds, s.cohort, found.z, gathered, expected_share(gathered))
