"""Trained parts of a model, and the record of a user-defined model in a run; torch is not needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fedveil.errors import ConfigError, nearest

Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


class LoraOptions(BaseModel):
    """Low-rank adapters (Hu et al. 2021) of linear layers and embeddings: W + alpha / rank * B A, with trained A and B.

    targets: patterns of layer names. alpha: by default the rank.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    rank: int = Field(ge=1)
    targets: Patterns
    alpha: float | None = Field(None, gt=0, allow_inf_nan=False)

    @property
    def scaling(self) -> float:
        """Return alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class Parts(BaseModel):
    """Keys of the section `model` common to all models.

    trainable: patterns of the names of trained parameters; by default those that require a gradient, or the adapters.
    weights: safetensors file with public values. lora: adapters to insert.
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
    """Record of a model in a run, sufficient to read the run without the model's code, and to recognise the model.

    class: of the module. shapes: of the trained parameters, in order. statistics: whether it has batch statistics.
    frozen, weights: SHA-256 of the frozen part and of the file of public weights, or empty. initial: SHA-256 of the initial
    trained values except adapters; empty in older runs, which do not record it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    kind: str = Field(alias="class")
    shapes: dict[str, tuple[Annotated[int, Field(ge=0)], ...]] = Field(min_length=1)
    statistics: bool = False
    frozen: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    weights: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    initial: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""


KEYS = ("name", "module", "recorded", *Parts.model_fields)
"""Reserved names, which no option of a model may have."""


def matching(
    patterns: Iterable[str],
    names: Iterable[str],
    key: Literal["trainable", "lora.targets"],
    offered: Iterable[str] | None = None,
) -> set[str]:
    """Return the names that a pattern matches, as in the shell: * is any text, including dots.

    Args:
        offered: names that an error suggests, by default all names.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    among, matches = list(names), set[str]()
    offered = among if offered is None else list(offered)
    for pattern in patterns:
        matched = [name for name in among if fnmatchcase(name, pattern)]
        if not matched:
            listed = ", ".join(offered[:8]) + (f" and {len(offered) - 8} more" if len(offered) > 8 else "")
            advice = f"there are {listed}" if listed else "there is nothing that it could match"
            raise ConfigError(f"model.{key}: {pattern!r} matches nothing{nearest(pattern, offered)}; {advice}")
        matches.update(matched)
    return matches


def trained_shapes(shapes: Mapping[str, tuple[int, ...]], parts: Parts) -> Mapping[str, tuple[int, ...]]:
    """Return the `shapes` of the trained parameters, in order."""
    if parts.trainable is None:
        return shapes
    chosen = matching(parts.trainable, shapes, "trainable")
    return {name: shape for name, shape in shapes.items() if name in chosen}


def present_keys(section: BaseModel) -> dict[str, Any]:
    """Return the keys of a section that differ from the defaults."""
    return section.model_dump(mode="json", exclude_none=True, exclude_defaults=True, by_alias=True)
