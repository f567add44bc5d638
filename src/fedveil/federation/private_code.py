"""Code that sees private examples or states may fail on them, and how a run ends is seen by all: so it fails without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def found_by(act: Callable[[], Found], *, rehearsal: bool) -> Found | None:
    """Return what `act` returns, or None where it fails or ends the program. An interruption by the operator passes through.

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
