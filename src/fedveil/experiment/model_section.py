"""The section `model`: a built-in network, a user-defined one by name or import path, or one that a program passes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedveil.data.own.data_source import whole_path
from fedveil.errors import ConfigError, refusal
from fedveil.models import model_registry as models
from fedveil.models.parts import Parts, RecordedModel, present_keys

T = TypeVar("T", bound=BaseModel)

WHOLE = Parts()
"""Marks a model that is trained as a whole, as it is built."""

HANDED_OVER = "handed-over"
"""Name of a model that a program passed in."""


class OwnOptions(BaseModel):
    """Options of a user-defined model, which its own code checks: reading a configuration imports no code."""

    model_config = ConfigDict(frozen=True, extra="allow")


@dataclass(frozen=True)
class Network:
    """The section `model`: a network's name, and its options with the types that the network defines (see `docs/models.md`).

    Args:
        parts: to be trained. recorded: facts that a run recorded; None for a built-in network trained as a whole.
        source: a module that a program passed in, or a function that makes one. admit: called before importing code that a run
            names; may refuse it.
    """

    name: str
    options: BaseModel
    parts: Parts = WHOLE
    recorded: RecordedModel | None = None
    source: Any = field(default=None, compare=False, repr=False)
    admit: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    @property
    def built_in(self) -> bool:
        """Return whether the shapes are known without torch."""
        return self.name in models.MODELS

    @property
    def plain(self) -> bool:
        """Return whether the network is built in and trained as a whole, so that nothing need be recorded."""
        return self.built_in and self.parts == WHOLE

    @property
    def needs_building(self) -> bool:
        """Return whether the shapes are known only once the network is built."""
        return self.recorded is None and (not self.built_in or self.parts.lora is not None)

    @property
    def keeps_statistics(self) -> bool | None:
        """Return whether the network has batch statistics, which no gradient reflects; None if only its code knows."""
        if self.recorded is not None:
            return self.recorded.statistics
        return getattr(self.options, "norm", None) == "batch" if self.built_in else None

    @property
    def code(self) -> tuple[str, ...]:
        """Return the module, or the file, that an import path names."""
        return (self.name.rpartition(":")[0],) if ":" in self.name else ()

    def section(self) -> dict[str, Any]:
        """Return the given keys of the section, and the recorded facts."""
        given = {"name": self.name, **self.options.model_dump(mode="json", exclude_unset=True), **present_keys(self.parts)}
        return given if self.recorded is None else {**given, "recorded": present_keys(self.recorded)}


def network_of(section: Any) -> Network:
    """Return the network that a section describes, or that is passed in: a module, or a class or function that makes one.

    Raises:
        ConfigError: unknown name or option, impossible value.
    """
    if isinstance(section, Network):
        return section
    if callable(section):
        section = {"module": section}
    if not isinstance(section, Mapping):
        raise ConfigError(f"model = {section!r} is not a section: give one with the key name, or an nn.Module")
    options = dict(section)
    source = options.pop("module", None)
    name = str(options.pop("name", "mlp" if source is None else HANDED_OVER))
    if source is not None and (name != HANDED_OVER or not callable(source)):
        raise ConfigError(f"model.module = {source!r}: give an nn.Module, or what makes one, and no model.name beside it")
    recorded = options.pop("recorded", None)
    if isinstance(options.get("weights"), str):
        options["weights"] = whole_path(options["weights"])
    if ".py:" in name:
        name = ":".join((whole_path(name.rpartition(":")[0]), name.rpartition(":")[2]))
    parts = _checked(Parts, {key: options.pop(key) for key in Parts.model_fields if key in options}, "model.")
    if name in models.MODELS:
        kind: type[BaseModel] = models.options_model(name)
    else:
        kind = OwnOptions
    recorded_facts = None if recorded is None else _checked(RecordedModel, recorded, "model.recorded.")
    return Network(name, _checked(kind, options, "model."), parts, recorded_facts, source)


def _checked(kind: type[T], options: Any, prefix: str) -> T:
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        raise refusal(error, kind, prefix) from None
