"""Code that sees private examples or states may fail on them, and how a run ends is seen by all: so it fails without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def found_by(act: Callable[[], Found], *, rehearsal: bool) -> Found | None:
    """What that code gives; None where it fails, also by ending the program. An interruption is the operator's own.

    Args:
        rehearsal: nothing is private there, and what fails raises.
    """
    try:
        return act()
    except KeyboardInterrupt:
        raise
    except BaseException:
        if rehearsal:
            raise
        return None
