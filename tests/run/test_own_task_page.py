"""docs/your-own-task.md runs from top to bottom, in an empty folder."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.tasks.task_registry import TASKS

PAGE = (Path(__file__).parents[2] / "docs" / "your-own-task.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.S | re.M)
FILE = re.compile(r"# (\w+\.\w+)\n")


def test_every_block_runs_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose first line is the name of a file is that file; the lines of `console` are commands that succeed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(TASKS, "quantile", TASKS["regression"])  # so that the page's own is taken out afterwards
    monkeypatch.delitem(TASKS, "quantile")
    names: dict[str, Any] = {"__name__": __name__}
    blocks = BLOCK.findall(PAGE)
    assert {kind for kind, _ in blocks} == {"python", "toml", "console"}
    for kind, text in blocks:
        if file := FILE.match(text):
            Path(file[1]).write_text(text)
        elif kind == "python":
            exec(compile(text, "your-own-task.md", "exec", dont_inherit=True), names)
        else:
            assert kind == "console"
            for line in text.splitlines():
                program, *words = shlex.split(line)
                done = CliRunner().invoke(app, words)
                assert (program, done.exit_code) == ("fedveil", 0), f"{line}: {done.output}"
    assert "quantile" in TASKS


def test_the_page_names_every_task() -> None:
    built_in = [name for name, kind in TASKS.items() if kind.__module__.startswith("fedveil.")]
    assert len(built_in) >= 7
    assert all(f"`{name}`" in PAGE for name in built_in)
