"""Resolution of a configuration into an experiment; later code does not use the configuration again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedveil.experiment.experiment import DataSpec, EngineSpec, Experiment, SharedBudgetSpec, isolation_here
from fedveil.experiment.public_setting import calibrated, configured_setting, method_of, population_of, task_of, with_model_facts
from fedveil.experiment.public_values import TOGETHER, beside_the_releases, public_values
from fedveil.methods.method import is_user_defined

if TYPE_CHECKING:
    from pathlib import Path

    from fedveil.data.dataset import Dataset
    from fedveil.data.partition import Partition
    from fedveil.experiment.assembly import Prepared
    from fedveil.experiment.config import Config
    from fedveil.experiment.public_setting import Population


def resolve(config: Config, population: Population | None = None) -> Experiment:
    """Return the experiment that a configuration describes.

    Args:
        population: of loaded data; by default that of the catalogue, or of the configuration's description of its own files.

    Raises:
        ConfigError: why no run is possible, and the key to change.
    """
    population = population or population_of(config)
    config = with_model_facts(config, population.data) if config.model.needs_building else config
    method, configured = configured_setting(config, population)
    setting, client = calibrated(config, method, configured)
    t, run = config.training, config.run
    return Experiment(
        method=method,
        setting=setting,
        configured=configured,
        client=client,
        population=population,
        network=config.model,
        data=data_spec(config),
        engine=EngineSpec(run.engine, t.client_timeout, run.clients_at_once, run.deterministic),
        budget=SharedBudgetSpec(config.privacy.budget, run.name),
        isolation=run.isolation,
        seed=run.seed,
        seeded_noise=run.seeded_noise,
        max_update_norm=t.max_update_norm,
        evaluate_every=t.evaluate_every or t.rounds,
        personal_on_test_set=t.personal_on_test_set,
        allow_vacuous_delta=config.privacy.allow_vacuous_delta,
        code=config.code,
        track=run.track,
        public=public_values(config, population.data),
        extra_disclosures=beside_the_releases(config),
        written=config.resolved(),
    )


def opened(config: Config, data: Dataset | None = None, partition: Partition | None = None) -> tuple[Experiment, Prepared]:
    """Return the experiment that a configuration describes, and its data.

    Args:
        data, partition: used instead of the configured ones.

    Raises:
        ConfigError, DataError: as `prepare` and `resolve`.
    """
    from fedveil.experiment.assembly import prepare

    prepared = prepare(data_spec(config), data, partition)
    return resolve(config, prepared.population), prepared


def data_spec(config: Config) -> DataSpec:
    """Return how the data of a configuration are read; this imports the plugins, which may provide them.

    Raises:
        ConfigError: as `method_of` and `task_of`.
    """
    method_of(config)
    return DataSpec(config.data, config.public, task_of(config), config.privacy.unit, config.run.seed)


def resolve_here(config: Config, population: Population, resumed: Path | None = None) -> Experiment:
    """Return the experiment for this machine: on its GPU if it has one, with the isolation that it supports.

    Args:
        resumed: directory of the interrupted run to continue, whose isolation and assumptions are preserved.

    Raises:
        ConfigError: as `resolve`; this machine lacks the engine or isolation; or the interrupted run is another one.
    """
    from fedveil.executors.device import GPU
    from fedveil.executors.select_engine import device_for
    from fedveil.experiment.resume import resumable, same_run

    begun = None if resumed is None else resumable(resumed)
    begun_on = None if begun is None else begun.run.engine
    if config.run.engine == "auto" and begun_on == "stacked":
        config = with_run(config, engine="stacked")
    if config.run.engine == "auto" and config.run.secure_aggregation == "simulate":
        config = with_run(config, engine="inline")
    together = begun_on in (None, *TOGETHER)
    if config.run.engine == "auto" and together and device_for("auto", config.training.client_timeout) == GPU:
        config = with_run(config, engine="cuda")  # the statement names the assumptions of this engine
    config = with_model_facts(config, population.data)
    if begun is not None and resumed is not None:
        same_run(begun, config, resumed)
        config = with_run(config, isolation=begun.run.isolation)
    if has_user_defined_parts(config):
        config = with_run(config, isolation=isolation_here(config.run.isolation, config.run.engine))
    experiment = resolve(config, population)
    if begun_on not in TOGETHER:
        return experiment
    return replace(experiment, public=public_values(with_run(config, engine=begun_on), population.data))  # as earlier rounds do


def has_user_defined_parts(config: Config) -> bool:
    """Return whether a user-defined model, task or method may see a client's data."""
    return not config.model.built_in or task_of(config).is_user_defined or is_user_defined(method_of(config))


def with_run(config: Config, **keys: Any) -> Config:
    """Return the configuration with keys of its section `run` changed."""
    return config.model_copy(update={"run": config.run.model_copy(update=keys)})
