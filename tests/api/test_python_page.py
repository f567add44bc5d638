"""The code of docs/python.md, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(compile(code.group(1), "docs/python.md", "exec"), names)
    run = names["run"]
    assert run.score < 20
    assert abs(run.predict(names["x"]) - names["y"]).mean() < 20
    assert 3.9 < run.privacy.proven.epsilon <= 4
