"""How long cells take: seconds per unit of work, measured on cells like them; from it the order and the time left."""

from __future__ import annotations

from collections.abc import Sequence

from fedveil.configuration.config import Config
from fedveil.configuration.public_setting import setting_of
from fedveil.errors import FedveilError


class Pace:
    """Seconds per unit of work (examples that a round passes through the model), as measured.

    Args:
        measured: (configuration, rounds, seconds they took) of what ran before.
    """

    def __init__(self, measured: Sequence[tuple[Config, int, float]] = ()) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._known: dict[int, tuple[Config, float, tuple[str, ...]]] = {}
        for config, rounds, seconds in measured:
            self.measure(config, rounds, seconds)

    def measure(self, config: Config, rounds: int, seconds: float) -> None:
        """Take note of the seconds that so many rounds of a configuration took."""
        if rounds < 1:
            return
        work, alike = self._of(config)
        for key in alike:
            done, total = self._sums.get(key, (0.0, 0.0))
            self._sums[key] = done + rounds * work, total + seconds

    def expected(self, config: Config, rounds: int) -> float:
        """Seconds that so many rounds should take, by the most similar cells measured; just their work while none was."""
        work, alike = self._of(config)
        done, total = next((self._sums[key] for key in alike if key in self._sums), (1.0, 1.0))
        return rounds * work * total / done

    def left(self, remaining: Sequence[tuple[Config, int]], jobs: int) -> float | None:
        """Seconds until all of this is done by `jobs` at a time; None while nothing was measured."""
        if not self._sums:
            return None
        each = [self.expected(config, rounds) for config, rounds in remaining]
        return max([sum(each) / jobs, *each])

    def _of(self, config: Config) -> tuple[float, tuple[str, ...]]:
        known = self._known.get(id(config))
        if known is None:
            self._known[id(config)] = known = (config, _work(config), _alike(config))
        return known[1:]


def _work(config: Config) -> float:
    """Examples that one round passes through the model; 1 where the configuration is impossible (its cell fails at once)."""
    try:
        s = setting_of(config)
        return float(s.cohort * s.local.steps_for(max(s.records, 1)) * s.local.batch_size)
    except FedveilError:
        return 1.0


def _alike(config: Config) -> tuple[str, ...]:
    """What a cell is measured by: cells that differ in seed and privacy only, those of its method, all."""
    same = config.model_dump_json(exclude={"run": True, "privacy": True})
    return same, f"method {config.method.name}", ""
