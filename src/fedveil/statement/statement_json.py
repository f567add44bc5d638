"""Statements as plain values for strict JSON, and back."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from fedveil.accounting.types import Audit
from fedveil.errors import ConfigError
from fedveil.statement.plain_words import in_words
from fedveil.statement.statement import Statement

FORMAT = "fedveil-statement/1"
AUDITS = "audits.json"
"""Audits made of a run since; the statement itself is bound by the run's digests and never written again."""
_WRITTEN_ONLY = ("format", "in_words", "contradictions", "verification")


def to_dict(statement: Statement) -> dict[str, Any]:
    """The statement's fields, its paragraph and its contradictions in words; infinities are the string `inf`."""
    return {
        "format": FORMAT,
        **_plain(statement),
        "in_words": in_words(statement),
        "contradictions": [str(c) for c in statement.contradictions()],
    }


def from_dict(values: Mapping[str, Any]) -> Statement:
    """The statement that `to_dict` wrote; what follows from the fields is computed again, not read."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"a statement is an object, and this is a {type(values).__name__}")
    if values.get("format") != FORMAT:
        raise ConfigError(f"not a privacy statement of format {FORMAT!r}: format is {values.get('format')!r}")
    kept = {key: value for key, value in values.items() if key not in _WRITTEN_ONLY}
    built = _build(Statement, kept, "statement")
    assert isinstance(built, Statement)
    return built


def audits_to_list(statement: Statement) -> list[dict[str, Any]]:
    """The audits of all views, as `audits.json` holds them."""
    return [_plain(audit) for numbers in statement.views for audit in numbers.audits]


def read_statement(run: Path) -> Statement:
    """The statement of a run directory (`statement.json`), with the audits made of the run since (`audits.json`).

    Raises:
        ConfigError: no readable statement there.
    """
    try:
        statement = from_dict(json.loads((run / "statement.json").read_text(encoding="utf-8")))
        made = json.loads((run / AUDITS).read_text(encoding="utf-8")) if (run / AUDITS).exists() else []
        if not made:
            return statement
        views = tuple(replace(numbers, audits=()) for numbers in statement.views)
        return replace(statement, views=views).with_audits(_build(Audit, audit, "audits") for audit in made)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{run} is not a run directory with a readable statement.json ({error}): give one that `fedveil run` left"
        ) from None


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def _build(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`: a dataclass, an enumeration, an optional, a tuple, a literal or a plain value."""
    origin, among = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _build(next(a for a in among if a is not type(None)), value, where)
    if origin is tuple:
        return tuple(_build(among[0], item, f"{where}[{i}]") for i, item in enumerate(_of(list, value, where)))
    if origin is typing.Literal:
        if value not in among:
            raise ConfigError(f"{where}: {value!r} is not one of {', '.join(map(repr, among))}")
        return value
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind, value, where)
    if is_dataclass(kind):
        return _dataclass(kind, _of(dict, value, where), where)
    if kind is float:
        number = math.inf if value == "inf" else value
        return float(_of((int, float), number, where))
    return _of(kind, value, where)


def _dataclass(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    known = {f.name for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    if unknown := sorted(set(value) - known):
        raise ConfigError(f"{where}: unknown entries {unknown}")
    if missing := sorted(required - set(value)):
        raise ConfigError(f"{where}: missing entries {missing}")
    return kind(**{name: _build(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _enum(kind: type[Enum], value: Any, where: str) -> Enum:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{where}: {value!r} is not one of {', '.join(repr(m.value) for m in kind)}") from None


def _of(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{where}: expected {getattr(kind, '__name__', 'a number')}, got {value!r}")
    return value
