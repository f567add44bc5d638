"""The report in a browser: what is shown, what clicking does, keyboard, small screens, print; nothing is asked of the network."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import report_runs as runs
from fedveil.accounting.types import number, percent_at_most
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.verification import verification
from fedveil.report.figures import plot_run
from fedveil.report.report import write_report
from fedveil.statement.statement import GroupNumbers
from fedveil.statement.statement_layout import to_dict
from fedveil.statement.statement_text import in_words

pytestmark = pytest.mark.browser
LINES = "return document.querySelectorAll('#training .veil-chart')[0].querySelectorAll('.veil-plot > svg > .veil-line').length"
REACH = """const svg = document.querySelector('#training .veil-plot > svg'), band = svg.querySelector('.veil-band').getBBox();
return [26 - 0.1, band.y, band.y + band.height, svg.height.baseVal.value - 46 + 0.1];"""
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return runs.make(tmp_path_factory)


@pytest.fixture(scope="session")
def single(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of one run with an attack's picture and figures, a failure, and text that would like to be markup."""
    run = Path(shutil.copytree(made["one"], tmp_path_factory.mktemp("single") / "run"))
    plot_run(run, ["clip"], run / "attack-strip.png")
    (run / "attack-dlg.json").write_text('{"attack": "dlg", "psnr": {"mean": 11.25}, "each": [1, 2]}')
    checked = {run: verification(run)}  # before the table, which no digest of the run covers
    failures = "round,client,failure\n0,3,<b>NaN</b> in the update\n2,5,<b>NaN</b> in the update\n"
    (run / "private" / "failures.csv").write_text(failures)
    return write_report([run], checked=checked)


@pytest.fixture(scope="session")
def several(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    server = Path(shutil.copytree(made["server"], folder / "server"))
    settings = (server / "config.toml").read_text()
    longer = "\n".join(f'a_setting_with_a_long_name_{i} = "and a value that is long as well"' for i in range(6))
    (server / "config.toml").write_text(settings.replace("[method]\n", f"[method]\n{longer}\n"))
    return write_report([*(made[n] for n in ("loose", "one", "other")), server], folder / "report.html")


def text(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).innerText", selector))


def texts(browser: Any, selector: str) -> list[str]:
    return list(browser.execute_script("return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)", selector))


def texts_of_svg(browser: Any, selector: str) -> list[str]:
    return list(browser.execute_script("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector))


def click(browser: Any, selector: str, index: int = 0) -> None:
    browser.execute_script("document.querySelectorAll(arguments[0])[arguments[1]].click()", selector, index)


def test_headline_has_accuracy_and_three_numbers_with_their_scope(
    open_page: Callable[..., Any], single: Path, made: dict[str, Path]
) -> None:
    browser = open_page(single)
    run = read_run(made["one"])
    assert run.statement is not None
    accuracy = f"{100 * run.history[-1]['test_accuracy']:.1f} %"
    assert accuracy in text(browser, "#result .sentence")
    assert "at most" in text(browser, "#result .sentence")
    cards = texts(browser, "#result .card")
    assert [card.splitlines()[0] for card in cards] == ["Test accuracy", "Proven ε", "Best possible attack", "Not protected"]
    assert accuracy in cards[0].splitlines()
    assert number(run.statement.proven.epsilon) in cards[1].splitlines()
    assert "delta = 1e-3, client level, zero-out, aggregate view" in cards[1]
    assert percent_at_most(run.statement.own.tpr) in cards[2].splitlines()
    assert f"{len(run.statement.not_protected)} limits" in cards[3].splitlines()
    assert "simulation only" in text(browser, "#result .warning")
    assert in_words(run.statement) in text(browser, "#privacy")
    rows = texts(browser, "#privacy tbody tr")
    assert [row.split()[0] for row in rows] == ["server", "aggregate", "final"]
    assert "no bound" in rows[0]


def test_sections_hold_what_the_run_left(open_page: Callable[..., Any], single: Path) -> None:
    browser = open_page(single)
    titles = texts(browser, "#jump a")
    assert {
        "Result",
        "Training",
        "Privacy",
        "Noise and clip by layer",
        "Fairness among clients",
        "Data",
        "Attacks",
        "Left out",
    } <= {*titles}
    assert titles == texts(browser, ".report > section > h2")
    assert browser.execute_script("return document.querySelector('#attacks img').naturalWidth") > 100
    assert "psnr.mean\n11.25" in text(browser, "#attacks")
    assert "<b>NaN</b> in the update" in text(browser, "#failures")
    assert "1, 3" in text(browser, "#failures")
    assert "fedveil run" in text(browser, "#repeat pre.command")
    click(browser, "#repeat summary")
    assert 'name = "dp-fedavg"' in text(browser, "#repeat pre:not(.command)")
    click(browser, "#repeat summary", 1)
    assert "torch" in text(browser, "#repeat")


def test_a_series_is_hidden_and_shown_by_its_legend(open_page: Callable[..., Any], single: Path) -> None:
    browser = open_page(single)
    loss = "#training .chart-cell:nth-child(2) "
    count = f"return document.querySelectorAll('{loss} .veil-plot > svg > .veil-line').length"
    assert browser.execute_script(count) == 2
    click(browser, f"{loss} .veil-key", 1)
    assert browser.execute_script(count) == 1
    assert (
        browser.execute_script(f"return document.querySelectorAll('{loss} .veil-key')[1].getAttribute('aria-pressed')") == "false"
    )
    click(browser, f"{loss} .veil-key", 1)
    assert browser.execute_script(count) == 2


def test_partition_is_read_by_hover_and_by_keyboard(open_page: Callable[..., Any], single: Path) -> None:
    browser = open_page(single)
    cells = browser.execute_script("return document.querySelectorAll('#data .heat-cell').length")
    assert 20 < cells <= 10 * runs.CLIENTS
    svg = browser.find_element("css selector", "#data svg")
    browser.execute_script("arguments[0].focus()", svg)
    svg.send_keys("\ue014")
    assert text(browser, "#data .veil-tip").startswith("client 0, label 0: ")
    svg.send_keys("\ue015")
    svg.send_keys("\ue014")
    assert text(browser, "#data .veil-tip").startswith("client 1, label 1: ")
    assert text(browser, "#data .veil-live").startswith("client 1, label 1: ")
    svg.send_keys("\ue00c")
    assert browser.execute_script("return document.querySelector('#data .veil-tip').hidden")


def test_runs_are_compared_with_bands_and_can_be_left_out(open_page: Callable[..., Any], several: Path) -> None:
    browser = open_page(several)
    rows = texts(browser, "#comparison tbody tr:not(.promise)")
    assert len(rows) == 3
    assert "over 2 seeds" in rows[0] or "over 2 seeds" in rows[1]
    assert all("client level, zero-out" in row for row in rows)
    assert any("server view" in row for row in rows)
    assert browser.execute_script(LINES) == 3
    assert (
        browser.execute_script(
            "return document.querySelectorAll('#training .veil-chart')[0].querySelectorAll('.veil-band').length"
        )
        == 1
    )
    assert "95 % confidence interval in each round (Student's t, n = 2 seeds)" in text(browser, "#training .chart-cell .scope")
    reach = browser.execute_script(REACH)
    assert reach == sorted(reach), "two seeds are wide apart; the band ends where the axes do"
    click(browser, ".runs input", 1)
    assert browser.execute_script(LINES) == 2
    click(browser, ".runs input", 1)
    assert browser.execute_script(LINES) == 3


def test_comparison_is_sorted_by_its_headings(open_page: Callable[..., Any], several: Path) -> None:
    browser = open_page(several)

    def accuracies() -> list[float]:
        first = "#comparison tbody:nth-of-type(1) td[data-label='Test accuracy'] b"
        return [float(cell.split()[0]) for cell in texts(browser, first)]

    assert texts(browser, "#comparison .promise") == [
        f"Delta = 1e-3, client level, zero-out, {v} view" for v in ("aggregate", "server")
    ]
    proven = [float(cell) for cell in texts(browser, "#comparison tbody:nth-of-type(1) td[data-label='Proven ε'] b")]
    assert len(proven) == 2
    assert proven == sorted(proven)
    click(browser, "#comparison th button", 2)
    assert accuracies() == sorted(accuracies(), reverse=True)
    click(browser, "#comparison th button", 2)
    assert accuracies() == sorted(accuracies())
    assert (
        browser.execute_script("return document.querySelectorAll('#comparison th')[2].getAttribute('aria-sort')") == "descending"
    )


def test_charts_show_only_what_changes(open_page: Callable[..., Any], single: Path) -> None:
    browser = open_page(single)
    assert texts(browser, "#noise .veil-chart") == []
    assert "all 2 layers\n0.5" in text(browser, "#noise .facts").replace("Clip norm, ", "")
    series = """return [...document.querySelectorAll('.veil-chart')].map((chart) => [...chart.querySelectorAll('.veil-line')]
        .map((line) => new Set(line.getAttribute('d').match(/[\\d.]+(?=[ML]|$)/g)).size))"""
    assert all(max(heights, default=2) > 1 for heights in browser.execute_script(series))


def test_axes_are_named_by_what_they_show(open_page: Callable[..., Any], single: Path) -> None:
    labels = texts_of_svg(open_page(single), "#training .veil-label")
    assert {"accuracy (%)", "loss: cross-entropy", "the released update and its noise: L2 norm", "round"} <= {*labels}


def test_scores_over_epsilon_and_spending_are_drawn_for_one_promise_at_a_time(
    open_page: Callable[..., Any], several: Path
) -> None:
    browser = open_page(several)
    titles = texts(browser, "#privacy .veil-title")
    assert titles == ["Privacy spent over the rounds"] * 2 + ["Test accuracy against proven ε"]
    warnings = texts(browser, "#result p.warning")
    assert sum("simulation only" in warning for warning in warnings) == 1, "the same warning of all runs is said once"


@pytest.mark.parametrize("page", ["single", "several"])
def test_what_scrolls_is_reached_by_keyboard(open_page: Callable[..., Any], page: str, request: pytest.FixtureRequest) -> None:
    browser = open_page(request.getfixturevalue(page), width=900)
    browser.execute_script("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    browser.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 100))")
    stuck = """const wide = [...document.querySelectorAll('pre, .scroll')].filter((e) => e.scrollWidth > e.clientWidth);
        return [wide.length, wide.filter((e) => e.tabIndex !== 0 || !e.ariaLabel).length]"""
    count, without = browser.execute_script(stuck)
    assert without == 0
    assert count or page == "single"


@pytest.mark.parametrize("page", ["single", "several"])
def test_small_screens_do_not_scroll_sideways(open_page: Callable[..., Any], page: str, request: pytest.FixtureRequest) -> None:
    browser = open_page(request.getfixturevalue(page), width=390, height=800)
    browser.execute_script("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert browser.execute_script(OVERFLOW) <= 0


def test_dark_colours_keep_text_readable(open_page: Callable[..., Any], single: Path) -> None:
    browser = open_page(single)
    colours = (
        "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor].map((c) => c.match(/\\d+/g).map(Number))"
    )
    for scheme in ("light", "dark"):
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"media": "", "features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        ink, ground = browser.execute_script(colours)
        assert (sum(ink) > sum(ground)) == (scheme == "dark")
        assert abs(sum(ink) - sum(ground)) > 3 * 140


def test_on_a_phone_the_links_follow_what_is_read(open_page: Callable[..., Any], single: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser = open_page(single, width=390)
    marked = "return [...document.querySelectorAll('#jump [aria-current]')].map((a) => [a.hash, a.getBoundingClientRect().left])"
    last = browser.execute_script("return [...document.querySelectorAll('#jump a')].at(-1).hash")
    browser.execute_script("document.querySelector(arguments[0]).scrollIntoView({behavior: 'instant'})", last)
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(marked) and b.execute_script(marked)[0][0] == last)
    WebDriverWait(browser, 20).until(lambda b: 0 <= b.execute_script(marked)[0][1] <= 360)
    assert len(browser.execute_script(marked)) == 1
    browser.execute_script("scrollTo({top: 0, behavior: 'instant'})")
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(marked)[0][0] != last)


def test_printing_opens_what_is_folded_but_the_checks(open_page: Callable[..., Any], single: Path) -> None:
    browser = open_page(single)
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert pdf.startswith(b"%PDF")
    folded = "return [...document.querySelectorAll('details')].filter((d) => !d.open).map((d) => d.className)"
    assert browser.execute_script(folded) == ["findings"], "the checks would push the four numbers off the first page"


def test_caps_of_single_clients_are_listed(open_page: Callable[..., Any], made: dict[str, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(made["server"], tmp_path / "run"))
    statement = read_run(run).statement
    assert statement is not None
    groups = (GroupNumbers(1.25, 3), GroupNumbers(statement.proven.epsilon, 9))
    (run / "statement.json").write_text(json.dumps(to_dict(replace(statement, groups=groups))))
    browser = open_page(write_report([run]))
    assert "Each client has a cap of its own" in text(browser, "#privacy")
    rows = [row.split() for row in texts(browser, "#privacy tbody tr")]
    assert [["1.25", "3"], [number(statement.proven.epsilon), "9"]] == rows[3:5]


def test_the_badge_says_what_verifying_found_and_contradictions_stand_below_it(
    open_page: Callable[..., Any], made: dict[str, Path], tmp_path: Path
) -> None:
    forged = Path(shutil.copytree(made["one"], tmp_path / "forged"))
    statement = forged / "statement.json"
    statement.write_text(statement.read_text().replace('"tpr": 0.', '"tpr": 0.0'))
    browser = open_page(write_report([made["other"]], tmp_path / "right.html"), width=390)
    assert text(browser, "#result .badge.verified") == "Verification: verified"
    assert texts(browser, "#result .refuted") == []
    browser = open_page(write_report([forged, made["other"]], tmp_path / "wrong.html"), width=390)
    assert text(browser, "#result .badge.contradicted") == "Verification: contradicted (1 of 2 runs)"
    assert "forged: files: expected what the run wrote, found changed: statement.json" in text(browser, "#result .refuted")
    assert text(browser, "#result .findings li") == ""  # folded
    click(browser, "#result .findings summary")
    assert texts(browser, "#result .findings h3")[0].startswith("forged: contradicted (")
    assert {"Contradicted", "Verified", "What has to be trusted"} == {
        t.split(" (")[0] for t in texts(browser, "#result .findings h4")
    }
    assert browser.execute_script(OVERFLOW) <= 0
