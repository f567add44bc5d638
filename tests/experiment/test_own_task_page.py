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


SHORTER = (
    ('"rounds": 10, "clients_per_round": 80', '"rounds": 2, "clients_per_round": 20'),
    ("rounds = 10\nclients_per_round = 80", "rounds = 2\nclients_per_round = 20"),
    ('"rounds": 10, "local": "dp-sgd"', '"rounds": 2, "local": "dp-sgd"'),
    ("result.score < 60", "result.score < 400"),
)
"""The page with a fifth of the rounds and a quarter of the clients: it runs as well, and learns less."""


@pytest.mark.parametrize("changes", [SHORTER, pytest.param((), marks=pytest.mark.slow)], ids=["shorter", "as it is"])
def test_every_block_runs_in_this_order(
    changes: tuple[tuple[str, str], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block whose first line is the name of a file is that file; the lines of `console` are commands that succeed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(TASKS, "quantile", TASKS["regression"])  # so that the page's own is taken out afterwards
    monkeypatch.delitem(TASKS, "quantile")
    names: dict[str, Any] = {"__name__": __name__}
    page = PAGE
    for old, new in changes:
        assert page.count(old) == 1
        page = page.replace(old, new)
    blocks = BLOCK.findall(page)
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
