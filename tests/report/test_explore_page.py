"""The privacy explorer in a browser: it opens from disk, follows its controls, and asks the network for nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fedveil.accounting import gaussian
from fedveil.errors import ConfigError
from fedveil.report.explorer import write_explorer
from fedveil.report.web_page import inline, web_file

FAMILIES = ("dp-fedavg", "ladp-fl", "fedglp-adp", "noisy-fedavg", "noisy-fedprox", "fedanc", "aldp-fl", "silo-dp-sgd")
MOVE = """
const [id, value] = arguments; const input = document.getElementById(id);
input.value = value; input.dispatchEvent(new Event(input.tagName === 'SELECT' ? 'change' : 'input', {bubbles: true}));
"""


def test_page_holds_everything_it_needs(tmp_path: Path) -> None:
    page = write_explorer(tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    assert "{{" not in page
    links = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"'`)]*", page))
    assert links <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:script|img|iframe)[^>]*\ssrc=|@import|url\(", page)
    assert "default-src 'none'" in page


def test_folder_gets_a_default_name(tmp_path: Path) -> None:
    assert write_explorer(tmp_path) == tmp_path / "explore.html"


def test_unwritable_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the explorer"):
        write_explorer(tmp_path / "file" / "page.html")


def test_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no web part named 'none\.js'"):
        web_file("none.js")


def test_inlined_scripts_cannot_end_their_element() -> None:
    assert inline("<script>{{explore.js}}</script>").count("</") == 1


class Page:
    """The open explorer."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def move(self, control: str, value: object) -> None:
        self.run(MOVE, control, str(value))

    def text(self, control: str) -> str:
        return str(self.run("return document.getElementById(arguments[0]).textContent", control))

    def number(self, control: str) -> float:
        return float(self.run("return document.getElementById(arguments[0]).dataset.value", control))

    def paths(self, chart: str) -> list[str]:
        every = "[...document.querySelectorAll(`#${arguments[0]} .veil-plot :is(path, circle)`)]"
        return list(self.run(f"return {every}.map((p) => p.getAttribute('d') ?? p.getAttribute('cx'))", chart))


def noisy(page: Page) -> None:
    """Choose the method whose claim is for the last model alone, in the scope of its claim."""
    for control, value in (("family", "noisy-fedavg"), ("view", "final"), ("scope", "client:replace_one")):
        page.move(control, value)


@pytest.fixture
def page(open_page: Callable[..., Any], tmp_path: Path) -> Page:
    return Page(open_page(write_explorer(tmp_path)))


@pytest.mark.browser
def test_numbers_and_curves_follow_every_slider(page: Page) -> None:
    page.move("family", "noisy-fedavg")
    page.move("view", "final")
    for slider in ("noise", "rounds", "delta", "lr", "smooth", "steps", "dim", "clients", "cohort"):
        chart = (
            "chart-learn" if slider in ("dim", "clients", "cohort") else "chart-noise" if slider == "rounds" else "chart-rounds"
        )
        before = page.paths(chart)
        page.move(f"r-{slider}", int(page.run("return document.getElementById(arguments[0]).value", f"r-{slider}")) + 60)
        assert page.paths(chart) != before, slider
    before = page.text("assumptions")
    page.move("n-clip", 0.25)
    assert page.text("assumptions") != before


@pytest.mark.browser
def test_shown_epsilon_is_the_reference_value(page: Page) -> None:
    page.move("family", "dp-fedavg")
    for rounds, noise, delta, scope, factor in ((120, 7.5, 1e-6, "client:replace_one", 2), (3, 0.8, 1e-9, "client:zero_out", 1)):
        for control, value in (("n-rounds", rounds), ("n-noise", noise), ("n-delta", delta), ("scope", scope)):
            page.move(control, value)
        wanted = gaussian.epsilon_of(factor * rounds**0.5 / noise, delta)
        assert page.number("proven") == pytest.approx(wanted, rel=1e-9)
        assert f"{wanted:.3g}" in page.text("proven")
        assert f"{wanted:.3g}" in page.text("sentence")
        assert scope.split(":")[1].replace("_", "-") in page.text("proven-scope")


EVERYTHING = """
let turn = 0; const said = [], $ = (id) => document.getElementById(id);
const move = (id, value) => { $(id).value = value; $(id).dispatchEvent(new Event('change', {bubbles: true})); };
for (const family of arguments[0]) for (const view of ['server', 'aggregate', 'final']) {
  move('family', family); move('view', view);
  const scopes = [...$('scope').options].filter((o) => !o.disabled).map((o) => o.value);
  const settings = scopes.flatMap((scope) => [[scope, 'fixed'], [scope, 'poisson']]);
  const one = turn++ % settings.length;
  for (const [scope, sampling] of arguments[1] ? settings : [settings[one]]) {
    move('scope', scope); move('sampling', sampling);
    const drawn = [...document.querySelectorAll('.veil-plot [d]')].map((path) => path.getAttribute('d')).join();
    const proven = Number($('proven').dataset.value);
    said.push([family, view, scope, $('proven-scope').textContent, proven, document.body.innerText, drawn]);
  }
}
return said;
"""


@pytest.mark.browser
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one of each view", "all"])
def test_every_family_speaks_in_every_view_unit_and_sampling(page: Page, every: bool) -> None:
    said = page.run(EVERYTHING, FAMILIES, every)
    assert {(row[0], row[1]) for row in said} == set(product(FAMILIES, ("server", "aggregate", "final")))
    assert len({row[2] for row in said}) == 4
    assert len(said) == (7 * 3 * 3 * 2 + 1 * 3 * 2 * 2 if every else len(FAMILIES) * 3)
    for family, view, scope, shown, proven, text, drawn in said:
        unit, adjacency = scope.split(":")
        assert f"{unit} level, {adjacency.replace('_', '-')}, {view} view, δ\u00a0=\u00a010⁻⁵" in shown, family
        assert proven > 0
        assert not re.search("NaN|undefined|Infinity|null", text + drawn)


@pytest.mark.browser
def test_a_claim_for_another_view_is_never_set_beside_the_proof(page: Page) -> None:
    keys = "return [...document.querySelectorAll('.veil-key')].map((b) => b.textContent).filter((t) => t.startsWith('claimed'))"
    noisy(page)
    assert re.search(r"claim of ε = 0\.752 is [\d.]+ times smaller", page.text("sentence"))
    assert page.text("claimed") == "ε = 0.752"
    assert len(page.run(keys)) == 3
    page.move("view", "aggregate")
    assert "claim is for another view (final, not aggregate): it does not stand beside this proof" in page.text("sentence")
    assert "0.752" not in page.text("sentence")
    assert page.text("claimed") == "another view"
    assert "0.752" not in page.text("claimed-scope")
    assert page.run("return document.getElementById('strip').textContent").endswith("claimed another viewnoise 4 ×")
    assert page.run(keys) == []


@pytest.mark.browser
def test_families_without_meaning_for_a_scope_do_not_offer_it(page: Page) -> None:
    offered = "return [...document.getElementById('scope').options].filter((o) => !o.disabled).map((o) => o.value)"
    page.move("family", "silo-dp-sgd")
    assert page.run(offered) == ["record:zero_out", "record:replace_one"]
    assert "record level" in page.text("proven-scope")
    page.move("family", "ladp-fl")
    assert "record:zero_out" not in page.run(offered)


@pytest.mark.browser
def test_published_form_without_a_bound_is_drawn_as_such(page: Page) -> None:
    page.move("family", "fedanc")
    assert "no bound" in page.text("chart-rounds")
    assert page.run("return document.querySelectorAll('#chart-rounds .veil-infinite').length") == 1
    assert "The published form has no bound." in page.text("warning")
    page.move("family", "dp-fedavg")
    assert page.run("return document.querySelectorAll('#chart-rounds .veil-infinite').length") == 0


@pytest.mark.browser
def test_legend_toggles_a_series_by_mouse_and_keyboard(page: Page) -> None:
    noisy(page)
    key = "return [...document.querySelectorAll('#chart-rounds .veil-key')].find((b) => b.textContent === 'claimed')"
    button = page.run(key)
    before = page.paths("chart-rounds")
    assert button.get_attribute("aria-pressed") == "true"
    page.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert len(page.paths("chart-rounds")) < len(before)
    page.move("r-noise", 500)  # the choice survives new numbers
    assert page.run(key).get_attribute("aria-pressed") == "false"
    button.send_keys(" ")
    assert button.get_attribute("aria-pressed") == "true"
    assert len(page.paths("chart-rounds")) == len(before)


@pytest.mark.browser
def test_read_out_by_pointer_and_by_arrow_keys(page: Page) -> None:
    from selenium.webdriver import ActionChains

    svg = page.run("return document.querySelector('#chart-tradeoff .veil-plot svg')")
    page.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", svg)
    ActionChains(page.browser).move_to_element(svg).perform()
    tip = "return document.querySelector('#chart-tradeoff .veil-tip')"
    assert page.run(tip).is_displayed()
    assert re.search(r"false alarms: 0\.\d+.*proven: 0\.\d+", page.run(tip).text, re.DOTALL)
    page.run("document.querySelector('#chart-rounds .veil-plot svg').focus()")
    spoken = []
    for _ in range(3):
        ActionChains(page.browser).send_keys("\ue014").perform()  # right arrow
        spoken.append(page.run("return document.querySelector('#chart-rounds .veil-live').textContent"))
    assert len(set(spoken)) == 3
    assert all(text.startswith("rounds: ") for text in spoken)


@pytest.mark.browser
def test_slider_by_keyboard(page: Page) -> None:
    before = page.number("proven")
    slider = page.run("return document.getElementById('r-noise')")
    for _ in range(4):
        slider.send_keys("\ue012")  # left arrow: less noise
    assert page.number("proven") > before
    assert slider.get_attribute("aria-valuetext").startswith("z = ")


@pytest.mark.browser
def test_impossible_numbers_are_refused_and_explained(page: Page) -> None:
    before = page.number("proven")
    for configuration in ("-3", "0", "", "1e9"):
        page.move("n-noise", configuration)
        assert page.run("return document.getElementById('n-noise').getAttribute('aria-invalid')") == "true"
        assert "Noise multiplier must be a number from 0.1 to 1,000" in page.text("note")
        assert page.number("proven") == before
    page.move("n-rounds", "2.5")
    assert "a whole number" in page.text("note")
    page.move("n-noise", "9")
    assert page.run("return document.getElementById('n-noise').getAttribute('aria-invalid')") == "false"
    assert page.number("proven") != before


@pytest.mark.browser
def test_cohort_never_exceeds_the_clients_and_says_so(page: Page) -> None:
    page.move("n-clients", 40)
    assert page.run("return document.getElementById('n-cohort').value") == "40"
    assert "cannot exceed the number of clients" in page.text("note")


@pytest.mark.browser
def test_vacuous_delta_is_called_out(page: Page) -> None:
    assert "Delta is too large" not in page.text("warning")
    page.move("n-delta", 0.001)
    assert "Delta is too large" in page.text("warning")


@pytest.mark.browser
def test_noise_is_found_for_a_target(page: Page) -> None:
    page.move("target", 2)
    page.run("document.getElementById('calibrate').click()")
    assert 1.99 < page.number("proven") <= 2
    page.move("target", -1)
    page.run("document.getElementById('calibrate').click()")
    assert "above 0" in page.text("note")


@pytest.mark.browser
def test_projection_bounds_the_last_model_only(page: Page) -> None:
    noisy(page)
    for control, value in (("n-rounds", 5000), ("view", "final")):
        page.move(control, value)
    composed = page.number("proven")
    page.move("project", "yes")
    assert page.number("proven") < 0.7 * composed
    assert "for no client" in page.text("assumptions")
    page.move("view", "aggregate")
    projected = page.number("proven")
    page.move("project", "no")
    assert page.number("proven") == projected


@pytest.mark.browser
def test_address_restores_the_settings(open_page: Callable[..., Any], tmp_path: Path) -> None:
    page = Page(
        open_page(
            write_explorer(tmp_path),
            fragment="#family=fedanc&view=server&scope=client:replace_one&noise=5&rounds=17&density=0.2&cohort=nonsense",
        )
    )
    assert page.number("proven") == pytest.approx(gaussian.epsilon_of(2 * 17**0.5 / 5, 1e-5), rel=1e-9)
    assert page.run("return document.getElementById('n-cohort').value") == "500"
    page.run("document.getElementById('reset').click()")
    assert page.run("return document.getElementById('family').value") == "dp-fedavg"


@pytest.mark.browser
def test_it_opens_on_dp_fedavg_and_methods_of_papers_are_behind_a_choice(page: Page) -> None:
    offered = """return [...document.getElementById('family').options]
        .filter((o) => !(o.parentElement.tagName === 'OPTGROUP' && o.parentElement.disabled)).map((o) => o.value)"""
    assert page.run("return document.getElementById('family').value") == "dp-fedavg"
    assert page.run(offered) == ["dp-fedavg", "silo-dp-sgd"]
    assert page.run("return document.getElementById('claimed-card').hidden")
    page.run("document.getElementById('expert').click()")
    assert set(page.run(offered)) >= set(FAMILIES)
    page.move("family", "ladp-fl")
    page.run("document.getElementById('expert').click()")
    assert page.run("return document.getElementById('family').value") == "dp-fedavg"


@pytest.mark.browser
def test_on_a_phone_the_controls_come_first_and_the_numbers_stay_in_sight(open_page: Callable[..., Any], tmp_path: Path) -> None:
    page = Page(open_page(write_explorer(tmp_path), width=390, height=844))
    tops = "return ['.controls', '.headline', '.rest'].map((s) => document.querySelector(s).getBoundingClientRect().top)"
    assert page.run(tops) == sorted(page.run(tops))
    page.run("scrollTo({top: 900, behavior: 'instant'})")
    assert page.run("return document.getElementById('strip').getBoundingClientRect().top") == 0


@pytest.mark.browser
@pytest.mark.parametrize("family", ["noisy-fedavg", "aldp-fl", "silo-dp-sgd"])
def test_fits_a_phone(open_page: Callable[..., Any], tmp_path: Path, family: str) -> None:
    page = Page(open_page(write_explorer(tmp_path), fragment=f"#family={family}", width=390, height=844))
    assert page.run("return document.documentElement.scrollWidth") <= 390
    wide = """
    const out = (e) => e.getBoundingClientRect().right > 391 && getComputedStyle(e).position !== 'absolute';
    return [...document.querySelectorAll('body *')].filter(out).map((e) => e.id || String(e.className));
    """
    assert page.run(wide) == []


@pytest.mark.browser
def test_dark_and_print(page: Page) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    assert page.run(ground) != light
    page.browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    assert page.run(ground) == "rgb(255, 255, 255)"
    assert not page.run("return document.getElementById('controls')").is_displayed()
    assert "Noise multiplier z" in page.run("return document.getElementById('settings').innerText")
