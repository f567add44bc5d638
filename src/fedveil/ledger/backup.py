"""Backups of ledgers: consistent copies with their heads, and restoration that loses no release."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fedveil.errors import ConfigError, LedgerError
from fedveil.ledger.files import DRAFT, head_path, head_record, read_head, replace_whole, sync_path
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.ledger_store import wal_path

Head = tuple[int, str]
"""Number of releases of a ledger, and the digest of the last one."""


def parse_head(text: str) -> Head:
    """Return the head that `head_text` wrote; raise ConfigError for anything else."""
    match = re.fullmatch(r"(\d{1,18}):([0-9a-f]{64})", text.strip())
    if match is None:
        raise ConfigError(f"--head {text}: expected NUMBER:DIGEST, as fedveil ledger backup prints it", key="--head", value=text)
    return int(match[1]), match[2]


def head_text(head: Head) -> str:
    """Return a head as text, to be kept elsewhere than the ledger."""
    return f"{head[0]}:{head[1]}"


def ledgers_in(folder: Path) -> list[Path]:
    """Return the ledgers of a run directory, or of a client's folder, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and head_path(path).is_file())


def back_up(source: Path, target: Path) -> Iterator[tuple[Path, Head]]:
    """Copy a ledger, or all ledgers of a folder, and yield each copy with its head; runs may charge them meanwhile.

    Args:
        target: a path that does not exist.

    Raises:
        LedgerError: a ledger is damaged, or the target exists or cannot be written.
    """
    if target.exists() or head_path(target).exists():
        raise LedgerError(f"{target} exists, and a backup is never overwritten: choose another path")
    if not source.is_dir():
        yield target, _copied(source, target)
        return
    if not (ledgers := ledgers_in(source)):
        raise LedgerError(f"{source} holds no ledger: give a ledger, a run directory or a client's folder")
    for path in ledgers:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield copy, _copied(path, copy)


def restore(backup: Path, target: Path, pinned: Head | None = None) -> Head:
    """Put a backup in the place of a lost ledger, and return its head.

    Args:
        pinned: the newest head that is known from elsewhere. The head file of the lost ledger counts as well, if it is there.

    Raises:
        LedgerError: the backup lacks releases that were made, as far as that is known, or it is not known at all; a file of the
            ledger is there.
    """
    for path in (target, wal_path(target)):
        if path.exists():
            raise LedgerError(
                f"{path} exists, and may hold releases that the backup lacks: move it away, and leave {head_path(target).name} "
                f"where it is"
            )
    known = [read_head(target)] if head_path(target).exists() else []
    known += [] if pinned is None else [pinned]
    if not known:
        raise LedgerError(
            f"{head_path(target)} is gone, so releases that the backup lacks could not be noticed: give --head, which the last "
            f"backup printed; if it is not known, count the budget as spent"
        )
    with Ledger.open(backup, read_only=True) as ledger:
        for head in known:  # the head file of a ledger without releases does not tell it from others
            if not (ledger.continues(head) if head == pinned else ledger.holds(*head)):
                raise LedgerError(
                    f"the backup {backup} holds {len(ledger)} releases, and not release {head[0]}, which was made: it is older, "
                    f"or that of another ledger; restore a newer one, or count the budget as spent"
                )
    return _copied(backup, target)


def _copied(source: Path, target: Path) -> Head:
    """Copy a ledger, verify the copy, and return its head."""
    draft = target.with_name(target.name + DRAFT)
    try:
        draft.unlink(missing_ok=True)
        with Ledger.open(source, read_only=True) as ledger:
            head = ledger.copy_to(draft)
        draft.chmod(0o600)
        sync_path(draft)
        os.link(draft, target)
        replace_whole(head_path(target), head_record(*head) if head[0] else head_record(0), private=True)
        sync_path(target.parent)
    except (OSError, sqlite3.Error) as problem:
        raise LedgerError(
            f"cannot write the ledger {target} ({problem}): it needs a writable folder on a local disk"
        ) from problem
    finally:
        draft.unlink(missing_ok=True)
    Ledger.open(target, read_only=True).close()
    return head
