"""The chart library on its own: what the run report relies on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedveil.report.web_page import inline

pytestmark = pytest.mark.browser
PAGE = (
    "<!doctype html><meta charset=utf-8><link rel=icon href='data:,'><style>{{theme.css}}</style><div id=c></div>"
    "<script>{{chart.js}}</script>"
)
RECTS = "return [...document.querySelectorAll('.veil-bar')].map((r) => arguments[0].map((k) => Number(r.getAttribute(k))))"
Draw = Callable[..., Any]


@pytest.fixture
def draw(open_page: Callable[..., Any], tmp_path: Path) -> Draw:
    """Draws a chart and returns the driver."""
    path = tmp_path / "chart.html"
    path.write_text(inline(PAGE), encoding="utf-8")
    browser = open_page(path)

    def drawing(
        series: list[dict[str, Any]], x: dict[str, Any] | None = None, y: dict[str, Any] | None = None, **more: Any
    ) -> Any:
        spec = {"title": "T", "x": {"label": "X", **(x or {})}, "y": {"label": "Y", **(y or {})}, "series": series, **more}
        browser.execute_script(f"veilChart(document.getElementById('c'), {json.dumps(spec)})")
        return browser

    return drawing


def found(browser: Any, selector: str) -> int:
    return int(browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector))


def ticks(browser: Any) -> list[str]:
    return list(
        browser.execute_script(
            "return [...document.querySelectorAll('.veil-ticks text:not(.veil-label)')].map((t) => t.textContent)"
        )
    )


def numbers(browser: Any, selector: str) -> list[list[float]]:
    script = "return [...document.querySelectorAll(arguments[0])].map((p) => p.getAttribute('d').match(/-?[0-9.]+/g).map(Number))"
    return list(browser.execute_script(script, selector))


def test_line_goes_where_the_numbers_say(draw: Draw) -> None:
    browser = draw([{"name": "a", "points": [[0, 0], [5, 5], [10, 10]]}], x={"min": 0, "max": 10}, y={"min": 0, "max": 10})
    (line,) = numbers(browser, ".veil-plot .veil-line")
    x0, y0, x1, y1, x2, y2 = line
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.2)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.2)


def test_logarithmic_axes_space_decades_equally(draw: Draw) -> None:
    browser = draw([{"name": "a", "points": [[1, 0.01], [10, 1], [100, 100]]}], x={"scale": "log"}, y={"scale": "log"})
    x0, y0, x1, y1, x2, y2 = numbers(browser, ".veil-plot .veil-line")[0]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert {"0.01", "1", "100"} <= set(ticks(browser))


def test_gaps_and_infinities(draw: Draw) -> None:
    browser = draw([{"name": "a", "points": [[0, 1], [1, 2], [2, None], [3, 3], [4, 4], [5, "inf"], [6, "inf"]]}])
    assert found(browser, ".veil-plot .veil-line:not(.veil-infinite)") == 2
    assert found(browser, ".veil-infinite") == 1
    assert "no bound" in browser.find_element("id", "c").text


def test_band_bars_scatter_and_categories(draw: Draw) -> None:
    band = {"name": "mean", "points": [[0, 1], [1, 2]], "band": [[0, 0.5, 1.5], [1, 1.5, 2.5]]}
    browser = draw([band, {"name": "dots", "kind": "scatter", "points": [[0, 3], [1, 1]]}])
    assert found(browser, ".veil-band") == 1
    browser = draw(
        [{"name": n, "kind": "bar", "points": [["x", 1], ["y", v]]} for n, v in (("a", 2), ("b", 3))], x={"scale": "band"}
    )
    bars = browser.execute_script(RECTS, ["x", "width", "height"])
    assert len(bars) == 4
    assert bars[1][2] == pytest.approx(2 * bars[0][2], abs=0.3)  # heights start at zero
    assert bars[2][0] >= bars[0][0] + bars[0][1] - 0.2  # side by side
    assert {"x", "y"} <= set(ticks(browser))


def test_stacked_bars_stand_on_each_other(draw: Draw) -> None:
    browser = draw([{"name": n, "kind": "bar", "stacked": True, "points": [["x", 2]]} for n in "ab"], x={"scale": "band"})
    (y0, h0), (y1, h1) = browser.execute_script(RECTS, ["y", "height"])
    assert y1 + h1 == pytest.approx(y0, abs=0.2)
    assert h0 == pytest.approx(h1, abs=0.2)


def test_series_differ_without_colour(draw: Draw) -> None:
    browser = draw([{"name": str(i), "points": [[0, i], [1, i + 1]]} for i in range(8)])
    dashes = browser.execute_script(
        "return [...document.querySelectorAll('.veil-plot .veil-line')].map((p) => p.getAttribute('stroke-dasharray') || '')"
    )
    markers = browser.execute_script(
        "return [...document.querySelectorAll('.veil-legend .veil-marker')].map((p) => p.getAttribute('d'))"
    )
    assert len(set(dashes)) == 8
    assert len(set(markers)) == 8


def test_names_are_text_never_markup(draw: Draw) -> None:
    browser = draw([{"name": "<img src=x>", "points": [[0, 1], [1, 2]]}], marks=[{"x": 0.5, "label": "<b>m</b>"}])
    assert found(browser, "#c img") == 0
    assert found(browser, "#c b") == 0


def test_edge_cases_draw_something(draw: Draw) -> None:
    for series in (
        [],
        [{"name": "a", "points": []}],
        [{"name": "a", "points": [[1, 1]]}],
        [{"name": "a", "points": [[1, "inf"]]}],
    ):
        for scale in ("linear", "log"):
            browser = draw(series, x={"scale": scale}, y={"scale": scale})
            assert "NaN" not in browser.execute_script("return document.querySelector('#c svg[role=img]').outerHTML"), (
                series,
                scale,
            )


def test_numbers_for_people(draw: Draw) -> None:
    browser = draw([])
    shown = browser.execute_script(
        "return [0, 1e-5, 3.14159, 1234.5, 2.5e9, Infinity, -0.00042, 0.0999999].map((v) => veilChart.format(v))"
    )
    assert shown == ["0", "10⁻⁵", "3.14", "1,235", "2.5 × 10⁹", "no bound", "-4.2 × 10⁻⁴", "0.1"]
