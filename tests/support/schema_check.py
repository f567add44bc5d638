"""A small checker of JSON Schema: the keywords that the registry's schema uses, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from typing import Any

_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float)}
_KNOWN = {"type", "enum", "format", "required", "properties", "additionalProperties", "items", "minItems", "$comment"}


def schema_errors(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """What is wrong with a value, each with its place; refuses a schema with a keyword that it does not know."""
    if unknown := set(schema) - _KNOWN:
        raise ValueError(f"keywords {sorted(unknown)} are not checked")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and (isinstance(value, bool) or not any(isinstance(value, _TYPES[kind]) for kind in kinds)):
        yield f"{where}: not of type {' or '.join(kinds)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    if schema.get("format") == "date" and not _is_date(value):
        yield f"{where}: {value!r} is no date"
    if isinstance(value, list):
        yield from [f"{where}: too short"] * (len(value) < schema.get("minItems", 0))
        for i, item in enumerate(value):
            yield from schema_errors(item, schema.get("items", {}), f"{where}[{i}]")
    if isinstance(value, dict):
        yield from _of_object(value, schema, where)


def _of_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in dict.fromkeys([*schema.get("required", []), *value]):
        place = f"{where}.{name}" if where else name
        if name not in value:
            yield f"{place}: missing"
        elif name in known:
            yield from schema_errors(value[name], known[name], place)
        elif schema.get("additionalProperties") is False:
            yield f"{place}: not of the schema"


def _is_date(text: str) -> bool:
    try:
        return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text) and date.fromisoformat(text))
    except ValueError:
        return False
