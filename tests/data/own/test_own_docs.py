"""The examples of docs/data.md print what the page says."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def test_the_examples_print_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.REPORT_NDIFF)
    assert results.attempted >= 10
    assert results.failed == 0
