"""Names of the engines, and which of them support a client time-out; available before torch is imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError, unknown
from fedveil.registry import Registry

if TYPE_CHECKING:
    from fedveil.federation.round import Context, Engine

_ENGINES = ("inline", "pool", "stacked", "batched", "cuda")
OTHER_ENGINES: Registry[Callable[[Context, Path, float | None], Engine]] = Registry("run.engine", "engine", {})
"""Engines that reach the clients in another way: from context, a folder for the clients' states, and the time-out."""


def check_engine(name: str, timeout: float | None) -> None:
    """Refuse an engine and time-out that are impossible on any machine.

    Raises:
        ConfigError: the engine is unknown or does not support a time-out.
    """
    if name not in ("auto", *_ENGINES) and name not in OTHER_ENGINES:
        raise unknown("run.engine", name, "engine", ("auto", *_ENGINES, *OTHER_ENGINES))
    if timeout is not None and name in ("inline", "stacked", "batched", "cuda"):
        raise ConfigError(
            f"training.client_timeout needs run.engine = 'pool', 'auto' or 'flower': {name} cannot interrupt a client"
        )
