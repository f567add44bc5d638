"""What `fedveil verify` finds, as a page shows it: a badge, contradictions in words, and every finding in a fold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.run.verification_text import TITLES, headline, lines_by_kind, printable
from fedveil.verify import Verification

_WORST_FIRST = ("contradicted", "cannot tell", "verified")


def outcome_values(checked: Mapping[Path, Verification]) -> dict[str, Any] | None:
    """The worst outcome of these runs, their contradictions, and the findings of each; None without runs."""
    if not checked:
        return None
    outcomes = [found.outcome for found in checked.values()]
    worst = next(outcome for outcome in _WORST_FIRST if outcome in outcomes)
    found = {path: lines_by_kind(one) for path, one in checked.items()}
    several = len(checked) > 1
    return {
        "outcome": worst,
        "count": f" ({outcomes.count(worst)} of {len(outcomes)} runs)" if several else "",
        "contradictions": [
            f"{f'{printable(path.name)}: ' * several}{line}"
            for path, lines in found.items()
            for line in lines.get("contradicted", [])
        ],
        "runs": [
            {"headline": headline(path.name, one), "kinds": [[TITLES[kind], lines] for kind, lines in found[path].items()]}
            for path, one in checked.items()
        ],
    }


def outcome_lines(checked: Mapping[Path, Verification]) -> list[str]:
    """The same as lines of text: the outcome, and what is contradicted."""
    values = outcome_values(checked)
    if values is None:
        return []
    return [
        f"Verification: {values['outcome']}{values['count']}.",
        *(f"Contradicted: {line}" for line in values["contradictions"]),
    ]
