"""The commands of docs/privacy-theorems.md print what the page says."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "privacy-theorems.md"


def test_every_command_on_the_page_prints_what_it_says() -> None:
    if not PAGE.exists():
        pytest.skip("docs/privacy-theorems.md is not part of this installation")
    result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert result.attempted >= 10
    assert result.failed == 0
