// The comparison page: what the values in #data say, drawn with the parts of page.js.
"use strict";

(() => {
  const { data, el, fold, head, list, section, statementList, table, verbatim, verification } = veilPage;

  /** A cell of a table: its text and its small print. The column of the methods names the rows; numbers do not wrap. */
  function place(column, [text, small]) {
    const parts = [text, small && el("small", {}, small)];
    if (column === "Method") return el("th", { scope: "row" }, parts);
    return el(small ? "td" : "td.number", { "data-label": column }, parts);
  }

  function block({ title, rows }, index) {
    const lines = rows.map(({ best, cells }) =>
      el(
        best ? "tr.own" : "tr",
        {},
        cells.map((found, i) => place(data.columns[i], found)),
      ),
    );
    return [el("h3", { id: `table-${index}` }, title), table(data.columns, lines, { "aria-labelledby": `table-${index}` })];
  }

  /** Numbers keep their signs on the same line. */
  const joined = (sign) => sign.replaceAll(" ", "\u00a0");

  head(data.title, data.lead);
  const charts = data.charts.map((spec, i) => el("div", { id: `chart-${i}` }));
  const cells = charts.map((chart) => el("div.chart-cell", {}, chart, el("p.scope", {}, data.note)));
  section(
    "result",
    "Result",
    data.results.map(({ verdict, differences }) => [
      el("p.sentence", {}, verdict.replace(/ (±|%|=) ?/g, joined)),
      differences && el("p.differences", {}, differences.replace(/ (%|points\b|to\b) ?/g, joined)),
    ]),
    verification(data.verification),
    cells.length && el(cells.length > 1 ? "div.charts" : "div.charts.one", {}, cells),
  );
  section("tables", "Tables", data.tables.map(block));
  section("not-compared", "Not compared", list(data.problems));
  section(
    "how-to-read-it",
    "How to read it",
    data.reading.map((text) => el("p.words", {}, text)),
  );
  const rests = data.assumptions;
  section("what-it-rests-on", rests.title, rests.items.length && statementList(rests.items));
  section(
    "how-to-repeat-it",
    "How to repeat it",
    el("pre.command", {}, data.command),
    data.runs && el("p", {}, el("a", { href: data.runs }, "Every run: curves, privacy, settings")),
    fold("What all methods share", verbatim("Configuration that all methods share", data.configuration)),
  );
  charts.forEach((chart, i) => veilChart(chart, data.charts[i]));
})();
