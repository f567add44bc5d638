"""A resolved run: everything that is decided before data are read, each decision made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify
from fedveil.experiment.own_model import built
from fedveil.experiment.plugins import feature_map
from fedveil.experiment.public_setting import model_seed
from fedveil.experiment.public_values import TOGETHER
from fedveil.training.local import Trained

if TYPE_CHECKING:
    from fedveil.accounting.types import Unit
    from fedveil.data.features import FeatureMap
    from fedveil.experiment.model_section import Network
    from fedveil.experiment.public_setting import Population
    from fedveil.experiment.sections import DataSection, PublicSection
    from fedveil.federation.round import Isolation
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting
    from fedveil.statement.statement import Assumption, Statement
    from fedveil.tasks.task import Task
    from fedveil.training.local import Client
    from fedveil.training.params import FlatModel


@dataclass(frozen=True)
class DataSpec:
    """Specification of how examples are read, turned into features and divided among clients.

    Args:
        section, public: of the configuration. task: to learn. unit: of protection. seed: of the division.
    """

    section: DataSection
    public: PublicSection
    task: Task
    unit: Unit
    seed: int

    @property
    def features(self) -> FeatureMap | None:
        """Return the feature map, or None if examples are used as they are; a user-defined function is imported.

        Raises:
            ConfigError: an unknown name, or an import path without a function.
        """
        return feature_map(self.section, self.public)


@dataclass(frozen=True)
class EngineSpec:
    """Engine options of a run; see `fedveil.executors.select_engine.engine`."""

    name: str
    timeout: float | None = None
    at_once: int | None = None
    deterministic: bool = False


@dataclass(frozen=True)
class SharedBudgetSpec:
    """Budget file that a run shares with others, and the project under whose name it is charged."""

    path: str | None
    project: str = ""


@dataclass(frozen=True)
class Experiment:
    """A resolved configuration, without data, and without torch if the model is built in or recorded.

    Args:
        method: imported and checked. setting: with the noise calibrated. configured: the same, before calibration.
        client: local training. population: public facts about the data. network: the model and what was recorded of it.
        isolation: of user-defined code; None if it is chosen when the clients are set up.
        evaluate_every: rounds. code: user-defined files and modules that affect the result. track: names of trackers.
        public: values assumed to be public. beside: warnings about extra information that the clients send.
        written: the whole configuration by section, as it is recorded.
    """

    method: Method
    setting: Setting
    configured: Setting
    client: Client
    population: Population
    network: Network
    data: DataSpec
    engine: EngineSpec
    budget: SharedBudgetSpec
    isolation: Isolation | None
    seed: int
    seeded_noise: bool
    max_update_norm: float
    evaluate_every: int
    personal_on_test_set: bool
    allow_vacuous_delta: bool
    code: tuple[str, ...]
    track: tuple[str, ...]
    public: tuple[Assumption, ...]
    extra_disclosures: tuple[str, ...]
    written: Mapping[str, Any]

    @cached_property
    def statement(self) -> Statement:
        """Return the privacy statement.

        Raises:
            ConfigError: an impossible combination (see `certify`).
        """
        return certify(
            self.method,
            self.setting,
            seeded_noise=self.seeded_noise,
            allow_vacuous_delta=self.allow_vacuous_delta,
            batch_norm=self.network.keeps_statistics,
            public=self.public,
            extra_disclosures=self.extra_disclosures,
        )

    def template(self, seed: int | None = None) -> FlatModel:
        """Build the untrained network, initialised from the run's seed unless its code or a program does that.

        Args:
            seed: another seed of the run, for which nothing is recorded.

        Raises:
            ConfigError: the network cannot be built or trained here, or differs from the recorded one.
        """
        from fedveil.training.params import FlatModel

        network = self.network if seed is None else replace(self.network, recorded=None)
        info = self.population.data
        module = built(
            network, info.input_shape, self.setting.task.outputs(info), model_seed(self.seed if seed is None else seed)
        )
        return FlatModel(module, built_in=network.built_in)

    def with_engine(self, name: str) -> Experiment:
        """Return the experiment on another engine, which is recorded."""
        written = {**self.written, "run": {**self.written["run"], "engine": name}}
        return replace(self, engine=replace(self.engine, name=name), written=written)

    def with_steps(self, steps: int, batch_size: int) -> Experiment:
        """Return the experiment with that many local steps and that batch size, with the noise recalibrated."""
        local = replace(self.configured.local, steps=steps, batch_size=batch_size)
        configured = replace(self.configured, local=local)
        setting = self.method.calibrate(configured)
        client = self.method.client(setting)
        client = Trained(client) if isinstance(self.client, Trained) else client
        return replace(self, configured=configured, setting=setting, client=client)


def isolation_here(wanted: Isolation | None, engine: str) -> Isolation:
    """Return the isolation of user-defined code on this machine.

    Raises:
        ConfigError: processes are required, but no child that can train can be forked, or the engine trains clients together.
    """
    from fedveil.executors.pool import forks

    processes, together = wanted in ("process", "pass"), engine in TOGETHER
    if processes and together:
        raise ConfigError(
            f"run.isolation = {wanted!r}: run.engine = {engine!r} trains several clients in one pass: set it to 'copy', or take "
            f"another engine"
        )
    if processes and not forks(engine):
        raise ConfigError(
            f"run.isolation = {wanted!r} needs a child process that can train, and none can be forked here: set it to 'copy'"
            + ", or run.engine to 'pool', whose workers are started anew" * forks("pool")
        )
    return wanted or ("process" if not together and forks(engine) else "copy")
