"""Resuming an interrupted run: checks of its directory, its configuration and its identity."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError, LedgerError
from fedveil.experiment.config import Config, flat, without_free_keys
from fedveil.experiment.config_files import read_config
from fedveil.experiment.given_paths import require_begun
from fedveil.experiment.plugins import digests
from fedveil.experiment.public_values import TOGETHER
from fedveil.federation.checkpoint import ledger_position
from fedveil.ledger.ledger import AGGREGATE, Ledger
from fedveil.ledger.ledger_store import SCHEMA, schema_of

if TYPE_CHECKING:
    from fedveil.experiment.assembly import Prepared
    from fedveil.federation.progress import Progress


def has_begun(path: Path) -> bool:
    """Return whether a directory holds a run that may have released something; otherwise it was killed at its start."""
    names = ("summary.json", "history.csv", "checkpoint", "ledger.sqlite", "ledger.sqlite-wal")
    return any((path / name).exists() for name in names)


def resumable(path: Path) -> Config:
    """Return the configuration of the interrupted run in `path`; raise ConfigError if it is missing, complete or too old."""
    refuse_earlier(path)
    require_begun(path)
    return read_config(path / "config.toml")


def refuse_earlier(path: Path) -> None:
    """Raise ConfigError for a run directory of an earlier version, whose releases the current code cannot continue."""
    ledger = path / "ledger.sqlite"
    if ledger.is_file() and 0 < schema_of(ledger) < SCHEMA:
        raise ConfigError(
            f"the run in {path} was made by an earlier version with floating-point noise, so its proven numbers do not hold for "
            f"the bits that it released. It can be shown (fedveil ledger, report, certify, plot), but not resumed or audited; "
            f"start a new run in another directory"
        )


def same_run(saved: Config, now: Config, path: Path, *, but_model: bool = False) -> None:
    """Refuse a configuration that would give another result; the message shows the changes.

    The contents of plugins are compared by `identity`.

    Args:
        but_model: ignore the recorded part of the section `model`, which is not known before the model is built.
    """
    if (saved.run.engine == "flower") != (now.run.engine == "flower"):
        raise ConfigError(
            f"the run in {path} was begun with run.engine = {saved.run.engine!r}, and is resumed with {now.run.engine!r}: with "
            f"flower the clients keep their own states, else the run does; resume with its own engine"
        )
    if now.run.engine in TOGETHER and saved.run.engine not in TOGETHER:
        raise ConfigError(
            f"the run in {path} was begun with run.engine = {saved.run.engine!r}, and is resumed with {now.run.engine!r}, which "
            f"trains several clients in one pass: its statement does not assume that these leave each other's rounding alone; "
            f"resume with run.engine = 'auto'"
        )
    old, new = (flat(without_free_keys(config.resolved())) for config in (saved, now))
    keys = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    keys = [k for k in keys if not (but_model and k.startswith("model.recorded."))]
    if keys:
        changes = "; ".join(f"{k} was {old.get(k)!r} and is {new.get(k)!r}" for k in keys)
        raise ConfigError(
            f"the run in {path} was begun with another configuration: {changes}. Resume with its own, or start a new run"
        )


def run_id_of(path: Path) -> str:
    """Return the run name in the ledger; raise LedgerError if the ledger is not the one that the checkpoint knew.

    A ledger that is ahead of the checkpoint is valid: the interrupted round's releases count.
    """
    seq, digest = ledger_position(path / "checkpoint")
    with Ledger.open(path / "ledger.sqlite") as ledger:
        if not ledger.holds(seq, digest):
            raise LedgerError(
                f"the ledger of {path} is behind its checkpoint: it holds {len(ledger)} releases, and release {seq}, the "
                f"ledger's last when the checkpoint was saved, is not among them. Was an older copy of the ledger put in place? "
                f"Restore the newer one; without it, count the budget as spent and release nothing more of these data"
            )
        return ledger.run


def count_spent(progress: Progress, path: Path) -> None:
    """Raise each client's number of rounds to that charged in the ledger, which includes an interrupted round.

    This is for secret noise, where the interrupted round is repeated with other clients: without it, clients without budget could
    be sampled.
    """
    with Ledger.open(path / "ledger.sqlite") as ledger:
        charged = Counter(entry.client for _, _, entry in ledger.entries() if entry.client != AGGREGATE)
    for client, releases in charged.items():
        progress.seen[client] = max(progress.seen.get(client, 0), releases)


def identity(run: str, prepared: Prepared, plugins: Sequence[str] = ()) -> dict[str, Any]:
    """Return the identity of a checkpoint: the run, a checksum of labels, sizes and some examples, and the plugins' digests."""
    clients = prepared.clients
    parts = (clients.offsets, clients.y.numpy(), clients.x[:: max(1, len(clients.x) // 1000)].numpy())
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part.tobytes(), checksum)
    return {"run": run, "data": checksum, **({"plugins": digests(plugins)} if plugins else {})}
