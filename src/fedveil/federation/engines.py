"""The engines by name."""

from __future__ import annotations

from collections.abc import Callable

from fedveil.errors import ConfigError, nearest
from fedveil.federation.engine import Engine, Inline
from fedveil.federation.pool import Pool, available_cores
from fedveil.federation.round import Context

ENGINES: dict[str, Callable[[Context], Engine]] = {"inline": Inline, "pool": Pool}


def engine(name: str, context: Context) -> Engine:
    """The engine called `name`; `auto` is the pool when there is more than one core and more than one client."""
    if name == "auto":
        name = "pool" if available_cores() > 1 and len(context.clients) > 1 else "inline"
    if name not in ENGINES:
        raise ConfigError(f"run.engine = {name!r}: unknown engine{nearest(name, ENGINES)}; there are auto, {', '.join(ENGINES)}")
    return ENGINES[name](context)
