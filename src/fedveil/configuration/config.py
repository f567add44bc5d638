"""The configuration of a run: a TOML file with the sections data, model, method, training, privacy, run.

Nothing here touches data or imports torch, so that a privacy statement can be had in milliseconds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.configuration.plugins import load_plugins
from fedveil.data.catalogue import Info, info
from fedveil.data.partition import checked_options
from fedveil.errors import ConfigError, explain
from fedveil.methods.base import Method, MethodConfig, Setting
from fedveil.methods.method_registry import method_from
from fedveil.models import model_registry as models
from fedveil.training.local import LocalSpec, Precision, Schedule
from fedveil.training.optimizer import OptimizerSpec
from fedveil.training.params import Layout

FREE = "changes no result"
"""Marks a key in which runs may differ and yet give the same model and the same history."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataSection(_Section):
    """Which data, dealt out how.

    client_test_fraction: share of each client's examples kept for its own test. public_fraction: share of the training set
    that is public and belongs to no client. user_test_fraction: with natural users as clients, official splits that separate the
    users are pooled, and this share of each user's examples becomes the test set.
    """

    name: str = "digits"
    partition: dict[str, Any] = Field(default_factory=lambda: {"kind": "iid", "clients": 10})
    data_dir: Annotated[str | None, FREE] = None
    download: Annotated[bool, FREE] = True
    client_test_fraction: float = Field(0.0, ge=0, lt=1)
    public_fraction: float = Field(0.0, ge=0, lt=1)
    user_test_fraction: float = Field(0.2, gt=0, lt=1)


class Optimizer(_Section):
    """A first-order optimiser."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: float = Field(0.1, gt=0, allow_inf_nan=False)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)

    def spec(self) -> OptimizerSpec:
        """The same for the training loop."""
        return OptimizerSpec(self.name, self.lr, self.momentum, self.weight_decay)


class TrainingSection(_Section):
    """Rounds and local training. `sampling` left out is poisson where privacy can use it, else fixed.

    client_timeout: seconds after which a client that has not answered is left out of its round.
    measure_trained: measure each client's model as its local training left it on the client's own test examples.
    """

    rounds: int = Field(10, ge=1)
    clients_per_round: int | None = Field(None, ge=1)
    sampling: Literal["fixed", "poisson"] | None = None
    local_epochs: int = Field(1, ge=1)
    local_steps: int | None = Field(None, ge=1)
    batch_size: int = Field(32, ge=1)
    batch_clip: float | None = Field(None, gt=0, allow_inf_nan=False)
    schedule: Schedule = "constant"
    optimizer: Optimizer = Optimizer()
    server_optimizer: Optimizer = Optimizer(lr=1.0)
    local: Literal["sgd", "dp-sgd"] = "sgd"
    example_clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    evaluate_every: int = Field(1, ge=1)
    max_update_norm: float = Field(1e6, gt=0)
    client_timeout: Annotated[float | None, FREE] = Field(None, gt=0, allow_inf_nan=False)
    measure_trained: bool = False


class PrivacySection(_Section):
    """The promise. Give epsilon (the noise is calibrated) or noise_multiplier (epsilon is the result), not both."""

    epsilon: float | None = Field(None, gt=0, allow_inf_nan=False)
    noise_multiplier: float | None = Field(None, ge=0, allow_inf_nan=False)
    delta: float = Field(1e-5, gt=0, lt=1)
    unit: Unit = Unit.CLIENT
    adjacency: Adjacency = Adjacency.ZERO_OUT
    view: View = View.AGGREGATE
    allow_vacuous_delta: bool = False
    min_survivors: int | None = Field(None, ge=1)
    colluders: int = Field(0, ge=0)
    max_participations: int | None = Field(None, ge=1)


class RunSection(_Section):
    """How to run it. seeded_noise makes the noise reproducible, and therefore no protection: simulation only.

    plugins: files or modules with methods and data sets of one's own, whose contents are compared by their digests.
    track: trackers that follow the run.
    """

    seed: int = Field(0, ge=0, lt=2**62)
    seeded_noise: bool = False
    engine: Annotated[str, FREE] = "auto"
    clients_at_once: Annotated[int | None, FREE] = Field(None, ge=1)
    precision: Precision = "float32"
    deterministic: Annotated[bool, FREE] = False
    name: Annotated[str, FREE] = ""
    plugins: Annotated[tuple[str, ...], FREE] = ()
    track: Annotated[tuple[Literal["tensorboard", "mlflow"], ...], FREE] = ()

    @field_validator("plugins")
    @classmethod
    def _whole(cls, plugins: tuple[str, ...]) -> tuple[str, ...]:
        """Paths made absolute, so that a run directory finds them again."""
        return tuple(str(Path(p).expanduser().resolve()) if p.endswith(".py") else p for p in plugins)


class Config(_Section):
    """A whole configuration."""

    data: DataSection = DataSection()
    model: dict[str, Any] = Field(default_factory=lambda: {"name": "mlp"})
    method: dict[str, Any] = Field(default_factory=lambda: {"name": "fedavg"})
    training: TrainingSection = TrainingSection()
    privacy: PrivacySection = PrivacySection()
    run: RunSection = RunSection()


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


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply overrides: `section.key=value`, or `section={...}` for a whole section anew."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    given = raw.get("run")
    if isinstance(given, dict) and isinstance(given.get("plugins"), list):
        given["plugins"] = [_beside(Path(path), plugin) for plugin in given["plugins"]]
    return parse(raw, overrides)


def _beside(config: Path, plugin: Any) -> Any:
    return str(config.parent / Path(plugin).expanduser()) if isinstance(plugin, str) and plugin.endswith(".py") else plugin


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
    """The configured method."""
    load_plugins(config.run.plugins)
    return method_from(dict(config.method))


@dataclass(frozen=True)
class Population:
    """Whose data: what is public about the data set and its clients.

    Args:
        data: the data set. clients: N. records: nominal examples per client.
    """

    data: Info
    clients: int
    records: int


def population_of(config: Config) -> Population:
    """The population of a configuration, from the catalogue alone."""
    load_plugins(config.run.plugins)
    data, options = info(config.data.name), checked_options(config.data.partition)
    clients = int(getattr(options, "clients", None) or data.users)
    total: float = data.train_size
    if config.data.partition.get("kind") == "users":
        total = (data.train_size + data.test_size) * (1 - config.data.user_test_fraction)
    kept = total * (1 - config.data.public_fraction) * (1 - config.data.client_test_fraction)
    records = getattr(options, "examples_per_client", None) or max(1, round(kept / max(clients, 1)))
    return Population(data, clients, int(records))


def setting_of(config: Config, population: Population | None = None) -> Setting:
    """The public setting of a configuration; noise is not calibrated yet.

    Args:
        population: when the data are not the catalogue's.
    """
    population = population or population_of(config)
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
    )


def local_spec(config: Config) -> LocalSpec:
    """What a client does in a round."""
    t, precision = config.training, config.run.precision
    if t.local == "dp-sgd" and precision == "bf16":
        raise ConfigError("DP-SGD clips and noises in float32: leave run.precision at float32 with training.local = 'dp-sgd'")
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
    """The layout of the configured model, without building it."""
    options = dict(config.model)
    return Layout.of(models.shapes(str(options.pop("name", "mlp")), data.input_shape, data.classes, **options))


def configure(**sections: Any) -> Config:
    """A configuration from Python: keywords data, model, method, training, privacy, run, each a dict.

    `method` may be a method object and `model` a name.
    """
    method, model = sections.get("method"), sections.get("model")
    if isinstance(method, MethodConfig):
        sections["method"] = method.model_dump()
    if isinstance(model, str):
        sections["model"] = {"name": model}
    return parse(sections)
