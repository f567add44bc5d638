"""A verification in the terminal: a progress bar over long ledgers, the outcome in a headline, one line a finding."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedveil.run.closing_signature import Signer
from fedveil.run.verification import verification
from fedveil.verify import Verification

TITLES = {
    "contradicted": "Contradicted",
    "unknown": "Cannot tell",
    "verified": "Verified",
    "trust": "What has to be trusted",
}
_COLOURS = {"contradicted": "red", "unknown": "yellow", "verified": "green", "trust": "cyan"}
_STYLES = ("green", "red", "yellow")  # by exit status
_SHOWN_FROM = 2.0  # seconds that reading the ledger takes


def verify_with_progress(
    path: Path, pin: str | None, signer: Signer | None, *, trust_plugins: bool, quiet: bool = False
) -> Verification:
    """Verify with a progress bar on stderr, where reading the ledger takes over two seconds."""
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    began = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("rows of the ledger", total=None, visible=False)

        def on_step(done: int, total: int) -> None:
            long = (time.monotonic() - began) * total > _SHOWN_FROM * done
            bar.update(task, completed=done, total=total, visible=long)

        return verification(path, pin=pin, signer=signer, trust_plugins=trust_plugins, on_step=on_step)


def verification_values(found: Verification) -> dict[str, Any]:
    """Outcome, closing digest and findings as JSON values."""
    findings = [finding._asdict() for finding in found.findings]
    return {"outcome": found.outcome, "closing_digest": found.closing or None, "findings": findings}


def headline(path: Path, found: Verification) -> str:
    """The outcome in one line of plain text."""
    counts = [(sum(f.kind == kind for f in found.findings), title.lower()) for kind, title in TITLES.items() if kind != "trust"]
    return f"{printable(str(path))}: {found.outcome} ({', '.join(f'{n} {title}' for n, title in counts if n)})"


def render_verification(path: Path, found: Verification, console: Console) -> None:
    """Print the headline and every finding, contradictions first."""
    console.print(
        headline(path, found), style=f"bold {_STYLES[found.exit_status]}", markup=False, highlight=False, soft_wrap=True
    )
    for kind, title in TITLES.items():
        lines = [f"  {printable(f.subject)}: {printable(f.text)}" for f in found.findings if f.kind == kind]
        if lines:
            console.print(f"\n{title}", style=f"bold {_COLOURS[kind]}", highlight=False)
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def problems(found: Verification) -> list[str]:
    """What is contradicted, and what could not be checked, a line each."""
    kinds = ("contradicted", "unknown")
    return [
        f"{TITLES[f.kind].lower()}: {printable(f.subject)}: {printable(f.text)}"
        for kind in kinds
        for f in found.findings
        if f.kind == kind
    ]


def printable(text: str) -> str:
    """A stranger's text on one line: what would move a terminal's cursor or start a line is shown as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
