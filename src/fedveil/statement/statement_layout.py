"""The privacy statement as JSON, as a Markdown page, as HTML, and in the terminal."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from html import escape as html
from io import StringIO
from pathlib import Path
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from fedveil.accounting.types import Audit
from fedveil.errors import ConfigError
from fedveil.statement.statement import Statement
from fedveil.statement.statement_text import Item, TextCell, TextSection, TextTable, in_words, statement_text, variant_of

FORMAT = "fedveil-statement/1"
AUDITS = "audits.json"
"""Audits made of a run since; the statement itself is bound by the run's digests and never written again."""
_WRITTEN_ONLY = ("format", "in_words", "contradictions", "verification")


def to_dict(statement: Statement) -> dict[str, Any]:
    """Return the statement's fields, its paragraph and its contradictions in words; infinities are the string `inf`.

    Without noise in shares there is no field for them, as in statements of earlier versions.
    """
    absent = {"shares"} if statement.shares is None else set[str]()
    return {
        "format": FORMAT,
        **{name: value for name, value in _plain(statement).items() if name not in absent},
        "in_words": in_words(statement),
        "contradictions": [str(c) for c in statement.contradictions()],
    }


def from_dict(values: Mapping[str, Any]) -> Statement:
    """Return the statement that `to_dict` wrote; derived values are computed again, not read."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"a statement is an object, and this is a {type(values).__name__}")
    if values.get("format") != FORMAT:
        raise ConfigError(f"not a privacy statement of format {FORMAT!r}: format is {values.get('format')!r}")
    kept = {key: value for key, value in values.items() if key not in _WRITTEN_ONLY}
    built = _build(Statement, kept, "statement")
    assert isinstance(built, Statement)
    return built


def audits_to_list(statement: Statement) -> list[dict[str, Any]]:
    """Return the audits of all views, as `audits.json` holds them."""
    return [_plain(audit) for numbers in statement.views for audit in numbers.audits]


def read_statement(run: Path) -> Statement:
    """Read the statement of a run directory (`statement.json`), with later audits of the run (`audits.json`).

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
    """Convert `value` to `kind`: a dataclass, an enumeration, an optional, a tuple, a literal or a plain value."""
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
    """Return the dataclass `kind` with its fields read from a JSON object, which may have no other entries."""
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


_UNTITLED = ("words", "facts")


def to_markdown(statement: Statement) -> str:
    """Return the whole statement as a Markdown page."""
    title = f"# Privacy statement: {statement.method} ({variant_of(statement)})"
    parts = [
        part
        for key, section in statement_text(statement).items()
        for part in markdown_section(section, titled=key not in _UNTITLED)
    ]
    return "\n\n".join([title, *parts]) + "\n"


def markdown_section(section: TextSection, *, titled: bool = True) -> Iterator[str]:
    """Return the paragraphs of a section, under its title."""
    if titled:
        yield f"## {section.title}"
    yield from section.paragraphs
    if section.table is not None:
        yield _table(section.table)
    if section.items:
        yield from filter(None, [section.lead])
        yield _markdown_bullets(section.items)


def _markdown_bullets(items: Iterable[Item]) -> str:
    return "\n".join(f"- {item.text} (why: {item.why})" if item.why else f"- {item.text}" for item in items)


def _table(table: TextTable) -> str:
    rows = [[_markdown_cell(cell) for cell in row] for row in table.rows]
    lines = [table.headings, ["---"] * len(table.headings), *rows]
    return "\n".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines)


def _markdown_cell(cell: TextCell) -> str:
    text = ": ".join(filter(None, (cell.text, cell.note)))
    return f"{text} **{cell.badge}**" if cell.badge else text


def _to_html(statement: Statement) -> str:
    """Return the whole statement as HTML without styles, as a notebook shows it."""
    head = f"<h3>Privacy statement: {html(statement.method)} ({html(variant_of(statement))})</h3>"
    return head + "".join(map(_html_section, statement_text(statement).values()))


def _html_section(section: TextSection) -> str:
    title = f"<h4>{html(section.title)}</h4>" if section.title else ""
    lines = "".join(f"<p>{html(text)}</p>" for text in (*section.paragraphs, section.lead) if text)
    items = "".join(
        f"<li>{html(item.text)}{f' <small>({html(item.why)})</small>' * bool(item.why)}</li>" for item in section.items
    )
    return title + lines + (html_table(section.table) if section.table else "") + (f"<ul>{items}</ul>" if items else "")


def html_table(table: TextTable) -> str:
    head = "".join(f"<th>{html(text)}</th>" for text in table.headings)
    cells = ("".join(f"<td>{html(' '.join(filter(None, (c.badge, c.text, c.note))))}</td>" for c in row) for row in table.rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


class PrintedStatement(Statement):
    """A privacy statement: `print` shows what `fedveil certify` prints, a notebook shows the same as HTML."""

    @classmethod
    def of(cls, statement: Statement) -> Self:
        """Return the same statement."""
        return cls(**{field.name: getattr(statement, field.name) for field in fields(statement)})

    def __str__(self) -> str:
        console = Console(file=(text := StringIO()), width=100)
        render(self, console)
        return text.getvalue().strip("\n")

    def _repr_html_(self) -> str:
        return _to_html(self)


_COLOURS = {"yes": "green", "perhaps": "yellow", "no": "red"}
_BRIEF = ("facts", "warnings", "numbers", "groups", "contradictions", "words")
_WHOLE = (*_BRIEF[:-1], "learn", "assumptions", "not_protected", "notes", "words")


def render(statement: Statement, console: Console) -> None:
    """Print the whole statement: the three numbers, why some are inf, learnability, assumptions, limits, and the paragraph."""
    _print(statement, console, _WHOLE)


def render_brief(statement: Statement, console: Console) -> None:
    """Print the short statement: the three numbers, why some are inf, and the paragraph."""
    _print(statement, console, _BRIEF)


def render_verdict(statement: Statement, console: Console) -> None:
    """Print the warnings; and whether the noise leaves anything to learn from, and what is expected; if not, what would help."""
    sections = statement_text(statement)
    if "warnings" in sections:
        _section(sections["warnings"], console)
    if statement.learnability is None:
        return
    section = sections["learn"]
    said = escape(" ".join(section.paragraphs[:-1]))
    console.print(f"[bold]{section.title}[/] [{_COLOURS[section.tone]}]{said}[/]", highlight=False)
    if section.tone != "yes":
        console.print(escape(section.lead), highlight=False)
        _print_bullets(section.items, console)


def _print(statement: Statement, console: Console, keys: tuple[str, ...]) -> None:
    sections = statement_text(statement)
    console.print(f"\n[bold]Privacy statement[/] {escape(statement.method)} ({escape(variant_of(statement))})", highlight=False)
    for key in keys:
        if key in sections:
            _section(sections[key], console)


def _section(section: TextSection, console: Console) -> None:
    if section.tone == "warning":
        for item in section.items:
            console.print(f"[bold red]warning:[/] {escape(item.text)}", highlight=False)
        return
    if section.title:
        console.print(f"\n[bold]{section.title}[/]")
    paragraphs = [escape(text) for text in section.paragraphs]
    if section.tone and paragraphs:
        paragraphs[0] = f"[{_COLOURS[section.tone]}]{paragraphs[0]}[/]"
    for text in paragraphs:
        console.print(text, highlight=False)
    if section.table is not None:
        console.print(_grid(section.table))
        for remark in section.table.remarks:
            console.print(escape(remark), highlight=False)
    if section.lead:
        console.print(escape(section.lead), highlight=False)
    if section.items:
        _print_bullets(section.items, console)


def _grid(table: TextTable) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD)
    for heading in table.headings:
        grid.add_column(heading, overflow="fold")
    for i, (first, *others) in enumerate(table.rows):
        name = f"{first.text} *" if i == table.own else first.text
        grid.add_row(escape(name), *map(_terminal_cell, others))
    return grid


def _terminal_cell(cell: TextCell) -> str:
    text = escape(cell.text or ("-" if cell.note else ""))
    text = f"[bold]{text}[/]" if cell.strong else text
    return f"{text} [bold red]{cell.badge}[/]" if cell.badge else text


def _print_bullets(items: tuple[Item, ...], console: Console) -> None:
    """Print lines with a hanging indent."""
    grid = Grid.grid(padding=(0, 1))
    for item in items:
        why = f"\n[dim]because {escape(item.why)}[/]" if item.why else ""
        grid.add_row(" -", escape(item.text) + why)
    console.print(grid, highlight=False)
