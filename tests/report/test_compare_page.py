"""The comparison's page in a browser: chart, legend, tables, small screens; text is never markup; no network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from fedveil.federation.history import Columns
from fedveil.report.compare_page import write_page
from fedveil.studies.compare.comparison import Comparison
from fedveil.studies.compare.comparison_plan import ComparisonSpec, plan
from fedveil.studies.compare.comparison_rows import Row
from fedveil.studies.statistics import Against
from fedveil.verify import Finding, Verification
from grid_cells import small

pytestmark = pytest.mark.browser
METHODS = ("fedavg", "dp-fedavg", "dp-fedavg:clip=0.01", "noisy-fedavg")
LINES = "return document.querySelectorAll('#chart-0 .veil-plot > svg > .veil-line').length"
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
TEXTS = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)"


def comparison(folder: Path, epsilons: tuple[float, ...]) -> Comparison:
    """Rows with given numbers: the page draws what they say."""
    rows = []
    for p in plan(ComparisonSpec(small(), METHODS, epsilons, (1, 2))):
        if not p.cells:
            rows.append(Row(p.method, p.partition, p.epsilon, Columns().main, 0, problems=("<b>set</b> training.batch_clip",)))
            continue
        alone, best = math.isinf(p.epsilon), p.method == "dp-fedavg"
        test = None if alone or best else Against("dp-fedavg", 2, -0.2, 0.03, 0.5, 0.04)
        values = {1: 0.7, 2: 0.72} if best else {1: 0.5, 2: 0.54}
        rank = None if alone else (1 if best else 2)
        rows.append(Row(p.method, p.partition, p.epsilon, Columns().main, 2, values, rank, test, p.statement))
    return Comparison(folder, small(), "proven", "test_accuracy", METHODS, epsilons, (), (1, 2), tuple(rows))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    return write_page(comparison(folder, (2.0, 8.0)), folder / "compare.html", runs=folder / "runs.html")


def test_the_chart_has_a_line_for_each_method_and_its_legend_hides_one(open_page: Callable[..., Any], page: Path) -> None:
    browser = open_page(page)
    assert browser.execute_script(TEXTS, "#chart-0 .veil-key") == ["fedavg, no noise", "dp-fedavg", "dp-fedavg clip=0.01"]
    assert browser.execute_script(LINES) == 3
    browser.execute_script("document.querySelectorAll('#chart-0 .veil-key')[1].click()")
    assert browser.execute_script(LINES) == 2


def test_bands_are_the_confidence_interval_of_the_mean(page: Path, open_page: Callable[..., Any]) -> None:
    browser = open_page(page)
    assert browser.execute_script(TEXTS, "#result .scope") == [
        "Bands: 95 % confidence interval of the mean (Student's t, n = 2 seeds). Small points: single seeds."
    ]
    drawn = browser.execute_script("return JSON.parse(document.getElementById('data').textContent).charts[0].series[1]")
    low, high = stats.t.interval(0.95, 1, loc=71, scale=stats.sem([70, 72]))
    assert drawn["band"][0] == pytest.approx([2.0, low, high])


def test_tables_tell_claimed_and_proven_and_the_test(open_page: Callable[..., Any], page: Path) -> None:
    browser = open_page(page)
    rows = [row.split("\t") for row in browser.execute_script(TEXTS, "#tables tbody tr")]
    assert rows[0][:2] == ["1", "dp-fedavg"]
    assert rows[0][2] == "71.0 ± 1.4 %"
    assert rows[0][5:] == ["none", "2", "best"]
    assert rows[1][-1] == "worse, p = 0.040"
    assert rows[-1][1] == "fedavg"
    assert rows[-1][6] == "∞"
    assert browser.execute_script(TEXTS, "#tables h3") == [
        *("Proven epsilon = 2", "Proven epsilon = 8", "Without noise (no guarantee)")
    ]
    result = browser.execute_script(TEXTS, "#result .sentence")
    verdict = "At proven epsilon 2 dp-fedavg is better than dp-fedavg clip=0.01, p = 0.040."
    assert result[0].replace("\u00a0", " ") == verdict
    assert "p\u00a0=\u00a00.040" in result[0], "numbers stay on one line with their signs"
    differences = browser.execute_script(TEXTS, "#result .differences")
    assert len(differences) == len(result)
    assert differences[0].replace("\u00a0", " ") == "Against dp-fedavg: dp-fedavg clip=0.01 -20 points."
    assert "<b>set</b> training.batch_clip" in browser.execute_script(TEXTS, "#not-compared li")[0]
    assert "with 2 seeds they cannot reach 0.05" in " ".join(browser.execute_script(TEXTS, "#how-to-read-it p"))
    (command,) = browser.execute_script(TEXTS, "pre.command")
    assert "--methods fedavg,dp-fedavg,dp-fedavg:clip=0.01,noisy-fedavg --epsilon 2,8 --seeds 2 --by proven" in command


def test_it_says_what_the_proven_numbers_rest_on(open_page: Callable[..., Any], page: Path) -> None:
    lines = open_page(page).execute_script(TEXTS, "#what-it-rests-on li")
    assert any("secret cryptographic source" in line and "because whoever can predict" in line for line in lines)


def test_it_fits_a_small_screen(open_page: Callable[..., Any], page: Path) -> None:
    assert open_page(page, width=390).execute_script(OVERFLOW) <= 0


def test_one_epsilon_sets_the_methods_beside_each_other(open_page: Callable[..., Any], tmp_path: Path) -> None:
    found = comparison(tmp_path, (2.0,))
    browser = open_page(write_page(found, tmp_path / "compare.html"))
    assert browser.execute_script(TEXTS, "#chart-0 .veil-key") == [
        "1. dp-fedavg",
        "2. dp-fedavg clip=0.01",
        "3. fedavg, no noise",
    ]
    for kind, drawn in (("reach", 3), ("marker", 3), ("dot", 6)):
        assert browser.execute_script(f"return document.querySelectorAll('#chart-0 .veil-plot .veil-{kind}').length") == drawn
    low, high = stats.t.interval(0.95, 1, loc=71, scale=stats.sem([70, 72]))
    spec = browser.execute_script("return JSON.parse(document.getElementById('data').textContent).charts[0].series[0]")
    assert spec["band"][0] == ["1", pytest.approx(low), pytest.approx(high)]
    one = replace(
        found, seeds=(1,), rows=tuple(replace(r, values={1: 0.5} if r.values else {}, against=None) for r in found.rows)
    )
    text = browser_text(open_page(write_page(one, tmp_path / "compare.html")))
    assert "One seed is no sample" in text
    assert "nan" not in text.lower()
    assert browser.execute_script("return document.querySelectorAll('.veil-reach, .veil-dot').length") == 0


def test_dark_and_print(open_page: Callable[..., Any], page: Path) -> None:
    browser = open_page(page)
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = browser.execute_script(ground)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": dark})
    assert browser.execute_script(ground) != light
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    assert browser.execute_script(ground) == "rgb(255, 255, 255)"
    assert not browser.find_element("css selector", ".jump").is_displayed()
    browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert browser.execute_script("return document.querySelector('details').open")


def browser_text(browser: Any) -> str:
    return str(browser.execute_script("return document.querySelector('main').innerText"))


def test_the_badge_and_what_is_contradicted(open_page: Callable[..., Any], tmp_path: Path) -> None:
    right, wrong = (
        Verification((Finding("verified", "ledger", "whole"),)),
        Verification((Finding("contradicted", "pin", "<b>x</b>"),)),
    )
    found = comparison(tmp_path, (2.0, 8.0))
    browser = open_page(write_page(found, tmp_path / "right.html", checked={Path("a"): right, Path("b"): right}), width=390)
    assert browser.execute_script(TEXTS, "#result .badge") == ["Verification: verified (2 of 2 runs)"]
    assert browser.execute_script(TEXTS, "#result .refuted") == []
    browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    folded = "return [...document.querySelectorAll('details')].filter((d) => !d.open).map((d) => d.className)"
    assert browser.execute_script(folded) == ["findings"], "the checks of many runs would be most of what is printed"
    browser = open_page(write_page(found, tmp_path / "wrong.html", checked={Path("a"): right, Path("b"): wrong}), width=390)
    assert browser.execute_script(TEXTS, "#result .badge.contradicted") == ["Verification: contradicted (1 of 2 runs)"]
    assert browser.execute_script(TEXTS, "#result .refuted li") == ["b: pin: <b>x</b>"]
    assert browser.execute_script(OVERFLOW) <= 0
