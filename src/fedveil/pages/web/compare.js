// The comparison page: what the values in #data say, drawn with the parts of page.js.
"use strict";

(() => {
  const { cell, data, el, fold, head, list, section, table } = veilPage;

  /** A cell's text and its small print. */
  const parts = ([text, small]) => [text, small && el("small", {}, small)];

  function block({ title, rows }, index) {
    const lines = rows.map(({ best, cells }) =>
      el(best ? "tr.own" : "tr", {}, cells.map((found, i) => (data.columns[i] === "Method" ? el("th", { scope: "row" }, parts(found)) : cell(data.columns[i], parts(found))))),
    );
    return [el("h3", { id: `table-${index}` }, title), table(data.columns, lines, { "aria-labelledby": `table-${index}` })];
  }

  head(data.title, data.lead);
  const places = data.charts.map((spec, i) => el("div", { id: `chart-${i}` }));
  const cells = places.map((place) => el("div.chart-cell", {}, place, el("p.scope", {}, data.note)));
  section("result", "Result", data.headlines.map((text) => el("p.sentence", {}, text)), cells.length && el(cells.length > 1 ? "div.charts" : "div.charts.one", {}, cells));
  section("tables", "Tables", data.tables.map(block));
  section("not-compared", "Not compared", list(data.problems));
  section("how-to-read-it", "How to read it", data.reading.map((text) => el("p.words", {}, text)));
  section("how-to-repeat-it", "How to repeat it", el("pre.command", {}, data.command),
    data.runs && el("p", {}, el("a", { href: data.runs }, "Every run: curves, privacy, settings")), fold("What all methods share", el("pre", {}, data.configuration)));
  places.forEach((place, i) => veilChart(place, data.charts[i]));
})();
