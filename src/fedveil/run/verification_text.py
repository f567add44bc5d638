"""A verification in words: the headline, and findings by kind, contradictions first."""

from __future__ import annotations

from fedveil.verify import Verification

TITLES = {
    "contradicted": "Contradicted",
    "unknown": "Cannot tell",
    "verified": "Verified",
    "trust": "What has to be trusted",
}


def headline(name: str, found: Verification) -> str:
    """The outcome in one line."""
    counts = [(len(lines), kind) for kind, lines in lines_by_kind(found).items() if kind != "trust"]
    return f"{printable(name)}: {found.outcome} ({', '.join(f'{n} {TITLES[kind].lower()}' for n, kind in counts)})"


def lines_by_kind(found: Verification) -> dict[str, list[str]]:
    """The findings of each kind that occurs, a line each."""
    lines = {kind: [f"{printable(f.subject)}: {printable(f.text)}" for f in found.findings if f.kind == kind] for kind in TITLES}
    return {kind: some for kind, some in lines.items() if some}


def problems(found: Verification) -> list[str]:
    """What is contradicted, and what could not be checked, a line each."""
    return [
        f"{TITLES[kind].lower()}: {line}"
        for kind, lines in lines_by_kind(found).items()
        for line in lines
        if kind in ("contradicted", "unknown")
    ]


def printable(text: str) -> str:
    """A stranger's text on one line: what would move a cursor, turn the writing or start a line is shown as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
