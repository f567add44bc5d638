"""CI fails where the tests of pages or of real data skip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
@pytest.mark.heavy
def test_ci_runs_all() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert f"export {VARIABLE}=1" in ci
    assert "\nmake demo\nmake test\n" in ci, "in the README's order: the demo leaves files that the tests must bear"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/data/test_data_load.py",
        "-k",
        "test_real_files",
    ]
    bare = {name: value for name, value in os.environ.items() if name != "FEDVEIL_DATA"} | {VARIABLE: "1"}
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1, done.stdout
    assert f"{VARIABLE} is set, so this is a failure" in done.stdout
