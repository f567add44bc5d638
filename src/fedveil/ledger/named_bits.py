"""Rows that say which bits left: the same bits of the same round, sent again, are one release and are charged once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedveil.ledger.entry import Entry

_WORDS = "released sha256 "


def naming_bits(entry: Entry, digest: str) -> Entry:
    """The row of a release with the SHA-256 digest (hex) of what left, in its note."""
    return replace(entry, note="; ".join(filter(None, (entry.note, _WORDS + digest))))


def named_bits(entry: Entry) -> str:
    """The digest that a row names, or an empty string."""
    return entry.note.partition(_WORDS)[2]
