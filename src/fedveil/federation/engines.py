"""The engines by name."""

from __future__ import annotations

from fedveil.errors import ConfigError, nearest
from fedveil.federation.engine import Engine, Inline
from fedveil.federation.pool import Pool, available_cores
from fedveil.federation.round import Context

ENGINES = ("inline", "pool")


def engine(name: str, context: Context, timeout: float | None = None) -> Engine:
    """The engine called `name`; `auto` is the pool when there is more than one core and more than one client.

    Args:
        timeout: seconds after which a client is given up, or None; needs the pool, because a process cannot leave itself.
    """
    if name == "auto":
        worthwhile = timeout is not None or (available_cores() > 1 and len(context.clients) > 1)
        name = "pool" if worthwhile else "inline"
    if name not in ENGINES:
        raise ConfigError(f"run.engine = {name!r}: unknown engine{nearest(name, ENGINES)}; there are auto, {', '.join(ENGINES)}")
    if name == "pool":
        return Pool(context, timeout=timeout)
    if timeout is not None:
        raise ConfigError("training.client_timeout needs run.engine = 'pool' (or 'auto'): inline cannot interrupt a client")
    return Inline(context)
