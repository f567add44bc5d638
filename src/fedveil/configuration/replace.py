"""One or a few keys of a finished configuration, changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedveil.configuration.config import Config, configure
from fedveil.configuration.network import Network
from fedveil.configuration.sections import given_keys
from fedveil.errors import ConfigError
from fedveil.methods.base import MethodConfig
from fedveil.tasks.task import Task

if TYPE_CHECKING:
    from pydantic import BaseModel


def replace(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy of the configuration with some keys changed, checked as a whole.

    Args:
        changes: the new values by key, such as {"privacy.epsilon": 4.0}, or by section, such as {"method": fv.DPFedAvg(clip=1)}.

    Raises:
        ConfigError: a key that there is not, an impossible value, or one that does not fit the others.
    """
    sections: dict[str, Any] = {name: getattr(config, name) for name in config.model_fields_set}
    for key, value in changes.items():
        section, *inner = key.split(".")
        if section not in Config.model_fields or not all(inner):
            raise ConfigError(f"{key} is no key of a configuration: its sections are {', '.join(Config.model_fields)}")
        if not inner:
            sections[section] = value
            continue
        found = sections[section] = _as_keys(sections.get(section, getattr(config, section)))
        for part in inner[:-1]:
            found[part] = dict(found.get(part) or {})
            found = found[part]
        found[inner[-1]] = value
    return configure(**{name: given_keys(part) if isinstance(part, MethodConfig) else part for name, part in sections.items()})


def _as_keys(section: Any) -> dict[str, Any]:
    """The keys of a section that were given; a module that a program handed over stays."""
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
