"""The public facts about a run, from its configuration: method, task, population, model layout, and noise.

This module neither reads data nor imports torch, so a privacy statement takes milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import BaseModel

from fedveil.accounting.types import Scope, View
from fedveil.data.catalogue import CATALOGUE, Info, info
from fedveil.data.dataset import Dataset
from fedveil.data.partition import checked_options
from fedveil.data.partition_options import Ladp1, Users
from fedveil.data.split import held_for_tests
from fedveil.errors import ConfigError
from fedveil.executors.engine_names import check_engine
from fedveil.experiment.config import Config
from fedveil.experiment.own_model import as_recorded, layout_of_network
from fedveil.experiment.plugins import feature_map, load_plugins
from fedveil.experiment.sections import DataSection, PluginMethod, PluginTask, given_keys
from fedveil.methods.method import Method
from fedveil.methods.method_registry import method_from
from fedveil.methods.one_price import check_shares
from fedveil.methods.setting import Setting
from fedveil.tasks.survival import Survival
from fedveil.tasks.task import Task
from fedveil.tasks.task_registry import task_from
from fedveil.training.local import Client, HasPersonalModel, LocalSpec, Trained
from fedveil.training.params import Layout

FLOWER_APP = "flower-app"
"""Name of the data in a run of a Flower app (`CentralDP`): the clients' own, which fedveil cannot read."""
NVFLARE_JOB = "nvflare-job"
"""Name of the data in a run of an NVFlare job (`NoisyAggregator`)."""
UNSEEN = {FLOWER_APP: "a Flower app (CentralDP)", NVFLARE_JOB: "an NVFlare job (NoisyAggregator)"}
"""Programs that fedveil does not run, by the name of their data."""


def method_of(config: Config) -> Method:
    """Return the configured method; this imports the plugins, which may provide it, or the data set.

    Raises:
        ConfigError: unknown name or parameter, impossible value, or a plugin that cannot be imported.
    """
    load_plugins(config.run.plugins)
    method: Any = config.method
    return method_from(given_keys(method)) if isinstance(method, PluginMethod) else method


def task_of(config: Config) -> Task:
    """Return the configured task; this imports the plugins, which may provide it.

    Raises:
        ConfigError: unknown name or constant, impossible value, or a plugin that cannot be imported.
    """
    load_plugins(config.run.plugins)
    return task_from(given_keys(config.task)) if isinstance(config.task, PluginTask) else config.task


def require_handed_over(section: DataSection, data: object = None, partition: object = None) -> None:
    """Refuse a section whose data or partition a program passed in, unless they are passed in again.

    Raises:
        ConfigError: they are missing.
    """
    now = {"data": data, "partition": partition}
    missing = [name for name in section.handed_over if now[name] is None]
    if missing and section.name in UNSEEN:
        raise ConfigError(
            f"data.name = {section.name!r}: a run of {UNSEEN[section.name]}, for which fedveil has neither the clients' data nor "
            f"their training: give a configuration with its sections method, training and privacy, and with data on this machine"
        )
    if missing:
        arguments = ", ".join(f"{name}=..." for name in missing)
        raise ConfigError(
            f"data.handed_over = {list(section.handed_over)}: a program handed the {' and the '.join(missing)} of this run "
            f"over, and its configuration does not make them: hand them over again in Python, as in fv.train(config, {arguments})"
        )


@dataclass(frozen=True)
class Population:
    """Public facts about the data set and its clients.

    Args:
        data: the data set. clients: N, and records: nominal examples per client; 0 if only the data files tell.
    """

    data: Info
    clients: int
    records: int


def by_own_clients(section: DataSection, dataset: Dataset) -> DataSection:
    """Return the section with user-defined data partitioned by the clients that they name, if no partition is configured."""
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"data is a {type(dataset).__name__}: make a data set of it first, with fv.from_frame, fv.from_arrays, "
            f"fv.from_torch or fv.from_huggingface"
        )
    names_clients = dataset.users_train is not None and dataset.info.name not in CATALOGUE
    if not names_clients or "partition" in section.model_fields_set:
        return section
    return section.model_copy(update={"partition": {"kind": "users"}})


def population_of(config: Config, dataset: Dataset | None = None, *, refuse_unknown: bool = True) -> Population:
    """Return the population of a configuration, from the catalogue or from the description of its own files alone.

    Args:
        dataset: the data that a program will pass in; their sizes are used.
        refuse_unknown: refuse numbers that only the data determine, if noise depends on them; else use their upper bound.

    Raises:
        ConfigError: as `method_of` and `require_handed_over`, or with `refuse_unknown`.
    """
    method_of(config)  # its plugins may bring the data set
    require_handed_over(config.data, dataset)
    section = config.data if dataset is None else by_own_clients(config.data, dataset)
    source, options = section.source, checked_options(section.partition)
    if dataset is not None:
        named = [who for who in (dataset.users_train, dataset.users_test) if who is not None]
        users = len(np.unique(np.concatenate(named))) if named else 0
        data = replace(dataset.info, train_size=len(dataset.x_train), test_size=len(dataset.x_test), users=users)
    else:
        data = info(section.name) if source is None else source.info(section.name)
    pooled = source is None if dataset is None else dataset.users_test is not None
    sized = dataset is not None or source is not None or data.train_size > 0
    clients = int(getattr(options, "clients", None) or (data.users if sized else 0))
    if refuse_unknown and not clients:
        usual = f" ({data.users} in the whole data set)" if data.users else ""
        raise ConfigError(
            f"data.partition.clients: missing, and how many users {data.name} has depends on how its files were "
            f"prepared{usual}: give it, or hand the data over, as in fv.certify(config, data=...)"
        )
    if refuse_unknown and config.training.local == "dp-sgd" and sized_by_labels(options):
        raise ConfigError(
            "data.partition.examples_per_client: ladp-1 without it takes as many as the labels of the data allow, so what noise "
            "DP-SGD needs is not known before the data are loaded: give it, or read the statement of the run"
        )
    records = _examples_each(section, options, data, pooled=pooled)
    features = feature_map(section, config.public)
    return Population(data if features is None else features.info(data), clients, records)


def sized_by_labels(options: BaseModel) -> bool:
    """Return whether only the labels of the data determine how many examples a client has."""
    return isinstance(options, Ladp1) and options.examples_per_client is None


def _examples_each(section: DataSection, options: BaseModel, data: Info, *, pooled: bool) -> int:
    """Return the average number of training examples per client, at least 1; for some of the users, that of all.

    0 if a size of the data set, or its number of users, is not known before it is loaded.

    Args:
        pooled: whether natural users have examples in both splits, which are then split again.
    """
    each: float | None = getattr(options, "examples_per_client", None)
    if each is None:
        natural = isinstance(options, Users)
        total = (data.train_size + data.test_size) * (1 - section.user_test_fraction) if natural and pooled else data.train_size
        owners = data.users if natural else getattr(options, "clients", 1)
        if not data.train_size or not owners or (natural and pooled and not data.test_size):
            return 0
        each = total * (1 - section.public_fraction) / max(owners, 1)
    return max(1, round(each - float(held_for_tests(each, section.client_test_fraction))))


def setting_of(config: Config, population: Population | None = None) -> Setting:
    """Return the public setting of a configuration, with the noise not yet calibrated.

    Args:
        population: if the data are not the catalogue's.
    """
    population, task = population or population_of(config), task_of(config)
    task.check(population.data)
    if config.training.local == "dp-sgd" and not task.by_example:
        hint = ", such as task.likelihood = 'hazards'" if isinstance(task, Survival) else ""
        raise ConfigError(
            f"training.local = 'dp-sgd' clips the gradient of each example, and the loss of task.name = {task.name!r} is not a "
            f"mean over examples: protect whole clients (privacy.unit = 'client', training.local = 'sgd'), or choose a loss that "
            f"is one{hint}"
        )
    clients, t, p = population.clients, config.training, config.privacy
    cohort = t.clients_per_round if t.clients_per_round is not None else clients
    if cohort > clients:
        raise ConfigError(f"training.clients_per_round = {cohort} is more than the {clients} clients of data.partition")
    if p.epsilon is not None and p.noise_multiplier is not None:
        raise ConfigError(
            f"privacy.epsilon = {p.epsilon:g} and privacy.noise_multiplier = {p.noise_multiplier:g} are both given: "
            "give epsilon to have the noise calibrated, or noise_multiplier to have epsilon as the result"
        )
    if p.noise_cohort is not None and {p.epsilon, p.noise_multiplier, p.selection, p.budget} != {None}:
        raise ConfigError(
            "privacy.noise_cohort sets the noise of a larger federation, which does not give this federation the epsilon "
            "asked for: leave privacy.epsilon, privacy.noise_multiplier, privacy.selection and privacy.budget out"
        )
    if p.evaluation is not None and not config.data.client_test_fraction:
        raise ConfigError(
            "privacy.evaluation counts answers on examples that clients keep from training, and there are none: set "
            "data.client_test_fraction, such as 0.2"
        )
    private = p.epsilon is not None or p.noise_multiplier is not None or p.noise_cohort is not None
    amplifies = private and p.view is not View.SERVER and t.local == "sgd" and p.min_survivors is None
    amplifies = amplifies and p.noise_place == "sum"
    sampling = t.sampling or ("poisson" if amplifies and cohort < clients else "fixed")
    return Setting(
        clients=clients,
        cohort=cohort,
        rounds=t.rounds,
        sampling=sampling,
        local=local_spec(config),
        layout=layout_of(config, population.data),
        records=population.records,
        classes=population.data.classes,
        scope=Scope(p.unit, p.adjacency, p.view),
        delta=p.delta,
        epsilon=p.epsilon,
        noise_multiplier=p.noise_multiplier,
        example_clip=t.example_clip if t.local == "dp-sgd" else None,
        min_survivors=p.min_survivors,
        colluders=p.colluders,
        noise_place=p.noise_place,
        spare_attempts=p.spare_attempts,
        secure_aggregation=config.run.secure_aggregation,
        max_participations=p.max_participations,
        server=t.server_optimizer.spec(),
        task=task,
        final_model=config.run.final_model,
        selection=None if p.selection is None else p.selection.spec(),
        grid_bits=p.grid_bits,
        evaluation=None if p.evaluation is None else p.evaluation.spec(dp_sgd=t.local == "dp-sgd"),
        noise_cohort=None if p.noise_cohort is None else p.noise_cohort.spec(),
        public_split=config.data.public_fraction > 0,
        divided_by=_divided_by(config),
        clipped_at="server" if config.data.name in UNSEEN else "client",
    )


def local_spec(config: Config) -> LocalSpec:
    """Return the specification of local training."""
    t, precision = config.training, config.run.precision
    if t.local == "dp-sgd" and precision == "bf16":
        raise ConfigError("DP-SGD clips and noises in float32: leave run.precision at float32 with training.local = 'dp-sgd'")
    if t.local == "dp-sgd" and t.client_timeout is not None:
        raise ConfigError(
            f"training.client_timeout = {t.client_timeout:g} with training.local = 'dp-sgd': one record that takes long "
            f"would take the other records of its client out of the round; leave training.client_timeout out"
        )
    if t.local != "dp-sgd" and config.run.isolation == "pass":
        raise ConfigError(
            "run.isolation = 'pass' forks for each pass over single examples, and only training.local = 'dp-sgd' makes any: set "
            "it to 'process', which forks for each client"
        )
    loop = t.per_example == "loop"
    given = t.local_epochs, t.local_steps, t.batch_size, t.optimizer.spec(), t.batch_clip, t.schedule, precision
    return LocalSpec(*given, loop=loop)


def configured_setting(config: Config, population: Population | None = None) -> tuple[Method, Setting]:
    """Return method and setting before the noise is calibrated, checked against engine and view.

    Raises:
        ConfigError: why no run is possible, and the key to change.
    """
    check_engine(config.run.engine, config.training.client_timeout)
    method, s = method_of(config), setting_of(config, population)
    if s.secure_aggregation == "simulate" and config.run.engine not in ("auto", "inline"):
        raise ConfigError(
            f"run.secure_aggregation = 'simulate' with run.engine = {config.run.engine!r}: clients are masked one after "
            f"the other in this process: set run.engine to 'inline'",
            key="run.engine",
            value=config.run.engine,
        )
    check_shares(method, s)
    if s.max_participations is not None and s.scope.view is not View.SERVER:
        raise ConfigError(
            f"privacy.max_participations = {s.max_participations} counts the uploads of single clients, so it needs "
            f"privacy.view = 'server'; in the {s.scope.view} view every round's sum is charged to all clients: leave it out"
        )
    return method, s


def calibrated_setting(config: Config, population: Population | None = None) -> tuple[Method, Setting]:
    """Return method and setting with the noise calibrated, after all checks of the configuration alone.

    Raises:
        ConfigError: as `configured_setting`.
    """
    method, s = configured_setting(config, population)
    return method, calibrated(config, method, s)[0]


def calibrated(config: Config, method: Method, configured: Setting) -> tuple[Setting, Client]:
    """Return the setting with the noise calibrated, and local training.

    Raises:
        ConfigError: no noise reaches the target, or the method does not support an option of training.
    """
    s = method.calibrate(configured)
    if s.server.relative_to_clip and (s.example_clip is not None or method.clip_norm(s) is None):
        raise ConfigError(
            f"training.server_optimizer.relative_to_clip = true divides by the clip of whole updates, and {method.name} has none "
            f"here: leave it out"
        )
    return s, objective_of(config, method, s)


def objective_of(config: Config, method: Method, s: Setting) -> Client:
    """Return the method's local training, wrapped by `training.measure_trained` if requested.

    Raises:
        ConfigError: it cannot be measured that way.
    """
    client = method.client(s)
    if not config.training.measure_trained:
        return client
    if isinstance(client, HasPersonalModel):
        raise ConfigError(f"{method.name} measures personal models of its own: leave training.measure_trained out")
    if not (config.data.client_test_fraction or config.training.personal_on_test_set):
        raise ConfigError(
            "training.measure_trained needs tests: set data.client_test_fraction, such as 0.2, or training.personal_on_test_set"
        )
    return Trained(client)


def layout_of(config: Config, data: Info) -> Layout:
    """Return the layout of the trained part of the configured model; a built-in model is not built for it."""
    method_of(config)  # its plugins may bring the model
    return layout_of_network(config.model, data.input_shape, task_of(config).outputs(data))


def with_model_facts(config: Config, data: Info) -> Config:
    """Return the configuration with the sizes and properties of its model recorded in it.

    The model is built for that. A built-in model that is trained as a whole (`network.plain`) needs no record.
    """
    network = config.model
    if network.plain or network.recorded is not None:
        return config
    method_of(config)  # its plugins may bring the model
    facts = as_recorded(network, data.input_shape, task_of(config).outputs(data), model_seed(config.run.seed))
    return config.model_copy(update={"model": replace(network, recorded=facts)})


def _divided_by(config: Config) -> str:
    """Return the key that divides the records by their classes, or in an unknown way."""
    kind = config.data.partition.get("kind", "iid")
    if kind == "users":  # see `split_within_users`; user-defined files have another split
        return "" if config.data.source is not None else "data.user_test_fraction"
    return "" if kind == "iid" else f"data.partition.kind = '{kind}'"


def model_seed(seed: int) -> int:
    """Return the seed of the initial model of a run with that seed."""
    from fedveil.release.noise import Randomness

    return Randomness(seed).derive("model")
