"""Flower and Ray with nothing that reaches out: no telemetry, no look for updates, no installing at run time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fedveil.errors import ConfigError

QUIET = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Variables of the environment, set before anything of Flower is imported, and for each of its processes."""


def require_flower() -> None:
    """Make Flower ready to be imported, quietly.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ.update(QUIET)
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise ConfigError("this needs Flower, which is not installed: pip install 'fedveil[flower]'") from None


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Variables of the environment as long as the block lasts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
