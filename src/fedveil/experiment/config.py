"""The configuration of a run: a TOML file with a section for each part, and overrides of its keys.

This module neither reads data nor imports torch, so a privacy statement takes milliseconds.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import PlainSerializer, PlainValidator, ValidationError, model_validator

from fedveil.data.catalogue import CATALOGUE
from fedveil.data.partition import checked_options
from fedveil.errors import ConfigError, refusal
from fedveil.experiment.model_section import Network, network_of
from fedveil.experiment.own_model import require_known
from fedveil.experiment.sections import (
    FREE,
    DataSection,
    PluginMethod,
    PluginTask,
    Privacy,
    PublicSection,
    RunSection,
    Section,
    Training,
    given_keys,
    method_section_of,
    task_section_of,
)
from fedveil.methods.base import MethodConfig
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.method_registry import METHODS
from fedveil.models.model_registry import OWN_MODELS
from fedveil.tasks.classification import Classification
from fedveil.tasks.task import Task
from fedveil.tasks.task_registry import TASKS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pydantic import BaseModel


def toml_values(text: str) -> dict[str, Any]:
    """Parse TOML; numbers with too many digits and excessive nesting are errors, too.

    Raises:
        ConfigError: what is wrong with the text, and where.
    """
    try:
        return tomllib.loads(text)
    except ValueError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = text.splitlines()[int(place[1]) - 1 :][:1] if place else []
        escape = r"; in double quotes a backslash begins an escape: write paths in single quotes, or with /"
        raise ConfigError(f"{error}{escape if line and chr(92) in line[0] else ''}") from None
    except RecursionError:
        raise ConfigError("it is nested too deep") from None


class Config(Section):
    """A whole configuration."""

    data: DataSection = DataSection()
    public: PublicSection = PublicSection()
    model: Annotated[Network, PlainValidator(network_of), PlainSerializer(Network.section)] = network_of({})
    task: Annotated[Task, PlainValidator(task_section_of), PlainSerializer(given_keys)] = Classification()
    method: Annotated[MethodConfig, PlainValidator(method_section_of), PlainSerializer(given_keys)] = FedAvg()
    training: Training = Training()
    privacy: Privacy = Privacy()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _known_model(self) -> Self:
        """Refuse an unknown model immediately if no plugin can provide it."""
        if not self.run.plugins:
            require_known(self.model)
        return self

    def resolved(self) -> dict[str, Any]:
        """Return plain values by section, including the method's current defaults, so that these may change later."""
        return self.model_dump(mode="json") | {"method": self.method.model_dump(mode="json")}

    @property
    def code(self) -> tuple[str, ...]:
        """Return the user-defined files and modules that affect the result: plugins, import paths, other distributions."""
        others = (point.module for point in self.installed)
        return tuple(dict.fromkeys((*self.run.plugins, *self.model.code, *self.data.code, *others)))

    @property
    def installed(self) -> tuple[EntryPoint, ...]:
        """Return the entry points of other distributions that bring method, task, model or data set."""
        named = ((METHODS, self.method.name), (TASKS, self.task.name), (CATALOGUE, self.data.name))
        found = [point for registry, name in named for point in registry.distributions(name)]
        return (*found, *(() if self.model.built_in else OWN_MODELS.distributions(self.model.name)))


FREE_KEYS = frozenset(
    f"{section}.{key}"
    for section, part in Config.model_fields.items()
    for key, field in getattr(part.annotation, "model_fields", {}).items()
    if FREE in field.metadata
)
"""Keys that change no result: they may differ when runs are resumed, compared or grouped."""


def without_free_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as nested dict, without the keys that change no result."""
    return {
        section: {key: value for key, value in part.items() if f"{section}.{key}" not in FREE_KEYS}
        if isinstance(part, Mapping)
        else part
        for section, part in config.items()
    }


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested dict as `section.key: value`."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


def parse(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return the checked configuration of a nested dict, after overrides."""
    for item in overrides:
        override(raw, item)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise refusal(error, Config) from None


def override(raw: dict[str, Any], item: str) -> None:
    """Set `section.key=value` in a nested dict; raise ConfigError if the text has another form."""
    path, equals, text = item.partition("=")
    keys = path.strip().split(".")
    try:
        value = toml_values(f"value = {text}")["value"]
    except ConfigError:
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


def configure(**sections: Any) -> Config:
    """Return a configuration from Python: keywords data, public, model, task, method, training, privacy, run, each a dict.

    `method` may be a method object, `task` a task or its class; method, task and model may be names; `model` may be an nn.Module,
    whose parameters are the initial model, or a class or function that makes one from the run's seed.

    Raises:
        ConfigError: an unknown key or name, an impossible value.
    """
    method = sections.get("method")
    if isinstance(method, MethodConfig):
        sections["method"] = method.model_dump()
    for key in ("method", "model"):
        if isinstance(sections.get(key), str):
            sections[key] = {"name": sections[key]}
    config = parse(sections)
    require_known_names(config)
    return config


def require_known_names(config: Config) -> None:
    """Refuse unknown names before anything slow is imported; plugins may add names.

    Raises:
        ConfigError: an unknown method, task, data set or partition, or impossible options of a partition.
    """
    if config.run.plugins:
        return
    if isinstance(config.method, PluginMethod):
        METHODS.require(config.method.name)
    if isinstance(config.task, PluginTask):
        TASKS.require(config.task.name)
    if config.data.source is None and not config.data.handed_over:
        CATALOGUE.require(config.data.name)
    if not config.data.handed_over:
        checked_options(config.data.partition)


def replace(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy of the configuration with some keys changed, checked as a whole.

    Args:
        changes: the new values by key, such as {"privacy.epsilon": 4.0}, or by section, such as {"method": fv.DPFedAvg(clip=1)}.

    Raises:
        ConfigError: a key is unknown, or a value is impossible or does not fit the others.
    """
    sections: dict[str, Any] = {name: getattr(config, name) for name in config.model_fields_set}
    for key, value in changes.items():
        section, *inner = key.split(".")
        if section not in Config.model_fields or not all(inner):
            raise ConfigError(f"{key} is no key of a configuration: its sections are {', '.join(Config.model_fields)}")
        if not inner:
            sections[section] = value
            continue
        keys = sections[section] = _as_keys(sections.get(section, getattr(config, section)))
        for part in inner[:-1]:
            keys[part] = dict(keys.get(part) or {})
            keys = keys[part]
        keys[inner[-1]] = value
    return configure(**{name: given_keys(part) if isinstance(part, MethodConfig) else part for name, part in sections.items()})


def _as_keys(section: Any) -> dict[str, Any]:
    """Return the given keys of a section; a module that a program passed in stays as it is."""
    if isinstance(section, Network):
        if section.source is None:
            return section.section()
        return {**{key: value for key, value in section.section().items() if key != "name"}, "module": section.source}
    if isinstance(section, MethodConfig | Task):
        return given_keys(section)
    if isinstance(section, Mapping):
        return dict(section)
    given: BaseModel = section
    return given.model_dump(exclude_unset=True)
