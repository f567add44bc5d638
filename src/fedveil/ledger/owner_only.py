"""Files that are for their owner alone from their first byte: what is private is never readable, not even for a moment."""

from __future__ import annotations

import os
from pathlib import Path


def owner_only(path: str, flags: int) -> int:
    """For `open(..., opener=owner_only)`: a new file has mode 600."""
    return os.open(path, flags, 0o600)


def owner_only_folder(path: Path) -> Path:
    """The folder `path`, made with mode 700 if it is absent."""
    path.mkdir(mode=0o700, exist_ok=True)
    return path
