"""Report, comparison and explorer have no violation that axe finds, and fit: in wide and narrow windows, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import report_runs as runs
from axe import violations
from fedveil.experiment.config import parse
from fedveil.report.compare_page import write_page
from fedveil.report.explorer import write_explorer
from fedveil.report.report import write_report
from fedveil.studies.compare.comparison import compare
from fedveil.studies.compare.comparison_plan import ComparisonSpec

pytestmark = pytest.mark.browser
LOOKS = [(1440, "light"), (1440, "dark"), (768, "light"), (390, "light"), (390, "dark")]


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind of page; reports of one run, of two seeds, of two runs, and of two promises."""
    made, folder = runs.make(tmp_path_factory), tmp_path_factory.mktemp("pages")
    shown = {
        "one run": ("one",),
        "two seeds": ("one", "other"),
        "two runs": ("one", "loose"),
        "two promises": ("loose", "one", "other", "server"),
    }
    reports = {
        name: write_report([made[one] for one in which], folder / f"{name.replace(' ', '-')}.html")
        for name, which in shown.items()
    }
    spec = ComparisonSpec(parse(runs.raw()), ["dp-fedavg", "adaptive-clipping"], [2.0, 8.0], [1, 2])
    found = compare(spec, folder / "compare", 1)
    return {**reports, "explorer": write_explorer(folder), "comparison": write_page(found, folder / "comparison.html")}


@pytest.mark.parametrize("name", ["one run", "two seeds", "two runs", "two promises", "explorer", "comparison"])
def test_axe_finds_no_violation_and_nothing_overflows(open_page: Callable[..., Any], pages: dict[str, Path], name: str) -> None:
    for width, scheme in LOOKS:
        browser = open_page(pages[name], width=width)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [feature]})
        browser.execute_script("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 100))")
        assert violations(browser) == [], (width, scheme)
        assert browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
