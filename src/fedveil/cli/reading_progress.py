"""A progress bar for reading a long ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_PATIENCE = 2.0
"""Seconds after which a bar appears."""


@contextmanager
def reading_progress() -> Iterator[Callable[[int, int], None]]:
    """Gives a function of (rows read, all rows), which shows a bar on stderr once reading takes longer than two seconds."""
    columns = TextColumn("reading the ledger"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    bar, start = Progress(*columns, console=Console(stderr=True), transient=True), time.monotonic()
    task = bar.add_task("")

    def progress(done: int, total: int) -> None:
        if time.monotonic() - start > _PATIENCE:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        if bar.live.is_started:
            bar.stop()
