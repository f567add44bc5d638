"""CI fails where the tests of pages or of real data skip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forked_program import ForkedProgram, forks
from skips import VARIABLE, refused

ROOT = Path(__file__).parents[1]


def skipped(reason: str) -> pytest.TestReport:
    return pytest.TestReport("test", ("file", 1, "test"), {}, "skipped", ("file", 1, f"Skipped: {reason}"), "setup")


@pytest.mark.parametrize("reason", ["needs a headless Chromium", "needs Node.js", "FEDVEIL_DATA has no svhn"])
def test_a_skip_is_a_failure_only_where_all_must_run(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert refused(skipped(reason)).skipped
    monkeypatch.setenv(VARIABLE, "1")
    report = refused(skipped(reason))
    assert report.failed
    assert reason in str(report.longrepr)
    assert refused(skipped("needs a GPU: this torch has none")).skipped


WHERE = ["-q", "-p", "no:cacheprovider", "tests/data/test_data_load.py", "-k", "test_real_files"]


@pytest.mark.parametrize("program", [pytest.param("forked", marks=forks), pytest.param("started", marks=pytest.mark.slow)])
def test_ci_runs_all(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"export {VARIABLE}=1" in (ROOT / ".ci" / "run").read_text()
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.chdir(ROOT)
    if program == "forked":
        with ForkedProgram(lambda: sys.exit(pytest.main(WHERE))) as tests:
            output = tests.output.read()
        status = tests.status()
    else:
        command = [sys.executable, "-m", "pytest", *WHERE]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        status, output = done.returncode, done.stdout
    assert status == 1, output
    assert f"{VARIABLE} is set, so this is a failure" in output
