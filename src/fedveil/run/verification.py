"""Everything that can be checked about a run: `fedveil.verify`, the statement made again, the signature of the closing digest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.run.closing_signature import Signer, check_signature
from fedveil.run.unpacked_run import unpacked
from fedveil.statement.recertify import recertify
from fedveil.verify import Finding, Verification, verify_run


def verification(
    path: str | Path,
    *,
    pin: str | None = None,
    signer: Signer | None = None,
    trust_plugins: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check a run directory, or a zip of one; nothing is written to it, and no code of it runs unless its plugins are trusted.

    Args:
        pin: the closing digest that is known from elsewhere. signer: who is to have signed it.
        trust_plugins: run plugins that the run names, at their recorded digests, to make the statement again.
        on_step: called with (rows of the ledger read, rows there).

    Raises:
        FedveilError: the signature is to be checked and cannot be.
    """
    if Path(path).is_dir():
        return _of_directory(Path(path), pin, signer, trust_plugins, on_step)
    try:
        with unpacked(Path(path)) as run:
            return _of_directory(run, pin, signer, trust_plugins, on_step)
    except ConfigError as problem:
        return Verification((Finding("unknown", "run", str(problem)),))


def verified_ledger(found: Verification) -> str:
    """The closing digest, if rows, chain and head are verified; else an empty string."""
    right = {finding.subject for finding in found.findings if finding.kind == "verified"}
    return found.closing if {"ledger", "head"} <= right else ""


def _of_directory(
    run: Path, pin: str | None, signer: Signer | None, trust_plugins: bool, on_step: Callable[[int, int], None] | None
) -> Verification:
    found = verify_run(run, pin=pin, on_step=on_step)
    if len(found.findings) == 1:  # it was not read at all, so nothing else of it is
        return found
    added = recertify(run, trust_plugins=trust_plugins) if (run / "statement.json").is_file() else []
    signature = check_signature(run, found.closing, signer)
    return Verification((*found.findings, *added, *([signature] if signature else [])), found.closing)
