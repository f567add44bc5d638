"""Code that sees private examples or states may fail on them, and how a run ends is seen by all: so it fails without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from fedveil.federation.isolated import ChildFailed, forked

if TYPE_CHECKING:
    from fedveil.federation.round import Context

Found = TypeVar("Found")


def found_by(act: Callable[[], Found], context: Context) -> Found | None:
    """Return what `act` returns, or None where it fails or ends the program. An interruption by the operator passes through.

    Where user-defined code is isolated in processes, `act` runs in a child, and may return plain values alone.

    Args:
        context: of the run. In a rehearsal nothing is private, and what fails raises.
    """
    try:
        return _in_child(act) if context.in_children else act()
    except KeyboardInterrupt:
        raise
    except BaseException:
        if context.rehearsal:
            raise
        return None


def _in_child(act: Callable[[], Found]) -> Found | None:
    def told() -> dict[str, Found | None]:
        try:
            return {"value": act()}
        except BaseException:
            return {"value": None}

    try:
        value: Found | None = forked(told)["value"]
    except ChildFailed:
        return None
    return value
