"""The privacy statement in the terminal; readable at 80 columns."""

from __future__ import annotations

import math
from typing import Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedveil.accounting.learnability import Learnability
from fedveil.accounting.types import View
from fedveil.statement.statement import VIEWS, Statement
from fedveil.statement.statement_text import (
    advice_heading,
    audited_cell,
    claimed_cell,
    held_promise,
    kind_line,
    number,
    percent,
    run_line,
    scope_line,
    verdict_in_words,
)

_COLOURS = {"yes": "green", "perhaps": "yellow", "no": "red"}


def render(statement: Statement, console: Console) -> None:
    """Print the whole statement: the three numbers, why some are inf, learnability, assumptions, limits, and the paragraph."""
    s = statement
    _numbers(s, console)
    if s.learnability is not None:
        _learnability(s.learnability, console)
    _list(console, "Assumptions", [f"{escape(a.what)}\n[dim]because {escape(a.why)}[/]" for a in s.assumptions])
    _list(console, "Not protected", [escape(line) for line in s.not_protected])
    _list(console, "Notes", [escape(line) for line in s.notes])
    _words(s, console)


def render_brief(statement: Statement, console: Console) -> None:
    """Print the short statement: the three numbers, why some are inf, and the paragraph."""
    _numbers(statement, console)
    _words(statement, console)


def _numbers(s: Statement, console: Console) -> None:
    console.print(f"\n[bold]Privacy statement[/] {escape(s.method)} ({escape(s.variant)})", highlight=False)
    target = "" if s.target_epsilon is None else f"target epsilon = {number(s.target_epsilon)}, "
    noise = "none" if s.noise_multiplier is None else f"{s.noise_multiplier:.4g}"
    _line(console, f"{target}{scope_line(s)}")
    _line(console, f"{run_line(s)}")
    _line(console, f"noise multiplier {noise}, accountant {s.accountant}")
    for warning in s.warnings:
        console.print(f"[bold red]warning:[/] {escape(warning)}", highlight=False)
    console.print()
    console.print(_three_numbers(s))
    for line in _reasons(s):
        _line(console, line)
    for found in s.contradictions():
        console.print(f"[bold red]{escape(str(found))}[/]", highlight=False)


def _words(s: Statement, console: Console) -> None:
    console.print("\n[bold]In plain words[/]")
    _line(console, s.in_words())


def _three_numbers(s: Statement) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"epsilon at {kind_line(s)}", title_justify="left", title_style="")
    table.add_column("view")
    for heading in ("claimed", "proven", "audited"):
        table.add_column(heading, overflow="fold")
    table.add_column("true positives at\n5 % false ones", justify="right")
    for view in VIEWS:
        v = s.view(view)
        proven = number(v.proven.epsilon)
        table.add_row(
            f"{view} *" if view is s.scope.view else str(view),
            escape(claimed_cell(s, v.claimed)) + _mark(s, view, "claimed"),
            ("inf" if math.isinf(v.proven.epsilon) else f"[bold]{proven}[/]") + _mark(s, view, "proven"),
            escape(audited_cell(s, v.audited)),
            f"<= {percent(v.tpr)}",
        )
    return table


def _mark(s: Statement, view: View, name: Literal["claimed", "proven"]) -> str:
    found = s.contradiction(view, name)
    return "" if found is None else f" [bold red]{found.label}[/]"


def _reasons(s: Statement) -> list[str]:
    """Why a proven epsilon is inf: one line per reason, with the views it concerns."""
    views: dict[str, list[str]] = {}
    for v in s.views:
        if math.isinf(v.proven.epsilon):
            views.setdefault(v.proven.reason, []).append(str(v.view))
    return [
        "* the view that this run promises",
        *(f"inf in the {_join(names)} view: {reason}" for reason, names in views.items()),
    ]


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _learnability(block: Learnability, console: Console) -> None:
    verdict = f"[{_COLOURS[block.verdict]}]{escape(verdict_in_words(block))}[/]"
    console.print(f"\n[bold]Can it learn?[/] {verdict}", highlight=False)
    _line(console, f"Clip norm {block.clip:g}; each view at the noise it needs for {held_promise(block)}:")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("view")
    for heading in ("noise multiplier", "noise norm", "noise norm / clip"):
        table.add_column(heading, justify="right")
    missing = []
    for level in block.levels:
        if level.noise_multiplier is None or level.noise_norm is None or level.ratio is None:
            table.add_row(str(level.view), "", "", "-")
            missing.append(f"{level.view} view: {level.note}")
        else:
            table.add_row(str(level.view), f"{level.noise_multiplier:.4g}", f"{level.noise_norm:.4g}", f"{level.ratio:.4g}")
    console.print(table)
    for line in missing:
        _line(console, line)
    if block.advice:
        _line(console, advice_heading(block))
        _bullets(console, [escape(advice.text) for advice in block.advice])


def _list(console: Console, title: str, lines: list[str]) -> None:
    if lines:
        console.print(f"\n[bold]{title}[/]")
        _bullets(console, lines)


def _bullets(console: Console, lines: list[str]) -> None:
    """Marked-up lines with a hanging indent."""
    grid = Table.grid(padding=(0, 1))
    for line in lines:
        grid.add_row(" -", line)
    console.print(grid, highlight=False)


def _line(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False)
