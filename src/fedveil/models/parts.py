"""Which parts of a model are trained, and what is recorded of a model that only its own code can build; needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedveil.errors import ConfigError, nearest

Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


class LoraOptions(BaseModel):
    """Low-rank adapters (Hu et al. 2021) of linear layers and embeddings: W + alpha / rank * B A, of which A and B are trained.

    targets: patterns of the names of the layers. alpha: left out, it is the rank.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    rank: int = Field(ge=1)
    targets: Patterns
    alpha: float | None = Field(None, gt=0, allow_inf_nan=False)

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class Parts(BaseModel):
    """The keys of the section `model` that every model has.

    trainable: patterns of the names of the parameters that are trained; left out, those that require a gradient, or the adapters.
    weights: safetensors file with public values. lora: adapters to put in.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    trainable: Patterns | None = None
    weights: str | None = None
    lora: LoraOptions | None = None

    @field_validator("trainable", mode="before")
    @classmethod
    def _some(cls, patterns: Any) -> Any:
        if isinstance(patterns, list | tuple) and not patterns:
            raise ConfigError('model.trainable = [] trains nothing: name parameters, such as ["head.*"], or leave the key out')
        return patterns

    @field_validator("weights")
    @classmethod
    def _safetensors(cls, file: str | None) -> str | None:
        if file is not None and not file.endswith(".safetensors"):
            raise ConfigError(
                f"model.weights = {file!r}: only safetensors files are read, since reading others can run code: write one with "
                f"safetensors.torch.save_file(module.state_dict(), 'NAME.safetensors')"
            )
        return file


class RecordedModel(BaseModel):
    """What a run records of a model: enough to read the run without the code, and to know the model again.

    class: of the module. shapes: of the trained parameters, in order. statistics: whether it has batch statistics.
    frozen, weights: SHA-256 of the frozen part and of the file of public weights, or empty. initial: of the initial values of
    what is trained, adapters excepted; empty in runs before they were recorded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    kind: str = Field(alias="class")
    shapes: dict[str, tuple[Annotated[int, Field(ge=0)], ...]] = Field(min_length=1)
    statistics: bool = False
    frozen: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    weights: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    initial: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""


KEYS = ("name", "module", "recorded", *Parts.model_fields)
"""What no option of a model may be called."""


def matching(
    patterns: Iterable[str],
    names: Iterable[str],
    key: Literal["trainable", "lora.targets"],
    offered: Iterable[str] | None = None,
) -> set[str]:
    """The names that a pattern matches, as the shell does: * is any text, dots included.

    Args:
        offered: what an error offers instead, by default all names.

    Raises:
        ConfigError: a pattern that matches nothing.
    """
    among, found = list(names), set[str]()
    offered = among if offered is None else list(offered)
    for pattern in patterns:
        matched = [name for name in among if fnmatchcase(name, pattern)]
        if not matched:
            shown = ", ".join(offered[:8]) + (f" and {len(offered) - 8} more" if len(offered) > 8 else "")
            there = f"there are {shown}" if shown else "there is nothing that it could match"
            raise ConfigError(f"model.{key}: {pattern!r} matches nothing{nearest(pattern, offered)}; {there}")
        found.update(matched)
    return found


def trained_shapes(shapes: Mapping[str, tuple[int, ...]], parts: Parts) -> Mapping[str, tuple[int, ...]]:
    """Those of all `shapes` that are trained, in their order."""
    if parts.trainable is None:
        return shapes
    chosen = matching(parts.trainable, shapes, "trainable")
    return {name: shape for name, shape in shapes.items() if name in chosen}


def present_keys(section: BaseModel) -> dict[str, Any]:
    """The keys of a section that say something."""
    return section.model_dump(mode="json", exclude_none=True, exclude_defaults=True, by_alias=True)
