"""Calls to code that sees private data: its failures are silent, because how a run ends is public."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from fedveil.federation.isolated import ChildFailed, forked

if TYPE_CHECKING:
    from fedveil.federation.round import Context

Result = TypeVar("Result")


def found_by(act: Callable[[], Result], context: Context) -> Result | None:
    """Return what `act` returns, or None if it raises or exits. An interruption by the operator passes through.

    If user-defined code is isolated in processes, `act` runs in a child process and may return plain values only.

    Args:
        context: of the run. In a rehearsal nothing is private, and errors are raised.
    """
    try:
        return _in_child(act) if context.in_children else act()
    except KeyboardInterrupt:
        raise
    except BaseException:
        if context.rehearsal:
            raise
        return None


def _in_child(act: Callable[[], Result]) -> Result | None:
    def call() -> dict[str, Result | None]:
        try:
            return {"value": act()}
        except BaseException:
            return {"value": None}

    try:
        value: Result | None = forked(call)["value"]
    except ChildFailed:
        return None
    return value
