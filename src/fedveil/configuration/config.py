"""The configuration of a run: a TOML file with the sections data, model, task, method, training, privacy, run.

Nothing here touches data or imports torch, so that a privacy statement can be had in milliseconds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from pydantic import PlainSerializer, PlainValidator, ValidationError, model_validator

from fedveil.accounting.types import Scope, View
from fedveil.configuration.network import WHOLE, Network, network_of
from fedveil.configuration.own_model import as_recorded, layout_of_network, require_known
from fedveil.configuration.plugins import load_plugins
from fedveil.configuration.recorded_plugins import check_plugins, is_run
from fedveil.configuration.sections import (
    FREE,
    DataSection,
    PluginMethod,
    PluginTask,
    PrivacySection,
    RunSection,
    Section,
    TrainingSection,
    given_keys,
    method_section_of,
    task_section_of,
)
from fedveil.data.catalogue import CATALOGUE, Info, info
from fedveil.data.own.data_source import PATHS
from fedveil.data.partition import checked_options
from fedveil.errors import ConfigError, explain
from fedveil.methods.base import Method, MethodConfig, Setting
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.method_registry import method_from
from fedveil.tasks.classification import Classification
from fedveil.tasks.survival import Survival
from fedveil.tasks.task import Task
from fedveil.tasks.task_registry import task_from
from fedveil.training.local import LocalSpec
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from fedveil.data.dataset import Dataset


class Config(Section):
    """A whole configuration."""

    data: DataSection = DataSection()
    model: Annotated[Network, PlainValidator(network_of), PlainSerializer(Network.section)] = network_of({})
    task: Annotated[Task, PlainValidator(task_section_of), PlainSerializer(given_keys)] = Classification()
    method: Annotated[MethodConfig, PlainValidator(method_section_of), PlainSerializer(given_keys)] = FedAvg()
    training: TrainingSection = TrainingSection()
    privacy: PrivacySection = PrivacySection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _known_model(self) -> Self:
        """Refused at once where no plugin can bring it."""
        if not self.run.plugins:
            require_known(self.model)
        return self

    @property
    def code(self) -> tuple[str, ...]:
        """Files and modules of one's own that decide the result: the plugins, and what the model's import path names."""
        return tuple(dict.fromkeys((*self.run.plugins, *self.model.code)))


FREE_KEYS = frozenset(
    f"{section}.{key}"
    for section, part in Config.model_fields.items()
    for key, field in getattr(part.annotation, "model_fields", {}).items()
    if FREE in field.metadata
)
"""The keys that change no result: a run is resumed, a comparison continued and runs are grouped whatever these say."""


def without_free_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as nested dict, without the keys that change no result."""
    return {
        section: {key: value for key, value in part.items() if f"{section}.{key}" not in FREE_KEYS}
        if isinstance(part, Mapping)
        else part
        for section, part in config.items()
    }


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict as `section.key: value`."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def load_config(path: str | Path, overrides: Sequence[str] = (), *, trust_plugins: bool = False, model: object = None) -> Config:
    """Read a TOML file and apply overrides: `section.key=value`, or `section={...}` for a whole section anew.

    Args:
        trust_plugins: allow plugins that a run directory names, which may be a stranger's (see `recorded_plugins`); those of a
            configuration of one's own, and those in `overrides`, are allowed anyhow. The module of an import path in model.name
            is a plugin in this respect; it is imported when the model is built.
        model: a module, or what makes one, handed over in the place of the one that the file describes.

    Raises:
        ConfigError: it cannot be read, is no configuration, or names plugins that may not run.
    """
    config = read_config(path, overrides)
    folder = Path(path).absolute().parent
    overridden = {item.partition("=")[0].strip() for item in overrides}
    if config.run.plugins and is_run(folder) and not overridden & {"run", "run.plugins"}:
        check_plugins(config.run.plugins, folder, trusted=trust_plugins)
    if config.model.code and is_run(folder) and not overridden & {"model", "model.name"}:
        admit = partial(check_plugins, config.model.code, folder, trusted=trust_plugins, key="model.name")
        config = config.model_copy(update={"model": replace(config.model, admit=admit)})
    return config if model is None else with_model(config, model)


def with_model(config: Config, model: object) -> Config:
    """The configuration with a module, or what makes one, handed over; what a run recorded of its model must hold for it."""
    own = network_of(model)
    if own.source is None:
        raise ConfigError(f"model = {model!r}: hand over an nn.Module, or a class or function that makes one")
    before = config.model
    parts = before.parts if own.parts == WHOLE else own.parts
    recorded = before.recorded if before.name == own.name else None
    return config.model_copy(update={"model": replace(own, parts=parts, recorded=recorded)})


def load_recorded(run: Path, *, trust_plugins: bool = False) -> Config:
    """The configuration of a run directory; unless they are trusted, its plugins must have been imported before.

    Raises:
        ConfigError: not a run directory, or as `load_config`.
    """
    if not (run / "config.toml").is_file() or not is_run(run):
        raise ConfigError(f"{run} is not a run directory: give one that `fedveil run` left")
    return load_config(run / "config.toml", trust_plugins=trust_plugins)


def import_recorded(target: Path) -> None:
    """Import the plugins of a run directory, or of a configuration in one, which the user trusts.

    Raises:
        ConfigError: as `load_config`; or a plugin cannot be imported.
    """
    config = load_recorded(target, trust_plugins=True) if target.is_dir() else load_config(target, trust_plugins=True)
    load_plugins(config.code)


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, for reading only: whether its plugins may run is not asked."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    section, privacy, model = raw.get("run"), raw.get("privacy"), raw.get("model")
    if isinstance(section, dict) and isinstance(section.get("plugins"), list):
        section["plugins"] = [
            _beside(Path(path), plugin) if str(plugin).endswith(".py") else plugin for plugin in section["plugins"]
        ]
    if isinstance(privacy, dict) and privacy.get("budget"):
        privacy["budget"] = _beside(Path(path), privacy["budget"])
    data = raw.get("data")
    source = data.get("source") if isinstance(data, dict) else None
    if isinstance(source, dict):
        source |= {key: _beside(Path(path), source[key]) for key in PATHS if key in source}
    if isinstance(model, dict):
        model |= {key: _beside(Path(path), model[key]) for key in ("weights",) if key in model}
        if ".py:" in str(model.get("name")):
            model["name"] = _beside(Path(path), model["name"])
    return parse(raw, overrides)


def _beside(config: Path, file: Any) -> Any:
    return str(config.parent / Path(file).expanduser()) if isinstance(file, str) else file


def parse(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The checked configuration of a nested dict, after overrides."""
    for item in overrides:
        override(raw, item)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from None


def override(raw: dict[str, Any], item: str) -> None:
    """Set `section.key=value` in a nested dict; raises ConfigError for what has another form."""
    path, equals, text = item.partition("=")
    keys = path.strip().split(".")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    if not equals or not all(keys) or (len(keys) < 2 and not isinstance(value, dict)):
        raise ConfigError(
            f"--set {item}: expected section.key=value, such as training.rounds=5, or a whole section, such as "
            "'method={name=\"fedavg\"}'"
        )
    target = raw
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {item}: {key} is not a section")
    target[keys[-1]] = value


def method_of(config: Config) -> Method:
    """The configured method; this imports the plugins, which may bring it, or the data set.

    Raises:
        ConfigError: unknown name or parameter, impossible value, or a plugin that cannot be imported.
    """
    load_plugins(config.run.plugins)
    method: Any = config.method
    return method_from(given_keys(method)) if isinstance(method, PluginMethod) else method


def task_of(config: Config) -> Task:
    """The configured task; this imports the plugins, which may bring it.

    Raises:
        ConfigError: unknown name or constant, impossible value, or a plugin that cannot be imported.
    """
    load_plugins(config.run.plugins)
    return task_from(given_keys(config.task)) if isinstance(config.task, PluginTask) else config.task


def require_handed_over(config: Config, data: object = None, partition: object = None) -> None:
    """Refuse a configuration whose data or partition a program handed over, unless they are handed over again.

    Raises:
        ConfigError: they are not.
    """
    now = {"data": data, "partition": partition}
    missing = [name for name in config.data.handed_over if now[name] is None]
    if missing:
        arguments = ", ".join(f"{name}=..." for name in missing)
        raise ConfigError(
            f"data.handed_over = {list(config.data.handed_over)}: a program handed the {' and the '.join(missing)} of this run "
            f"over, and its configuration does not make them: hand them over again in Python, as in fv.train(config, {arguments})"
        )


@dataclass(frozen=True)
class Population:
    """Whose data: what is public about the data set and its clients.

    Args:
        data: the data set. clients: N. records: nominal examples per client.
    """

    data: Info
    clients: int
    records: int


def by_own_clients(config: Config, dataset: Dataset) -> Config:
    """Where no partition is configured, data of one's own that name their clients are partitioned by these."""
    own = dataset.users_train is not None and dataset.info.name not in CATALOGUE
    if not own or "partition" in config.data.model_fields_set:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"partition": {"kind": "users"}})})


def population_of(config: Config, dataset: Dataset | None = None) -> Population:
    """The population of a configuration, from the catalogue, or from what it says of its own files, alone.

    Args:
        dataset: the data that a program will hand over, of which the sizes are used.
    """
    method_of(config)  # its plugins may bring the data set
    require_handed_over(config, dataset)
    config, source = config if dataset is None else by_own_clients(config, dataset), config.data.source
    options = checked_options(config.data.partition)
    if dataset is not None:
        users = 0 if dataset.users_train is None else len(np.unique(dataset.users_train))
        data = replace(dataset.info, train_size=len(dataset.x_train), test_size=len(dataset.x_test), users=users)
    else:
        data = info(config.data.name) if source is None else source.info(config.data.name)
    pooled = source is None if dataset is None else dataset.users_test is not None
    clients = int(getattr(options, "clients", None) or data.users)
    total: float = data.train_size
    if pooled and config.data.partition.get("kind") == "users":
        total = (data.train_size + data.test_size) * (1 - config.data.user_test_fraction)
    kept = total * (1 - config.data.public_fraction) * (1 - config.data.client_test_fraction)
    records = getattr(options, "examples_per_client", None) or max(1, round(kept / max(clients, 1)))
    return Population(data, clients, int(records))


def setting_of(config: Config, population: Population | None = None) -> Setting:
    """The public setting of a configuration; noise is not calibrated yet.

    Args:
        population: when the data are not the catalogue's.
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
    private = p.epsilon is not None or p.noise_multiplier is not None
    amplifies = private and p.view is not View.SERVER and t.local == "sgd" and p.min_survivors is None
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
        max_participations=p.max_participations,
        server=t.server_optimizer.spec(),
        task=task,
    )


def local_spec(config: Config) -> LocalSpec:
    """What a client does in a round."""
    t, precision = config.training, config.run.precision
    if t.local == "dp-sgd" and precision == "bf16":
        raise ConfigError("DP-SGD clips and noises in float32: leave run.precision at float32 with training.local = 'dp-sgd'")
    if t.local == "dp-sgd" and t.client_timeout is not None:
        raise ConfigError(
            f"training.client_timeout = {t.client_timeout:g} with training.local = 'dp-sgd': a client that is given up sends "
            f"zeros without noise, so everybody sees that its data took long; leave training.client_timeout out"
        )
    return LocalSpec(t.local_epochs, t.local_steps, t.batch_size, t.optimizer.spec(), t.batch_clip, t.schedule, precision)


def calibrated_setting(config: Config, population: Population | None = None) -> tuple[Method, Setting]:
    """Method and setting with the noise known."""
    method, s = method_of(config), setting_of(config, population)
    if s.max_participations is not None and s.scope.view is not View.SERVER:
        raise ConfigError(
            f"privacy.max_participations = {s.max_participations} counts the uploads of single clients, so it needs "
            f"privacy.view = 'server'; in the {s.scope.view} view every round's sum is charged to all clients: leave it out"
        )
    return method, method.calibrate(s)


def layout_of(config: Config, data: Info) -> Layout:
    """The layout of what is trained of the configured model; a built-in one is not built for it."""
    method_of(config)  # its plugins may bring the model
    return layout_of_network(config.model, data.input_shape, task_of(config).outputs(data))


def described(config: Config, data: Info) -> Config:
    """The configuration with what a run records of its model; the model is built for that, unless it is built in and plain."""
    network = config.model
    if network.plain or network.recorded is not None:
        return config
    method_of(config)  # its plugins may bring the model
    found = as_recorded(network, data.input_shape, task_of(config).outputs(data), model_seed(config))
    return config.model_copy(update={"model": replace(network, recorded=found)})


def model_seed(config: Config) -> int:
    """The seed of the initial model."""
    from fedveil.release.noise import Randomness

    return Randomness(config.run.seed).derive("model")


def configure(**sections: Any) -> Config:
    """A configuration from Python: keywords data, model, task, method, training, privacy, run, each a dict.

    `method` may be a method object, `task` a task or its class; method, task and model may be names; `model` may be an nn.Module,
    whose parameters are the initial model, or a class or function that makes one from the run's seed.
    """
    method = sections.get("method")
    if isinstance(method, MethodConfig):
        sections["method"] = method.model_dump()
    for key in ("method", "model"):
        if isinstance(sections.get(key), str):
            sections[key] = {"name": sections[key]}
    return parse(sections)
