"""Public descriptions of user-supplied data, and the split into training and test examples.

A client's random draws come from a hash of the seed and its id; an example's draws also from its position among its client's
examples. So a client who joins or leaves does not change anybody else's split: neighbouring data differ in that client alone, as
the guarantee for clients assumes. A split over all examples together would shift everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedveil.data.catalogue import CATALOGUE
from fedveil.data.seeding import draws, lots, places
from fedveil.errors import ConfigError, DataError, refusal

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
FORMS = (
    "0.2 or {'share': 0.2} (of each client's examples), {'clients': 0.2} (whole clients), {'latest': times, 'share': 0.2} (the "
    "last of each client's), {'latest': times, 'since': date} (all from a public date on), or test data of their own"
)


class SplitRule(BaseModel):
    """clients: share of the clients who are held out as a whole. share: of each client's examples; with latest: the last ones by
    that column, or array of times. since: with latest: all examples from this public time on."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    clients: float | None = Field(None, gt=0, lt=1)
    share: float | None = Field(None, gt=0, lt=1)
    latest: Any = None
    since: Any = None

    @property
    def ranked(self) -> bool:
        """Return whether the time of one example may decide if another one of its client is for testing."""
        return self.latest is not None and self.share is not None

    def text(self, owned: bool = True) -> str:
        """Describe the rule; owned: whether examples have clients."""
        whole = "each client's examples" if owned else "the examples"
        if self.clients is not None:
            return f"whole clients, each with probability {self.clients:g}"
        by = "" if self.latest is None else f" by {self.latest if isinstance(self.latest, str) else 'time'}"
        if self.share is not None:
            return f"{'a random' if self.latest is None else 'the last'} {self.share:g} of {whole}{by}"
        return f"all examples from {self.since} on{by}"


@dataclass(frozen=True)
class Owners:
    """The owner of each example: codes from 0, and the ids as text by code; one owner for all if none is named."""

    codes: Ints
    ids: tuple[str, ...]


def rule_of(test: Any) -> SplitRule | None:
    """Return the rule that a number or a table of keys describes.

    Raises:
        ConfigError: of another form.
    """
    if test is None or isinstance(test, SplitRule):
        return test
    keys = {"share": test} if isinstance(test, float | int) and not isinstance(test, bool) else test
    forms = ({"clients"}, {"share"}, {"latest", "share"}, {"latest", "since"})
    if not isinstance(keys, Mapping) or set(keys) not in forms:
        raise ConfigError(f"test = {test!r}: give {FORMS}")
    try:
        return SplitRule(**keys)
    except ValueError:
        raise ConfigError(f"test = {test!r}: a share lies between 0 and 1; give {FORMS}") from None


def owners_of(ids: NDArray[Any] | None, examples: int) -> Owners:
    """Return codes of the clients, in the order of their ids as text, whatever the order of rows and the type of the ids."""
    if ids is None:
        return Owners(np.zeros(examples, np.int64), ("",))
    known, codes = np.unique(ids.astype(np.str_), return_inverse=True)
    return Owners(codes.reshape(-1).astype(np.int64), tuple(known.tolist()))


def held_out(rule: SplitRule, seed: int, owners: Owners, times: NDArray[Any] | None = None) -> Mask:
    """Choose the test examples.

    Args:
        times: of each example, if the rule uses them.

    Raises:
        DataError: none would be a test example, or all would.
    """
    own = lots(f"{seed}\n{one}" for one in owners.ids)
    if rule.clients is not None:
        mask = (own.astype(np.float64) / 2.0**64 < rule.clients)[owners.codes]
    elif rule.since is not None:
        assert times is not None
        mask = times >= _comparable(rule.since, times)
    else:
        mask = _last(rule.share or 0.0, owners, draws(own, owners.codes) if times is None else times)
    if mask.all() or not mask.any():
        nothing = "nothing to train on" if mask.all() else "no test examples"
        of = f"{len(mask)} examples" if owners.ids == ("",) else f"{len(mask)} examples of {len(owners.ids)} clients"
        raise DataError(
            f"the test split ({rule.text(owners.ids != ('',))}) leaves {nothing} of {of}: take another share, another "
            f"split_seed, or give test data of their own"
        )
    return np.asarray(mask, dtype=np.bool_)


def _last(share: float, owners: Owners, by: NDArray[Any]) -> Mask:
    """Choose the last `share` of each owner's examples by `by`, rounded; at most all but one, so that everybody trains."""
    sizes = np.bincount(owners.codes, minlength=len(owners.ids))
    held = np.minimum(np.floor(share * sizes + 0.5).astype(np.int64), sizes - 1)
    rank = places(owners.codes, by)
    return np.asarray(rank >= (sizes - held)[owners.codes], dtype=np.bool_)


def _comparable(since: Any, times: NDArray[Any]) -> Any:
    try:
        return np.datetime64(since) if times.dtype.kind == "M" else float(since)
    except (TypeError, ValueError):
        kind = "a date, such as '2024-07-01'" if times.dtype.kind == "M" else "a number"
        raise ConfigError(f"test: since = {since!r} cannot be compared with the times: give {kind}") from None


C = TypeVar("C", bound="OwnCard")
Value = bool | int | float | str


class OwnCard(BaseModel):
    """Options that all kinds of user-supplied data share.

    name: of these data. classes: the public list of all labels, in the order of their numbers; or how many there are, 0 for
    quantities; None decides by the type: integers are classes, which are counted, and floats are quantities.
    unit: of quantities. test: the rule of the test split; None holds out a fifth of the clients, or of the examples where there
    are no clients. split_seed: of that split.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    name: str = Field("own", pattern=r"^\w[\w.-]*$")
    classes: int | tuple[Value, ...] | None = None
    unit: str = ""
    test: SplitRule | None = None
    split_seed: int = Field(0, ge=0, lt=2**62)

    @field_validator("*", mode="before")
    @classmethod
    def _in_order(cls, value: Any, info: Any) -> Any:
        """Convert arrays to lists; refuse sets, whose order differs from process to process."""
        if info.field_name == "features" and (isinstance(value, str | Mapping) or not isinstance(value, Iterable)):
            columns = list(value) if isinstance(value, Mapping) else [str(value)]
            raise ConfigError(f"features = {value!r}: give a list of columns, such as {columns}")
        for one in value.values() if isinstance(value, Mapping) else (value,):
            if isinstance(one, set | frozenset):
                raise ConfigError(f"{info.field_name} is given as a set, which has no order of its own: give a list")
        return value.tolist() if hasattr(value, "tolist") else value

    @field_validator("name")
    @classmethod
    def _own(cls, name: str) -> str:
        if name in CATALOGUE:
            raise ConfigError(f"name = {name!r} is the name of a data set of fedveil: choose another")
        return name

    @field_validator("classes")
    @classmethod
    def _several(cls, classes: int | tuple[Value, ...] | None) -> int | tuple[Value, ...] | None:
        count = classes if isinstance(classes, int) else 2 if classes is None else len(classes)
        if isinstance(classes, bool) or count < 0 or count == 1:
            raise ConfigError(
                f"classes = {classes!r}: give the public list of two or more labels, how many there are, or 0 for quantities"
            )
        if isinstance(classes, tuple) and len({reading(label) for label in classes}) < count:
            raise ConfigError(
                f"classes = {list(classes)!r} names a label twice: give each once; a column of numbers holds '1', '01' and '1.0' "
                f"as one"
            )
        return classes

    @field_validator("test", mode="before")
    @classmethod
    def _rule(cls, test: Any) -> SplitRule | None:
        return rule_of(test)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the labels as text; empty if only their number is known."""
        return tuple(str(label) for label in self.classes) if isinstance(self.classes, tuple) else ()


class ArrayCard(OwnCard):
    """Arrays. mean, std: public constants, one number or one a channel (for features: one a feature), by which inputs are
    normalised as (x / scale - mean) / std; left out, bytes of images become -1 to 1 and all else stays as it is.
    features: names of the inputs. vocabulary: number of tokens, where inputs are tokens."""

    features: tuple[str, ...] = ()
    mean: float | tuple[float, ...] | None = None
    std: float | tuple[float, ...] | None = None
    scale: float | None = Field(None, gt=0, allow_inf_nan=False)
    vocabulary: int = Field(0, ge=0)

    @field_validator("mean", "std", mode="before")
    @classmethod
    def _constants(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ConfigError(_computed("mean and std", value, "mean=50.0, std=20.0"))
        return value

    @field_validator("std")
    @classmethod
    def _positive(cls, std: float | tuple[float, ...] | None) -> float | tuple[float, ...] | None:
        if not all(each > 0 for each in (std if isinstance(std, tuple) else (1.0 if std is None else std,))):
            raise ConfigError(f"std = {std!r}: give numbers above 0")
        return std


class TableCard(OwnCard):
    """A table. target: the column, or columns, to learn. features: columns in this order; left out, all others.
    client: the column that says whose row it is. categories: the public list of all values of a column, which becomes one column
    of 0 and 1 for each. missing: the public constant that stands for a missing value of a column.
    indicators: columns of `missing` that get a further feature, 1 where the value is missing and 0 elsewhere.
    normalise: public (mean, std) of a column."""

    target: str | tuple[str, ...]
    features: tuple[str, ...] = ()
    client: str | None = None
    categories: dict[str, tuple[Value, ...]] = Field(default_factory=dict)
    missing: dict[str, Value] = Field(default_factory=dict)
    indicators: tuple[str, ...] = ()
    normalise: dict[str, tuple[float, float]] = Field(default_factory=dict)

    @field_validator("missing", "normalise", mode="before")
    @classmethod
    def _constants(cls, value: Any, info: Any) -> Any:
        if not isinstance(value, Mapping):
            example = "{'age': 0}" if info.field_name == "missing" else "{'age': (50, 20)}"
            raise ConfigError(_computed(info.field_name, value, f"{info.field_name}={example}"))
        return value

    @field_validator("features")
    @classmethod
    def _once(cls, features: tuple[str, ...]) -> tuple[str, ...]:
        if not features or len(set(features)) < len(features):
            raise ConfigError(f"features = {list(features)}: name one column or more, each once; left out, it is all others")
        return features

    @model_validator(mode="after")
    def _can_be_missing(self) -> Self:
        if odd := [name for name in self.indicators if name not in self.missing]:
            raise ConfigError(
                f"indicators names the column {odd[0]!r}, for which missing has no constant: give missing={{{odd[0]!r}: ...}} as "
                f"well, or remove it from indicators"
            )
        return self

    @field_validator("categories")
    @classmethod
    def _different(cls, categories: dict[str, tuple[Value, ...]]) -> dict[str, tuple[Value, ...]]:
        for name, values in categories.items():
            if not values or len({reading(value) for value in values}) < len(values):
                raise ConfigError(
                    f"categories[{name!r}] = {list(values)!r}: list each value that the column can have, once; a column of "
                    f"numbers holds '1', '01' and '1.0' as one"
                )
        return categories

    @field_validator("normalise")
    @classmethod
    def _positive(cls, normalise: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name, (_, std) in normalise.items():
            if not std > 0:
                raise ConfigError(f"normalise[{name!r}]: the standard deviation is {std:g}; give a number above 0")
        return normalise

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns to learn."""
        return (self.target,) if isinstance(self.target, str) else self.target


def checked_card(kind: Callable[..., C], **facts: Any) -> C:
    """Make a card, with the errors of a configuration.

    Raises:
        ConfigError: an unknown or impossible fact.
    """
    try:
        return kind(**facts)
    except ValidationError as error:
        raise refusal(error, kind) from None  # type: ignore[arg-type]


def canonical(value: Any) -> str:
    """Return a value as text, however the table stored it: 1, 1.0 and "1" are the same value."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def reading(value: Any) -> str:
    """Return a label or category as text, the same for columns of numbers and of texts: "01" is 1 if all are numbers."""
    return canonical(float(value) if isinstance(value, str) and is_number(value) else value)


def is_number(text: str) -> bool:
    """Return whether a column that holds this can be one of numbers; 1_000, which only Python reads, is text."""
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text


def _computed(key: str, value: Any, example: str) -> str:
    return (
        f"{key} = {value!r}: nothing is computed from private data without noise; give public constants, from a public table or "
        f"the range that the values can have, such as {example}"
    )
