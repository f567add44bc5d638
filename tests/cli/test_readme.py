"""The README's Python example runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedveil.experiment.new_project import new_project
from forked_program import ForkedProgram, forks
from source_trees import files_in

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("program", [pytest.param("forked", marks=forks), pytest.param("started", marks=pytest.mark.slow)])
def test_the_python_example_runs(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    (printed,) = re.findall(r"```text\n(.*?)```", README, flags=re.S)
    new_project("homes", tmp_path, "regression")  # as the sentence above the example says
    monkeypatch.chdir(tmp_path)
    if program == "forked":
        with ForkedProgram(lambda: exec(example, {"__name__": "__main__"})) as script:
            output = script.output.read()
        status = script.status()
    else:
        done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False, timeout=200)
        status, output = done.returncode, done.stdout + done.stderr
    assert status == 0, output
    lines = [line.rstrip() for line in output.strip().splitlines()]
    assert lines[: printed.count("\n")] == printed.splitlines(), "the README shows what the example prints"
    predictions = [float(number) for number in re.findall(r"-?\d+\.\d+", output[output.rindex("[") :])]
    assert len(predictions) == 5
    assert all(-50 < one < 150 for one in predictions), "kWh of a household"


def test_the_readme_fits_on_a_screen_and_a_half() -> None:
    assert README.count("\n") <= 120
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len(example.splitlines()) <= 18


def test_every_link_of_the_documentation_leads_to_a_file() -> None:
    pages = [ROOT / "README.md", *files_in(ROOT / "docs", ".md")]
    broken = []
    for page in pages:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if not target.startswith(("http:", "https:", "mailto:")) and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []
