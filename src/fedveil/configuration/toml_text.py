"""TOML that somebody else wrote."""

from __future__ import annotations

import re
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
        place = re.search(r"at line (\d+)", str(error))
        line = text.splitlines()[int(place[1]) - 1 :][:1] if place else []
        escape = r"; in double quotes a backslash begins an escape: write paths in single quotes, or with /"
        raise ConfigError(f"{error}{escape if line and chr(92) in line[0] else ''}") from None
    except RecursionError:
        raise ConfigError("it is nested too deep") from None
