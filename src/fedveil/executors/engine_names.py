"""Names of the engines, and which of them support a client time-out; available before torch is imported."""

from __future__ import annotations

from fedveil.errors import ConfigError, unknown

ENGINES = ("inline", "pool", "stacked", "batched", "cuda", "flower")


def check_engine(name: str, timeout: float | None) -> None:
    """Refuse an engine and time-out that are impossible on any machine.

    Raises:
        ConfigError: the engine is unknown or does not support a time-out.
    """
    if name not in ("auto", *ENGINES):
        raise unknown("run.engine", name, "engine", ("auto", *ENGINES))
    if timeout is not None and name not in ("auto", "pool", "flower"):
        raise ConfigError(
            f"training.client_timeout needs run.engine = 'pool', 'auto' or 'flower': {name} cannot interrupt a client"
        )
