"""The section `model`: a built-in network, one of one's own by name or import path, or one that a program handed over."""

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
"""The whole model is trained, as it is built."""

HANDED_OVER = "handed-over"
"""The name of a model that a program handed over."""


class OwnOptions(BaseModel):
    """Options of a model of one's own, which its code checks: reading a configuration imports none."""

    model_config = ConfigDict(frozen=True, extra="allow")


@dataclass(frozen=True)
class Network:
    """The section `model`: a network's name, and its options as that network types them (see `docs/models.md`).

    Args:
        parts: what of it is trained. recorded: what a run recorded of it; None for a built-in network trained whole.
        source: a module that a program handed over, or what makes one. admit: asked before code that a run names is imported.
    """

    name: str
    options: BaseModel
    parts: Parts = WHOLE
    recorded: RecordedModel | None = None
    source: Any = field(default=None, compare=False, repr=False)
    admit: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    @property
    def built_in(self) -> bool:
        """Whether its shapes are known without torch."""
        return self.name in models.MODELS

    @property
    def plain(self) -> bool:
        """Whether it is built in and trained whole: then nothing need be recorded of it."""
        return self.built_in and self.parts == WHOLE

    @property
    def needs_building(self) -> bool:
        """Whether its shapes are known only once it is built."""
        return self.recorded is None and (not self.built_in or self.parts.lora is not None)

    @property
    def keeps_statistics(self) -> bool | None:
        """Whether it normalises over batches, with statistics that no gradient shows; None where only its code knows."""
        if self.recorded is not None:
            return self.recorded.statistics
        return getattr(self.options, "norm", None) == "batch" if self.built_in else None

    @property
    def code(self) -> tuple[str, ...]:
        """The module, or the file, that an import path names."""
        return (self.name.rpartition(":")[0],) if ":" in self.name else ()

    def section(self) -> dict[str, Any]:
        """The keys of the section as they were given, and what was recorded."""
        given = {"name": self.name, **self.options.model_dump(mode="json", exclude_unset=True), **present_keys(self.parts)}
        return given if self.recorded is None else {**given, "recorded": present_keys(self.recorded)}


def network_of(section: Any) -> Network:
    """The network that a section describes, or that is handed over: a module, or a class or function that makes one.

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
    known = None if recorded is None else _checked(RecordedModel, recorded, "model.recorded.")
    return Network(name, _checked(kind, options, "model."), parts, known, source)


def _checked(kind: type[T], options: Any, prefix: str) -> T:
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        raise refusal(error, kind, prefix) from None
