"""Everything that can be checked about a run: `fedveil.verify`, the statement made again, the signature of the closing digest."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from fedveil.run.closing_signature import Signer, check_signature
from fedveil.statement.recertify import recertify
from fedveil.verify import Verification, verify_run


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
    with _directory(Path(path)) as run:
        if run is None:
            return verify_run(path, pin=pin)
        found = verify_run(run, pin=pin, on_step=on_step)
        added = recertify(run, trust_plugins=trust_plugins) if (run / "statement.json").is_file() else []
        signature = check_signature(run, found.closing, signer)
    return replace(found, findings=(*found.findings, *added, *([signature] if signature else [])))


@contextmanager
def _directory(path: Path) -> Iterator[Path | None]:
    """The run directory, taken out of the zip for as long as it is needed; None where it is neither."""
    with ExitStack() as stack:
        run: Path | None = path
        if not path.is_dir():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedveil-verify-")))
            try:
                with zipfile.ZipFile(path) as archive:  # which never extracts outside the folder
                    archive.extractall(folder)
                (ledger,) = folder.rglob("ledger.sqlite")
                run = ledger.parent
            except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError):
                run = None  # verify_run says why
        yield run
