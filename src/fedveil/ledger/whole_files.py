"""Files that are written whole or not at all: a disk that is full takes nothing of what was there before."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fedveil.ledger.owner_only import owner_only

DRAFT = ".part"
"""How the name of a file ends while it is written; what is left of a killed run may have it."""


def replace_whole(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write beside it, sync and rename; on failure no draft is left to fill the disk.

    Args:
        private: for its owner alone (mode 600).

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    draft = path.with_name(path.name + DRAFT)
    try:
        with open(draft, "wb", opener=owner_only if private else None) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def write_output(path: Path, content: bytes, *, private: bool = False) -> None:
    """As `replace_whole`, to where a user wants it: links are followed, and a pipe or a device is written as it is.

    Raises:
        OSError: it cannot be written there.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        replace_whole(Path(os.path.realpath(path)), content, private=private)
