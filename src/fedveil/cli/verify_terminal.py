"""A verification in the terminal: the outcome in a headline, one line a finding; and as JSON values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from fedveil.run.verification_text import TITLES, headline, lines_by_kind
from fedveil.verify import Verification

_COLOURS = {"contradicted": "red", "unknown": "yellow", "verified": "green", "trust": "cyan"}
_STYLES = ("green", "red", "yellow")  # by exit status


def verification_values(found: Verification) -> dict[str, Any]:
    """Outcome, closing digest and findings as JSON values."""
    findings = [finding._asdict() for finding in found.findings]
    return {"outcome": found.outcome, "closing_digest": found.closing or None, "findings": findings}


def render_verification(path: Path, found: Verification, console: Console) -> None:
    """Print the headline and every finding, contradictions first."""
    style = f"bold {_STYLES[found.exit_status]}"
    console.print(headline(str(path), found), style=style, markup=False, highlight=False, soft_wrap=True)
    for kind, lines in lines_by_kind(found).items():
        console.print(f"\n{TITLES[kind]}", style=f"bold {_COLOURS[kind]}", highlight=False)
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
