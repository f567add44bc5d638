"""The names of the engines, and which of them can give a client up: known before torch is imported."""

from __future__ import annotations

from fedveil.errors import ConfigError, unknown

ENGINES = ("inline", "pool", "stacked", "batched", "cuda", "flower")


def check_engine(name: str, timeout: float | None) -> None:
    """Refuse what no engine can do, whatever the machine.

    Raises:
        ConfigError: an unknown engine, or one that cannot do with a time-out.
    """
    if name not in ("auto", *ENGINES):
        raise unknown("run.engine", name, "engine", ("auto", *ENGINES))
    if timeout is not None and name not in ("auto", "pool", "flower"):
        raise ConfigError(
            f"training.client_timeout needs run.engine = 'pool', 'auto' or 'flower': {name} cannot interrupt a client"
        )
