"""TOML that somebody else wrote."""

from __future__ import annotations

import tomllib
from typing import Any

from fedveil.errors import ConfigError


def toml_values(text: str) -> dict[str, Any]:
    """The values of a text; a number of too many digits and nesting too deep are its errors as well.

    Raises:
        ConfigError: what is wrong with it, and where.
    """
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except RecursionError:
        raise ConfigError("it is nested too deep") from None
