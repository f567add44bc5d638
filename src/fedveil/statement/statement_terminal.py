"""The privacy statement in the terminal; readable at 80 columns."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from fedveil.statement.statement import Statement
from fedveil.statement.statement_text import Item, TextCell, TextSection, TextTable, statement_text, variant_of

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
        _bullets(section.items, console)


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
        _bullets(section.items, console)


def _grid(table: TextTable) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD)
    for heading in table.headings:
        grid.add_column(heading, overflow="fold")
    for i, (first, *others) in enumerate(table.rows):
        name = f"{first.text} *" if i == table.own else first.text
        grid.add_row(escape(name), *map(_cell, others))
    return grid


def _cell(cell: TextCell) -> str:
    text = escape(cell.text or ("-" if cell.note else ""))
    text = f"[bold]{text}[/]" if cell.strong else text
    return f"{text} [bold red]{cell.badge}[/]" if cell.badge else text


def _bullets(items: tuple[Item, ...], console: Console) -> None:
    """Lines with a hanging indent."""
    grid = Grid.grid(padding=(0, 1))
    for item in items:
        why = f"\n[dim]because {escape(item.why)}[/]" if item.why else ""
        grid.add_row(" -", escape(item.text) + why)
    console.print(grid, highlight=False)
