"""Publishable copies of runs: releases and public facts, and nothing computed from private data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError
from fedveil.experiment.data_card import CARD
from fedveil.experiment.run_directory import DECLARED, write_json
from fedveil.experiment.verification import SIGNATURE, verification
from fedveil.federation.history import ALL_FAILED
from fedveil.ledger.files import new_folder
from fedveil.ledger.ledger import publish_ledger
from fedveil.statement.statement_layout import AUDITS

_LEDGER = "ledger.sqlite"
_PUBLIC = (
    *("config.toml", "versions.json", "statement.json", "statement.md", CARD, "flower.md", "nvflare.md"),
    *("history.csv", "layers.csv", DECLARED, "summary.json", "model.safetensors", SIGNATURE),
)
"""Files that are copied unchanged; ledger and audits are copied without their private parts."""


def publish(run: str | Path, out: str | Path) -> Path:
    """Copy the publishable parts of the finished run in `run` to the new folder `out`, and return it.

    The ledger is copied without times and numbers of participants, and audits by canaries, which were trained on the data, are
    omitted.

    Raises:
        ConfigError: the run is unfinished, of another version or contradicted, or the folder exists or is not writable.
        LedgerError: the ledger is damaged.
    """
    source = Path(run)
    with _draft(source, Path(out)) as draft:
        if not _refuse_contradicted(source, source):
            _refuse_contradicted(source, draft)
    return Path(out)


def copy_public(run: Path, out: Path) -> None:
    """Copy a run that the caller has just made, without verifying it, since the result of a check depends on private files."""
    with _draft(run, out):
        pass


@contextmanager
def _draft(source: Path, target: Path) -> Iterator[Path]:
    """Copy the public parts of a run to a temporary folder, which is renamed to the target at the end of the block."""
    absent = [name for name in ("config.toml", "summary.json", _LEDGER, CARD) if not (source / name).is_file()]
    if absent:
        raise ConfigError(
            f"{source} is not a finished run of this version (it has no {', '.join(absent)}): give the directory of a run that "
            f"has ended; what an earlier version wrote keeps public and private figures in one table"
        )
    if str(_summary(source).get("ended", "")).startswith(ALL_FAILED):
        raise ConfigError(
            f"{source} ended because every client of a round failed, which their data decided, so that its number of rounds is "
            f"a private figure: nothing was copied; mend the cause (private/failures.csv), and publish a run that went on"
        )
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty: nothing was copied; choose another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(target) as draft:
            _copy(source, draft)
            yield draft
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}; choose a folder that may be written") from error


def _summary(source: Path) -> dict[str, Any]:
    try:
        summary = json.loads((source / "summary.json").read_text(encoding="utf-8"))
        return summary if isinstance(summary, dict) else {}
    except (OSError, ValueError, RecursionError):  # the verification that follows reports the problem
        return {}


def _refuse_contradicted(source: Path, folder: Path) -> bool:
    """Refuse to publish a run that fails verification in `folder`; return whether all of it could be read there.

    The copy has the same rows, and fewer files: it is verified only if the run itself cannot be, because it contains a link.
    """
    findings = verification(folder).findings
    wrong = [f"{finding.subject}: {finding.text}" for finding in findings if finding.kind == "contradicted"]
    if wrong:
        raise ConfigError(f"{source} is contradicted, so nothing was copied: {'; '.join(wrong)} (fedveil verify shows all of it)")
    return all(finding.subject != "run" for finding in findings)


def _copy(source: Path, draft: Path) -> None:
    for name in _PUBLIC:
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)
    audits = _bounds(source / AUDITS)
    if audits:
        write_json(draft / AUDITS, audits)
    publish_ledger(source / _LEDGER, draft / _LEDGER)


def _bounds(path: Path) -> list[Any]:
    """Return the audits that are bounds on the mechanism for any data; the estimates come from runs on the data."""
    try:
        return [audit for audit in json.loads(path.read_text(encoding="utf-8")) if audit["rigorous"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {path}: {error!r}; the file is damaged: restore it, or remove it and audit the run again"
        ) from None
