"""The terminal picture in the README: the output of `fedveil demo`.

python docs/figures/make_demo_figure.py
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).resolve().with_name("demo.svg")
WIDTH = 92


def printed() -> str:
    """Run the demonstration in a terminal of fixed width and return its output, with the colours."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedveil", "demo", "--out", "runs/demo"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=folder)
    shown = done.stdout.replace("\r", "\n")
    last_bar = [line for line in shown.splitlines() if "40/40" in line][-1:]
    return "\n".join(["$ fedveil demo", *last_bar]) + shown.split("\x1b[?25h")[-1]


def picture(output: str) -> str:
    """Return the output of a terminal as SVG."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere)
        console.print(Text.from_ansi(output))
        drawn = console.export_svg(title="fedveil")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S)  # no fonts from elsewhere


def words(svg: str) -> str:
    """Return the text of a picture without the figures, which differ from run to run."""
    text = " ".join(html.unescape(part) for part in re.findall(r"<text[^>]*>(.*?)</text>", svg, re.S))
    plain = re.sub(r"\b[0-9a-f]{64}\b|[\d.,:]*\d", "#", text)
    return " ".join(re.sub(r"[▁-█━╸╺]+", " ", plain).split())


if __name__ == "__main__":
    PICTURE.write_text(picture(printed()))
