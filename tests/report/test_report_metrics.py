"""Reports and plots of runs that measure different things, or clip something else than updates."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedveil as fv
from fedveil.experiment.recorded_run import read_run
from fedveil.report.figures import OVERVIEW, _panel, plot_run
from fedveil.report.report import page_values
from fedveil.report.web_page import web_file

PAGE = """
const { data, parts } = JSON.parse(process.argv[1]);
class Element {
  constructor(tag) { Object.assign(this, { tag, children: [], attributes: {} }); }
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) { this.children = more; }
  setAttribute(name, value) { this.attributes[name] = value; }
  getAttribute(name) { return this.attributes[name] ?? null; }
  removeAttribute(name) { delete this.attributes[name]; }
  addEventListener() {}
  get text() { return this.textContent ?? this.children.map((c) => c.text ?? String(c)).join(" ").trim(); }
  all(test) { return this.children.filter((c) => c.tag).flatMap((c) => [...(test(c) ? [c] : []), ...c.all(test)]); }
}
const ids = {};
globalThis.document = {
  createElement: (tag) => new Element(tag),
  getElementById: (id) => (ids[id] ??= new Element("div")),
  querySelectorAll: () => [],
};
ids.data = { textContent: JSON.stringify(data) };
globalThis.addEventListener = () => {};
globalThis.ResizeObserver = class { observe() {} };
const charts = [];
globalThis.veilChart = (_, drawn) => charts.push([drawn.title, drawn.series.map((s) => s.name)]);
globalThis.veilChart.format = String;
globalThis.veilHeatmap = () => {};
for (const part of parts) require("vm").runInThisContext(part);
const table = ids.report.all((e) => e.attributes.id === "comparison")[0];
const cells = (tag) => table.all((e) => e.tag === tag).map((e) => e.text);
const lines = table.all((e) => e.tag === "tr" && e.children.length > 1).slice(1);
const rows = lines.map((row) => row.children.map((c) => c.text));
console.log(JSON.stringify({ headings: cells("th").slice(0, rows[0].length), rows, charts }));
"""


def drawn(path: Path, **sections: Any) -> Path:
    draw = np.random.default_rng(1)
    y = draw.integers(0, 2, 120)
    x = (draw.normal(size=(120, 4)) + y[:, None]).astype(np.float32)
    data = fv.from_arrays(x, y, client=np.arange(120) % 4, test=(x[:40], y[:40]))
    base: dict[str, Any] = {"model": "linear", "method": "dp-fedavg", "training": {"rounds": 2}}
    privacy = {"epsilon": 8.0, "delta": 1e-2}
    run = {"seeded_noise": True, "engine": "inline"}
    return fv.train(fv.configure(**{**base, "privacy": privacy, "run": run, **sections}), path, data=data).path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    record = {"unit": "record", "epsilon": 8.0, "delta": 1e-3}
    return {
        "classes": drawn(folder / "classes", privacy={"epsilon": 4.0, "delta": 1e-2}),
        "binary": drawn(folder / "binary", task="binary"),
        "dp-sgd": drawn(
            folder / "dp-sgd",
            method="fedavg",
            training={"rounds": 2, "local": "dp-sgd", "example_clip": 0.75, "batch_size": 12},
            privacy=record,
        ),
        "by layer": drawn(
            folder / "layers", method={"name": "ladp-fl"}, privacy={"epsilon": 8.0, "delta": 1e-2, "view": "server"}
        ),
    }


def test_a_page_of_runs_has_a_column_for_each_metric(runs: dict[str, Path]) -> None:
    """All scores stood in one column under the name of the first run's metric."""
    values = page_values([read_run(runs["binary"]), read_run(runs["classes"])])
    at = {tuple(part["groups"]): part["title"] for part in values["metrics"]}
    names = [group["settings"].get("task.name", "classification") for group in values["groups"]]
    assert at == {(names.index("classification"),): "Test accuracy", (names.index("binary"),): "Test area under the ROC curve"}
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js: no node on PATH")
    parts = [web_file("page.js"), web_file("report.js")]
    asked = json.dumps({"data": values, "parts": parts}, default=str)
    page = json.loads(subprocess.run([node, "-e", PAGE, asked], capture_output=True, text=True, check=True).stdout)
    columns = [page["headings"].index(title) for title in ("Test accuracy", "Test area under the ROC curve")]
    for row in page["rows"]:
        own = values["groups"][[group["name"] for group in values["groups"]].index(row[0])]
        here, there = columns if own["main"]["title"] == "Test accuracy" else columns[::-1]
        assert row[here].startswith(own["cards"]["score"]["value"])
        assert row[there] == "–"
    against = {title: names for title, names in page["charts"] if "against proven" in title}
    assert against == {}, "one run of each metric leaves nothing to compare"


def test_runs_of_one_metric_share_a_column(runs: dict[str, Path]) -> None:
    values = page_values([read_run(runs["classes"]), read_run(runs["dp-sgd"])])
    assert [(part["title"], part["groups"]) for part in values["metrics"]] == [("Test accuracy", [0, 1])]


def test_dp_sgd_shows_the_clip_of_examples_and_the_batch(runs: dict[str, Path]) -> None:
    """The page said "Clip norm inf", its chart "no bound", and the plot had an empty panel."""
    run = read_run(runs["dp-sgd"])
    assert {(row["example_clip"], row["expected_batch"]) for row in run.history} == {(0.75, 12.0)}
    assert not {"clip", "layer_clip"} & {*run.columns, *run.layers[0]}
    (group,) = page_values([run])["groups"]
    assert (group["constant"]["example_clip"], group["constant"]["expected_batch"]) == (0.75, 12.0)
    assert group["columns"]["example_clip"]["title"] == "Clip norm of each example's gradient"
    assert "clip" not in group["constant"]
    assert "inf" not in json.dumps([group["constant"], group["curves"], group["layers"]])
    panel = _panel(run, "clip")
    assert panel.title == "Clip norm of each example's gradient"
    assert panel.lines == {panel.title: [(1, 0.75), (2, 0.75)]}
    assert all(_panel(run, name).lines for name in OVERVIEW)
    assert plot_run(runs["dp-sgd"], ["clip"]).stat().st_size > 5000


def test_clips_by_layer_alone_bound_the_whole_update(runs: dict[str, Path]) -> None:
    """Where a plan has a clip for each layer and none for all, the page said "Clip norm inf" as well."""
    run = read_run(runs["by layer"])
    for row in run.history:
        layers = [cells["clip"] for cells in run.layers if cells["round"] == row["round"]]
        assert row["clip"] == pytest.approx(float(np.linalg.norm(layers)), rel=1e-5)
