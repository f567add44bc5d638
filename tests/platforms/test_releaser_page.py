"""The page docs/releaser.md: its scikit-learn example runs, and learns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedveil as fv

PAGE = (Path(__file__).parents[2] / "docs" / "releaser.md").read_text()


def test_the_scikit_learn_example_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"## scikit-learn\n\n```python\n(.*?)```", PAGE, re.S)
    assert len(program.splitlines()) <= 18
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/releaser.md", "exec"), {})
    assert float(capsys.readouterr().out.removeprefix("accuracy ")) > 0.7
    assert all(fv.verification(tmp_path / f"site-{i}.ledger").exit_status == 0 for i in range(3))
