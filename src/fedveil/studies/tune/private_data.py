"""A search on the private data themselves: the configurations to try, which all release the same at the same price."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

from fedveil.accounting.types import Event
from fedveil.configuration.config import Config, parse
from fedveil.configuration.public_setting import calibrated_setting, method_of, setting_of, task_of
from fedveil.errors import ConfigError
from fedveil.federation.selection_score import check_score
from fedveil.ledger.entry import event_columns
from fedveil.methods.calibration import ROUNDING
from fedveil.methods.one_price import check_selection
from fedveil.methods.run_cost import run_releases
from fedveil.studies.tune.proxy_grid import check_grid, combinations, overrides


@dataclass(frozen=True)
class SearchSpec:
    """A search on the private data.

    Args:
        config: to be tuned. grid: values to try by key, `section.key`.
        score_noise: noise multiplier of the score by the clients' own examples; None: the test set, which is public, decides.
    """

    config: Config
    grid: Mapping[str, Sequence[Any]]
    score_noise: float | None

    def __post_init__(self) -> None:
        check_grid(self.grid)
        if self.config.privacy.selection is not None:
            raise ConfigError("privacy.selection is what this command writes: leave it out")
        if self.config.privacy.epsilon is None:
            raise ConfigError("privacy.epsilon is not set: give the guarantee that the search is to have")
        if self.config.run.engine == "flower":
            raise ConfigError("run.engine = 'flower' shows the clients every run of a search: leave it out")
        if self.score_noise is None:
            return
        if not self.config.data.client_test_fraction:
            raise ConfigError(
                "what is chosen by the test set scores too well on it, so the clients' own examples decide, and there are none: "
                "set data.client_test_fraction, such as 0.2; or give --by-test-set, and the statement says so"
            )
        check_score(task_of(self.config), tests=True)

    def candidates(self, selection: Mapping[str, Any], **privacy: Any) -> list[Config]:
        """The configuration of each setting, as that of a run which such a selection chose.

        Raises:
            ConfigError: the settings do not release the same at the same price, which is counted once for all of them.
        """
        sections = self.config.model_dump(mode="json")
        noise = {} if self.score_noise is None else {"score_noise": self.score_noise}
        sections["privacy"] |= {"selection": {**selection, **noise}, **privacy}
        found = [parse(json.loads(json.dumps(sections)), overrides(setting)) for setting in combinations(self.grid)]
        for method, s in ((method_of(config), setting_of(config)) for config in found):
            check_selection(method, s)
        prices = [run_releases(method, s, s.scope.view) for method, s in map(calibrated_setting, found)]
        if not all(_same(price, prices[0]) for price in prices):
            raise ConfigError(
                f"--try {', '.join(self.grid)}: these settings plan other releases (other rounds, clients a round or noise), and "
                f"a search on private data has one price for all: leave such keys out, or choose them on public data (--on)"
            )
        return found


def _same(one: Sequence[Event], other: Sequence[Event]) -> bool:
    """Whether two runs release the same, up to the rounding of noise levels."""
    if len(one) != len(other):
        return False
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(event_columns(a), event_columns(b), strict=True)]
    return all(a == b or (isinstance(a, float) and isinstance(b, float) and isclose(a, b, rel_tol=ROUNDING)) for a, b in pairs)
