"""The privacy statement as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fedveil.statement.statement import Statement
from fedveil.statement.statement_text import Item, TextCell, TextSection, TextTable, statement_text, variant_of

_UNTITLED = ("words", "facts")


def to_markdown(statement: Statement) -> str:
    """The whole statement as a Markdown page."""
    title = f"# Privacy statement: {statement.method} ({variant_of(statement)})"
    parts = [
        part
        for key, section in statement_text(statement).items()
        for part in markdown_section(section, titled=key not in _UNTITLED)
    ]
    return "\n\n".join([title, *parts]) + "\n"


def markdown_section(section: TextSection, *, titled: bool = True) -> Iterator[str]:
    """The paragraphs of a section, under its title."""
    if titled:
        yield f"## {section.title}"
    yield from section.paragraphs
    if section.table is not None:
        yield _table(section.table)
    if section.items:
        yield from filter(None, [section.lead])
        yield _bullets(section.items)


def _bullets(items: Iterable[Item]) -> str:
    return "\n".join(f"- {item.text} (why: {item.why})" if item.why else f"- {item.text}" for item in items)


def _table(table: TextTable) -> str:
    rows = [[_cell(cell) for cell in row] for row in table.rows]
    lines = [table.headings, ["---"] * len(table.headings), *rows]
    return "\n".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines)


def _cell(cell: TextCell) -> str:
    text = ": ".join(filter(None, (cell.text, cell.note)))
    return f"{text} **{cell.badge}**" if cell.badge else text
