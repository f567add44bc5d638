"""What binds the files of a run together: their digests in the ledger, at its opening and at its closing.

The opening is part of the ledger's first digest, the closing of its last; `fedveil verify` compares. What changes after the end
(reports, audits), what is secret and not shown (checkpoints, noise state) and the ledger itself are not covered.

A ledger may be published, and which private files there are tells of the data: failures.csv, that a client failed. So the closing
binds all of them by one digest, that of `private/digests.json`, which lists theirs and stays in the folder `private`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.errors import LedgerError
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.whole_files import DRAFT
from fedveil.run.run_directory import PRIVATE, SALT, json_text, private_folder, write_bytes

FOLDERS = (".", PRIVATE)
"""Folders of a run directory whose files are bound."""
DIGESTS = f"{PRIVATE}/digests.json"
"""The digests of the private files that a run leaves after its opening."""
_UNBOUND = ("ledger.sqlite", ".", "noise-state", "report.html", "audits.json", "closing.sig")


def digests_of(run: Path) -> dict[str, str]:
    """SHA-256 of each file that is bound, by its path in the run directory.

    Private files are hashed behind the salt of the run, since their digests are published: training loss or label counts could
    be guessed, and a digest would confirm the guess, and with it a membership.
    """
    files = [file for folder in FOLDERS for file in sorted((run / folder).glob("*")) if file.is_file()]
    bound = [file for file in files if not file.name.startswith(_UNBOUND) and not file.name.endswith(DRAFT)]
    names = {file.relative_to(run).as_posix(): file for file in bound}
    salt = _salt(run)
    return {name: hashlib.sha256(salt * _private(name) + file.read_bytes()).hexdigest() for name, file in names.items()}


def _private(name: str) -> bool:
    return name.startswith(f"{PRIVATE}/")


def _salt(run: Path) -> bytes:
    """What is hashed before each private file."""
    salt = run / PRIVATE / SALT
    return salt.read_bytes() if salt.exists() else b""


def opening(run: Path, method: str) -> dict[str, Any]:
    """What a ledger says at its opening: the digests of the files that a run writes before it trains, whatever the data."""
    return {"method": method, "files": digests_of(run)}


def check_opening(run: Path) -> None:
    """Whether what was written at the opening is still there, before anything is added that can only be verified with it.

    Raises:
        LedgerError: a file is gone or changed; the message names it.
    """
    with Ledger.open(run / "ledger.sqlite") as ledger:
        opened, there = ledger.meta.get("files", {}), digests_of(run)
    if wrong := [name for name, digest in opened.items() if there.get(name) != digest]:
        raise LedgerError(
            f"{run} is not as the run left it: {', '.join(wrong)} changed or gone since its start, so nothing that it released "
            f"could be verified; put back what was there, then resume"
        )


def conclude(run: Path, rounds: int, ended: str, last: Mapping[str, bytes]) -> str:
    """Write DIGESTS and close the ledger over all that lies there since its opening; returns the closing digest, 64 hex digits.

    Args:
        rounds: number of finished rounds. ended: why the run stopped early, or an empty string.
        last: files that are written once the ledger is closed, so that they tell that the run has ended.

    Raises:
        LedgerError: it is closed over something else already.
    """
    with Ledger.open(run / "ledger.sqlite") as ledger:
        known = {*ledger.meta["files"], *last, DIGESTS}
        there = {name: digest for name, digest in digests_of(run).items() if name not in known}
        own = json_text({name: digest for name, digest in there.items() if _private(name)}).encode()
        files = {name: digest for name, digest in there.items() if not _private(name)}
        files |= {DIGESTS: hashlib.sha256(_salt(run) + own).hexdigest()}
        files |= {name: hashlib.sha256(content).hexdigest() for name, content in last.items()}
        content = {"files": dict(sorted(files.items())), "rounds": rounds, "ended": ended}
        if ledger.closing is None:
            private_folder(run)
            write_bytes(run / DIGESTS, own)
            return ledger.conclude(content)
        held, digest = ledger.closing
        if held != content:
            raise LedgerError(f"the ledger of {run} is closed over other files: move the run away and keep it as it is")
        return digest
