"""The figures of the documentation: they show what the program prints today and what the benchmarks recorded."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from html import unescape
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A program of the benchmarks, imported as it imports the others."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for other in ("harness", "comparison_space"):
        monkeypatch.delitem(sys.modules, other, raising=False)
    return importlib.import_module(name)


def drawn(name: str) -> str:
    """The text of a figure that is checked in."""
    return " ".join(unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", (FIGURES / name).read_text()))


def test_the_picture_of_the_demonstration_shows_what_it_prints() -> None:
    spec = importlib.util.spec_from_file_location("make_demo_figure", FIGURES / "make_demo_figure.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    shown, now = demo.words((FIGURES / "demo.svg").read_text()), demo.words(demo.picture(demo.printed()))
    assert shown == now, "the demonstration prints something else now: run python docs/figures/make_demo_figure.py"


def test_three_numbers_has_twelve_rows_and_the_message_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    three = benchmark("three_numbers", monkeypatch)
    lines = [three.number_line(line) for line in three.kept("three_numbers", [])]
    rows = [line for line in lines if "error" not in line and three.DRAWN.get(three.label(line)) == line["view"]]
    assert len(rows) == 12
    text = drawn("three-numbers.svg")
    assert three.message(rows) == "Audits exceed the claims of 5 of 5 papers; no audit exceeds a proof"
    assert three.message(rows) in text
    assert all(f"{three.label(line)}, {line['view']}" in text for line in rows)
    refuted = {three.label(line) for line in rows if three.refuted(line)}
    assert len(refuted) == 5
    assert all("(published" in name for name in refuted)


def test_the_title_of_the_comparison_is_what_its_tests_say(monkeypatch: pytest.MonkeyPatch) -> None:
    page = benchmark("comparison_page", monkeypatch)
    found = importlib.import_module("harness").kept("comparison")
    assert page.message(found) in drawn("comparison.svg")
    alike = {key: {**result, "accuracy": 80.0, "personal": 80.0} for key, result in found.items()}
    assert page.message(alike) == "No method is significantly better than dp-fedavg"


def test_the_title_of_the_headline_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    headline = benchmark("headline", monkeypatch)
    found = importlib.import_module("harness").kept("headline")
    monkeypatch.setattr(headline, "save", lambda figure, path: titles.append(figure.get_suptitle()))
    titles: list[str] = []
    headline.draw(found)
    assert titles == ["DP-FedAvg reaches 74.1 % at epsilon 2, and 73.9 % without noise"]
    assert titles[0] in drawn("headline.svg")
