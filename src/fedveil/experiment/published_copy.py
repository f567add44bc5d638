"""A copy of a run that may be shown: what was released and what is public, and nothing that is computed from private data."""

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

LEDGER = "ledger.sqlite"
PUBLIC = (
    *("config.toml", "versions.json", "statement.json", "statement.md", CARD, "flower.md"),
    *("history.csv", "layers.csv", DECLARED, "summary.json", "model.safetensors", SIGNATURE),
)
"""The files that are copied as they are; the ledger and the audits are copied without what is private of them."""


def publish(run: str | Path, out: str | Path) -> Path:
    """Copy what may be shown of the finished run in `run` to the new folder `out`, and return it.

    The ledger goes without times and numbers of participants, and audits by canaries, which were trained on the data, stay.

    Raises:
        ConfigError: no finished run of this version, one that is contradicted, or a folder that exists or cannot be written.
        LedgerError: a damaged ledger.
    """
    source = Path(run)
    with _draft(source, Path(out)) as draft:
        if not _refuse_contradicted(source, source):
            _refuse_contradicted(source, draft)
    return Path(out)


def copy_public(run: Path, out: Path) -> None:
    """Copy a run that the caller has just made, as `publish` does, without verifying it: a verdict depends on private files."""
    with _draft(run, out):
        pass


@contextmanager
def _draft(source: Path, target: Path) -> Iterator[Path]:
    """Copy what is public of a run to a folder that takes its place at the end of the block."""
    absent = [name for name in ("config.toml", "summary.json", LEDGER, CARD) if not (source / name).is_file()]
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
        found = json.loads((source / "summary.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError):  # verification, which comes next, says what is wrong with it
        return {}


def _refuse_contradicted(source: Path, folder: Path) -> bool:
    """Refuse a run whose numbers contradict each other, as it lies in `folder`; returns whether all of it was read there.

    The copy has the same rows, and fewer files: it is read only where the run itself cannot be, for a link that lies in it.
    """
    findings = verification(folder).findings
    wrong = [f"{finding.subject}: {finding.text}" for finding in findings if finding.kind == "contradicted"]
    if wrong:
        raise ConfigError(f"{source} is contradicted, so nothing was copied: {'; '.join(wrong)} (fedveil verify shows all of it)")
    return all(finding.subject != "run" for finding in findings)


def _copy(source: Path, draft: Path) -> None:
    for name in PUBLIC:
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)
    audits = _bounds(source / AUDITS)
    if audits:
        write_json(draft / AUDITS, audits)
    publish_ledger(source / LEDGER, draft / LEDGER)


def _bounds(path: Path) -> list[Any]:
    """Audits that are bounds on the mechanism, whatever the data; the estimates come from runs on the data."""
    try:
        return [audit for audit in json.loads(path.read_text(encoding="utf-8")) if audit["rigorous"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error!r}; the file is damaged") from None
