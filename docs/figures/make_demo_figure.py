"""The terminal picture in the README: what `fedveil demo` printed.

python docs/figures/make_demo_figure.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
WIDTH = 92


def main() -> None:
    """Run the demonstration in a terminal of fixed width and write demo.svg."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedveil", "demo", "--out", "runs/demo"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=folder)
    last = done.stdout.replace("\r", "\n").split("\x1b[?25h")[-1]
    bar = [line for line in done.stdout.replace("\r", "\n").splitlines() if "40/40" in line][-1:]
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text.from_ansi("\n".join(["$ fedveil demo", *bar]) + last))
    picture = console.export_svg(title="fedveil")
    (HERE / "demo.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S))  # no fonts from elsewhere


if __name__ == "__main__":
    main()
