"""What would stop the runs of a comparison, found before training: an impossible partition, a number nobody measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedveil.configuration.config import Config
from fedveil.configuration.public_setting import calibrated_setting, objective_of
from fedveil.errors import ConfigError, FedveilError
from fedveil.tasks.column import Column

if TYPE_CHECKING:
    from fedveil.data.dataset import Dataset


class Check:
    """Checks configurations; a data set is loaded once, and partitioned once a seed.

    Args:
        column: the number that is compared.
    """

    def __init__(self, column: Column) -> None:
        self.column = column
        self._loaded: dict[tuple[str, ...], Dataset] = {}
        self._problems: dict[tuple[str, int], str] = {}

    def problem(self, configs: Sequence[Config]) -> str:
        """Why the runs of one row, which differ in their seed only, cannot give the number; an empty string where they can."""
        try:
            if self.column.name.startswith("mean_personal_"):
                _needs_personal_models(configs[0], self.column.name)
        except FedveilError as problem:
            return str(problem)
        found = {config.run.seed: said for config in configs if (said := self._partition(config))}
        if not found:
            return ""
        return f"seed{'s' * (len(found) > 1)} {', '.join(map(str, found))}: {'; '.join(dict.fromkeys(found.values()))}"

    def _partition(self, config: Config) -> str:
        from fedveil.run.assembly import prepare
        from fedveil.run.resolve import data_spec

        key = config.data.model_dump_json(), config.run.seed
        source = config.data.name, str(config.data.data_dir), str(config.data.source)
        if key not in self._problems:
            try:
                ready = prepare(data_spec(config), self._loaded.get(source))
                if config.data.partition.get("kind") != "users":  # which may have cut other tests out of it
                    self._loaded = {source: ready.dataset}
                self._problems[key] = ""
            except FedveilError as problem:
                self._problems[key] = str(problem)
        return self._problems[key]


def _needs_personal_models(config: Config, metric: str) -> None:
    """Refuse a configuration that measures no models of the clients' own."""
    from fedveil.training.local import HasPersonalModel

    if config.run.engine == "flower":
        raise ConfigError(
            f"{metric} is measured where run.engine is not 'flower', whose clients keep their own models to themselves"
        )
    on_test_set = metric.startswith("mean_personal_test_")
    if on_test_set and not config.training.personal_on_test_set:
        raise ConfigError(f"{metric} is measured where training.personal_on_test_set = true: set it")
    if not on_test_set and not config.data.client_test_fraction:
        raise ConfigError(f"{metric} is measured on the clients' own tests: set data.client_test_fraction, such as 0.2")
    method, setting = calibrated_setting(config)
    if not isinstance(objective_of(config, method, setting), HasPersonalModel):
        raise ConfigError(f"{method.name} has no models of the clients' own, so no {metric}; training.measure_trained makes some")
