"""The privacy statement as Python prints it, and as a notebook shows it."""

from __future__ import annotations

from dataclasses import fields
from html import escape
from io import StringIO

from fedveil.statement import statement as stated
from fedveil.statement.statement_text import TextSection, TextTable, statement_text, variant_of


class Statement(stated.Statement):
    """A privacy statement: `print` shows what `fedveil certify` prints, a notebook shows the same as HTML."""

    @classmethod
    def of(cls, statement: stated.Statement) -> Statement:
        """Return the same statement."""
        return cls(**{field.name: getattr(statement, field.name) for field in fields(statement)})

    def __str__(self) -> str:
        from rich.console import Console

        from fedveil.statement.statement_terminal import render

        console = Console(file=(text := StringIO()), width=100)
        render(self, console)
        return text.getvalue().strip("\n")

    def _repr_html_(self) -> str:
        head = f"<h3>Privacy statement: {escape(self.method)} ({escape(variant_of(self))})</h3>"
        return head + "".join(map(_section, statement_text(self).values()))


def _section(section: TextSection) -> str:
    title = f"<h4>{escape(section.title)}</h4>" if section.title else ""
    lines = "".join(f"<p>{escape(text)}</p>" for text in (*section.paragraphs, section.lead) if text)
    items = "".join(
        f"<li>{escape(item.text)}{f' <small>({escape(item.why)})</small>' * bool(item.why)}</li>" for item in section.items
    )
    return title + lines + (_table(section.table) if section.table else "") + (f"<ul>{items}</ul>" if items else "")


def _table(table: TextTable) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in table.headings)
    cells = ("".join(f"<td>{escape(' '.join(filter(None, (c.badge, c.text, c.note))))}</td>" for c in row) for row in table.rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
