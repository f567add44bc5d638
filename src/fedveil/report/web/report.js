// The report page: sections built from the values in #data. Text is always set as text, never as markup.
"use strict";

(() => {
  const { cell, data, el, fold, head, scroll, section, statementList, table, verbatim, verification } = veilPage;
  const groups = data.groups;
  const several = groups.length > 1;
  const range = ({ limits }, series) => (limits ? { min: Math.min(limits[0], ...series.flatMap((s) => s.points.map(([, y]) => y))), max: limits[1] } : {});
  const hidden = new Set();
  const redraws = [];
  const format = veilChart.format;
  const dash = (text) => (text === "-" ? "–" : text);
  const upper = (text) => text[0].toUpperCase() + text.slice(1);
  const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
  const plural = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;
  const facts = (pairs) =>
    el(
      "dl.facts",
      {},
      pairs.map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v))),
    );

  // --- charts ---------------------------------------------------------------------------------------------------------

  /** A chart cell; `series` are {group, ...} of veilChart, and follow the choice of runs. */
  function chart(title, x, y, series, more = {}, note = "") {
    const places = new Set(series.flatMap((s) => s.points.map(([place]) => place)));
    if (places.size < (series.some((s) => s.kind === "line") ? 2 : 1)) return null; // one round is no curve
    const place = el("div");
    const draw = () => veilChart(place, { title, x, y, series: series.filter((s) => !hidden.has(s.group)), ...more });
    redraws.push(draw);
    return el("div.chart-cell", {}, place, note && el("p.scope", {}, note));
  }
  const drawAll = () => redraws.forEach((draw) => draw());

  /** A column's curve; one that never changes is a level line. */
  function curve(group, column) {
    if (group.curves[column]) return group.curves[column];
    const level = group.constant[column];
    if (level === undefined) return { points: [] };
    return {
      points: [
        [1, level],
        [Math.max(...group.rounds), level],
      ],
    };
  }
  function scaled(found, factor) {
    return {
      points: found.points.map(([t, v]) => [t, typeof v === "number" ? factor * v : v]),
      band: found.band?.map(([t, low, high]) => [t, factor * low, factor * high]),
    };
  }
  const logIf = (series) => {
    const values = series.flatMap((s) => s.points.map(([, v]) => v)).filter(Number.isFinite);
    return values.length && Math.min(...values) > 0 && Math.max(...values) > 50 * Math.min(...values) ? { scale: "log" } : { min: Math.min(0, ...values) };
  };

  /** A chart of history's columns, as the page's values describe it; none where nothing in it moves or differs. */
  function columnChart({ title, axis, factor, limits, series }) {
    const level = new Set(
      series.map(({ group, column }) => (groups[group].curves[column] ? "moves" : (groups[group].constant[column] ?? null))).filter((v) => v !== null),
    );
    if (!level.has("moves") && level.size < 2) return null;
    const drawn = series
      .map(({ group, column, name }, k) => ({
        group,
        name,
        kind: "line",
        color: several ? group : k,
        dashed: several ? false : undefined,
        ...scaled(curve(groups[group], column), factor),
      }))
      .filter((s) => s.points.length);
    const seeds = groups.map((g) => g.seeds.length).filter((n) => n > 1);
    const n = [...new Set([Math.min(...seeds), Math.max(...seeds)])].join(" to ");
    const spread = drawn.some((s) => s.band) ? `Mean over seeds; the band is its 95 % confidence interval in each round (Student's t, n = ${n} seeds).` : "";
    return chart(title, { label: "round", whole: true }, { label: axis, ...(limits ? range({ limits }, drawn) : logIf(drawn)) }, drawn, {}, spread);
  }
  const columnCharts = (list) => {
    const drawn = list.map(columnChart).filter(Boolean);
    return drawn.length && el("div.charts", {}, drawn);
  };

  // --- the result -----------------------------------------------------------------------------------------------------

  const rich = (pieces) => pieces.map(([text, bold]) => (bold ? el("b", {}, text) : text));

  function card([kind, { title, value, lines }]) {
    return el(
      `article.card.${kind}`,
      {},
      el("h3", {}, title),
      el(`p.value${value.length > 8 ? ".long" : ""}`, {}, value),
      lines.map((line) => el("p.scope", {}, line)),
    );
  }

  function warnings(g) {
    const unfinished = g.ended
      .filter((why) => why !== "after its last round")
      .map((why) => (why === "unfinished" ? `The run has not finished: ${Math.max(...g.rounds)} of ${g.planned} rounds.` : `Ended early: ${why}`));
    return [...(g.statement?.warnings ?? []), ...g.warnings, ...(g.statement?.contradictions ?? []), ...unfinished];
  }

  /** Every warning once, with the runs that it is about where it is not about all of them. */
  function allWarnings() {
    const about = new Map();
    for (const g of groups) for (const text of warnings(g)) about.set(text, [...(about.get(text) ?? []), g.name]);
    return [...about].map(([text, names]) => el("p.warning", {}, names.length < groups.length ? `${names.join("; ")}: ${text}` : text));
  }

  // --- a section of the statement -------------------------------------------------------------------------------------

  function statementTable({ headings, rows, own }) {
    const inside = ({ text, badge, note, strong }) => [
      strong ? el("b", {}, text) : dash(text),
      badge && el("span.mark", {}, ` ${badge}`),
      note && el("small", {}, note),
    ];
    const line = ([first, ...others], i) =>
      el(
        i === own ? "tr.own" : "tr",
        {},
        el("th", { scope: "row" }, inside(first), i === own ? el("small", {}, " promised") : ""),
        others.map((each, k) => cell(upper(headings[k + 1]), inside(each))),
      );
    return table(headings.map(upper), rows.map(line));
  }

  const about = (paragraphs) => paragraphs.map((text) => el("p.about", {}, text));
  const folded = (part) => part && fold(`${part.title} (${part.items.length})`, statementList(part.items));

  // --- several runs ---------------------------------------------------------------------------------------------------

  function chooser() {
    const boxes = groups.map((g, i) => {
      const box = el("input", { type: "checkbox", checked: true, "data-group": i });
      box.addEventListener("change", () => {
        if (box.checked) hidden.delete(i);
        else hidden.add(i);
        drawAll();
      });
      return el("label", {}, box, el(`span.swatch.veil-c${i % 8}`), g.name);
    });
    return el("fieldset.runs", {}, el("legend", {}, "Shown in all charts"), boxes);
  }

  const order = (value) => (typeof value === "number" ? value : Infinity);
  const ofCard = (kind) => {
    const of = (g) => g.cards[kind] ?? { value: "–", order: null, lines: [] };
    return [
      groups.map((g) => g.cards[kind]?.title).find(Boolean),
      (g) => order(of(g).order),
      (g) => [el("b", {}, of(g).value), of(g).order === null ? "" : el("small", {}, of(g).lines[0])],
    ];
  };
  /** The column of one metric: of runs with another one it says nothing. */
  const scores = (score) => {
    const [, key, show] = ofCard("score");
    return [score.title, (g, i) => (score.groups.includes(i) ? key(g) : Infinity), (g, i) => (score.groups.includes(i) ? show(g) : ["–"])];
  };
  const COMPARED = [
    ["Run", (g) => g.name, (g, i) => [el(`span.swatch.veil-c${i % 8}`), g.name]],
    ofCard("proven"),
    ...data.metrics.map(scores),
    ofCard("attack"),
    ofCard("claimed"),
    ofCard("audited"),
    ["Rounds", (g) => Math.max(...g.rounds), (g) => [String(Math.max(...g.rounds))]],
    ["Time", (g) => g.seconds, (g) => [g.seconds === null ? "–" : `${format(g.seconds)} s`]],
  ].filter(([title]) => title);

  function comparison() {
    const bodies = data.promises.map(() => el("tbody"));
    const heads = COMPARED.map(([name], k) => {
      const button = el("button.sort", { type: "button" }, name);
      const th = el("th", { scope: "col" }, button);
      button.addEventListener("click", () => sort(k, th.getAttribute("aria-sort") === "ascending" ? -1 : 1));
      return th;
    });
    const sort = (k, sign) => {
      const keys = groups.map(COMPARED[k][1]);
      const less = (a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b);
      heads.forEach((th, i) => (i === k ? th.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending") : th.removeAttribute("aria-sort")));
      data.promises.forEach(({ promise, groups: members }, place) => {
        const title = el("tr.promise", {}, el("th", { scope: "rowgroup", colspan: COMPARED.length }, upper(promise)));
        const line = (i) =>
          el(
            "tr",
            {},
            COMPARED.map(([name, , show], c) => (c ? cell(name, show(groups[i], i)) : el("th", { scope: "row" }, show(groups[i], i)))),
          );
        const rows = [...members].sort((a, b) => sign * less(a, b)).map(line);
        bodies[place].replaceChildren(...(data.promises.length > 1 ? [title] : []), ...rows);
      });
    };
    sort(1, 1);
    return scroll("Runs compared", el("table", { id: "comparison" }, el("thead", {}, el("tr", {}, heads)), bodies));
  }

  /** A score over epsilon, among the runs of one promise: another promise's epsilon is another scale. */
  function scoreAgainstEpsilon(score, { promise, groups: members }) {
    const among = members.filter((i) => score.groups.includes(i));
    const series = among
      .filter((i) => groups[i].proven_value !== null && groups[i].score !== null)
      .map((i) => ({ group: i, color: i, name: groups[i].name, kind: "scatter", points: [[groups[i].proven_value, groups[i].score]] }));
    if (new Set(series.map((s) => s.points[0][0])).size < 2) return null;
    const left = among.length - series.length;
    const note = `All at ${promise}.${left ? ` ${plural(left, "run")} without a proven bound ${left === 1 ? "is" : "are"} not drawn.` : ""}`;
    const at = series.map((s) => s.points[0][0]);
    const axis = Math.max(...at) > 20 * Math.min(...at) ? { scale: "log", snap: true } : { min: 0, max: 1.05 * Math.max(...at) };
    return chart(`${score.title} against proven ε`, { label: "proven ε", ...axis }, { label: score.axis, ...range(score, series) }, series, {}, note);
  }

  function result() {
    if (!several)
      return section(
        "result",
        "Result",
        el("p.sentence", {}, rich(groups[0].sentence)),
        verification(data.verification),
        el("div.cards", {}, Object.entries(groups[0].cards).map(card)),
        allWarnings(),
      );
    const scopes =
      data.promises.length === 1
        ? `Every ε at ${data.promises[0].promise}, unless a cell says otherwise.`
        : "These runs promise different things. Those with the same promise stand together: only their ε can be compared.";
    return section(
      "result",
      "Comparison",
      el("p.about", {}, `${plural(data.runs, "run")}; those that differ in their seed only are one line. ${scopes}`),
      verification(data.verification),
      comparison(),
      chooser(),
      allWarnings(),
    );
  }

  // --- training -------------------------------------------------------------------------------------------------------

  function training() {
    section("training", "Training", columnCharts(data.charts.training), data.charts.private && el("p.about", {}, data.charts.private));
  }

  function methodColumns() {
    section("noise", "Noise and clip by layer", each(layerCharts));
    section("method", "What the method adapts", columnCharts(data.charts.method));
    section("cost", "Cost", columnCharts(data.charts.cost), several ? null : constants(groups[0]));
  }

  function constants(g) {
    const entries = Object.entries(g.constant).filter(([, v]) => v !== null);
    if (!entries.length) return null;
    const shown = ({ share, factor, axis }, v) => (share ? percent(v) : factor === 1 ? format(v) : `${format(factor * v)} ${axis}`);
    return [el("h3", {}, "Figures that do not change"), facts(entries.map(([k, v]) => [g.columns[k].title, shown(g.columns[k], v)]))];
  }

  /** Charts of the columns that change, and the figures of those that do not. */
  function layerCharts(g) {
    const [charts, level] = [[], []];
    for (const [column, layers] of Object.entries(g.layers)) {
      const { title, axis, factor } = g.layer_columns[column];
      const series = layers.map((layer) => ({ name: layer.name, kind: "line", ...scaled(layer, factor) }));
      const moves = series.some(({ points }) => points.some(([, v]) => Math.abs(v - points[0][1]) > 1e-6 * Math.abs(points[0][1])));
      const note = g.seeds.length > 1 ? `Of seed ${g.seeds[0]}.` : "";
      if (moves) charts.push(chart(title, { label: "round", whole: true }, { label: axis, ...logIf(series) }, series, {}, note));
      else level.push(...series.filter(({ points }) => points.length).map(({ name, points }) => [`${title}, ${name}`, format(points[0][1])]));
    }
    const drawn = charts.filter(Boolean);
    return [drawn.length && el("div.charts", {}, drawn), level.length && facts(level)].filter(Boolean);
  }

  // --- privacy --------------------------------------------------------------------------------------------------------

  /** What the runs of one promise spent over the rounds. */
  function spentChart({ promise, groups: members }) {
    const from = (points) => (points.length ? [[0, points[0][1] === "inf" ? "inf" : 0], ...points] : []);
    const series = members.flatMap((i) => {
      const g = groups[i];
      if (!g.spent) return [];
      const line = { group: i, kind: "line" };
      if (several) return [{ ...line, color: i, name: g.name, points: from(g.spent.most), dashed: false }];
      const most = { ...line, color: 0, name: g.spent.each ? "client that spent most" : "spent", points: from(g.spent.most) };
      return g.spent.each ? [most, { ...line, color: 1, name: "median client", points: from(g.spent.median), dashed: true }] : [most];
    });
    const target = !several && groups[0].spent?.target ? [groups[0].spent.target] : [];
    const top = target.length ? 1.15 * Math.max(target[0].y, ...series.flatMap((s) => s.points.map(([, v]) => v)).filter((v) => v !== "inf")) : undefined;
    const whose = several ? "Of the seed, and where clients spend by themselves of the client, that spent most." : (groups[0].spent?.differ ?? "");
    return chart(
      "Privacy spent over the rounds",
      { label: "round", whole: true, min: 0 },
      { label: "proven ε spent", min: 0, max: top },
      series,
      { marks: target },
      `Computed from the ledger's rows, at ${promise}. ${whose}`,
    );
  }

  function spending() {
    const lacking = (g) => (g.spent ? [...(g.spent.problem && !g.spent.most.length ? [g.spent.problem] : []), ...g.spent.unknown] : []);
    const problems = groups.flatMap((g) => lacking(g).map((text) => el("p.warning", {}, `${several ? `${g.name}: ` : ""}${text}`)));
    const words = several ? null : groups[0].statement && el("div.chart-cell", {}, inWords(groups[0].statement.sections));
    const against = several ? data.promises.flatMap((one) => data.metrics.map((score) => scoreAgainstEpsilon(score, one))) : [];
    const parts = [...data.promises.map(spentChart), ...against, words].filter(Boolean);
    return [parts.length ? el("div.charts", {}, parts) : null, problems];
  }

  const inWords = ({ words, learn }) =>
    [el("h3.plain", {}, words.title), el("p.words", {}, words.paragraphs), learn && [el("h3", {}, learn.title), el("p.about", {}, learn.paragraphs[0])]]
      .flat()
      .filter(Boolean);

  function statement(g) {
    if (!g.statement) return [];
    const { numbers, groups: caps, words, learn, assumptions, not_protected: open, notes } = g.statement.sections;
    return [
      about(numbers.paragraphs),
      statementTable(numbers.table),
      caps ? [about(caps.paragraphs), statementTable(caps.table)] : [],
      several ? inWords({ words, learn }) : [],
      facts([...Object.entries(g.statement.facts).map(([k, v]) => [upper(k), v]), ["Releases in the ledger", String(g.spent?.releases ?? 0)]]),
      el("div.two", {}, folded(assumptions), folded(open)),
      folded(notes),
    ].flat();
  }

  /** The same part for each run: plain for one, foldable and marked with its colour for several. */
  const each = (make, open = false) =>
    groups.flatMap((g, i) => {
      const parts = [make(g)].flat(3).filter(Boolean);
      if (!parts.length) return [];
      return several
        ? [el("details", { open }, el("summary", {}, el(`span.swatch.veil-c${i % 8}`), g.name), el(`div.group.veil-c${i % 8}`, {}, parts))]
        : parts;
    });

  // --- clients, data, attacks -----------------------------------------------------------------------------------------

  function fairness() {
    const parts = data.metrics.flatMap(fairnessBy);
    if (parts.length) section("clients", "Fairness among clients", parts);
  }

  function fairnessBy(score) {
    const held = score.groups.map((i) => [groups[i], i]).filter(([g]) => g.clients);
    if (!held.length) return [];
    const clientScore = score.phrase.replace(/^test /, "");
    const over = held.map(([g, i]) => ({
      group: i,
      color: i,
      name: several ? g.name : "median client",
      kind: "line",
      dashed: several ? false : undefined,
      ...(several ? { points: g.clients.worst } : { points: g.clients.points, band: g.clients.band }),
    }));
    const title = several ? "The score that nine tenths of the clients reach" : "Scores of the clients over the rounds";
    const charts = [
      chart(
        title,
        { label: "round", whole: true },
        { label: score.axis, ...range(score, over) },
        over,
        {},
        several ? "" : "Median client; the band goes from the worst tenth to the best tenth.",
      ),
    ];
    const shares = (values) =>
      values.map((v, k) => [v, (100 * (k + 1)) / values.length]).filter((_, k, all) => k === all.length - 1 || k % Math.ceil(all.length / 200) === 0);
    if (several || held[0][0].clients.final.length < 8) {
      const lines = held.map(([g, i]) => ({
        group: i,
        color: i,
        name: several ? g.name : "global model",
        points: shares(g.clients.final),
        kind: "line",
        dashed: several ? false : undefined,
      }));
      charts.push(
        chart(
          "Clients below a score",
          { label: `${score.axis}, on the client's own test examples` },
          { label: "share of clients (%)", min: 0, max: 100 },
          lines,
          {},
          `Last evaluated round. Steeper is fairer, further ${score.lower ? "left" : "right"} is better.`,
        ),
      );
    } else {
      const c = held[0][0].clients;
      const all = [...c.final, ...c.personal];
      const [from, to] = score.limits ? [Math.min(score.limits[0], ...all), score.limits[1]] : [Math.min(...all), Math.max(...all)];
      const bin = (v) => Math.min(19, Math.floor((20 * (v - from)) / (to - from || 1) + 1e-9));
      const bins = (values) => Array.from({ length: 20 }, (_, b) => [format(from + (b * (to - from)) / 20), values.filter((v) => bin(v) === b).length]);
      const bars = [
        { group: 0, name: "global model", kind: "bar", points: bins(c.final) },
        ...(c.personal.length ? [{ group: 0, name: "personal model", kind: "bar", points: bins(c.personal) }] : []),
      ];
      charts.push(
        chart(
          "Clients by score",
          { label: `${clientScore} from …${score.share ? " (%)" : ""}`, scale: "band" },
          { label: "number of clients" },
          bars,
          {},
          "Last evaluated round, each client on its own test examples.",
        ),
      );
    }
    const rows = held.map(([g, i]) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, several ? el(`span.swatch.veil-c${i % 8}`) : "", g.name),
        ["Worst tenth", "Median", "Best tenth", "Standard deviation"].map((name, k) => cell(name, g.clients.spread[k])),
      ),
    );
    const first = data.metrics.length > 1 ? `${upper(clientScore)} in the last evaluated round` : "Score in the last evaluated round";
    return [el("div.charts", {}, charts.filter(Boolean)), table([first, "Worst tenth", "Median", "Best tenth", "Standard deviation"], rows)];
  }

  function partition(g) {
    const p = g.partition;
    if (!p) return [];
    const place = el("div");
    const { min, median, max } = p.sizes;
    const summary = `${plural(p.clients, "client")} (${p.kind}) with ${min === max ? min : `${min} to ${max}`} training examples, median ${format(median)}.${p.listed < p.clients ? ` ${p.listed} of them, evenly spaced, are drawn.` : ""} The darkest cell stands for ${format(Math.max(...p.columns.flat()))} examples.`;
    const x = p.ordered ? `clients, ordered by their most frequent label${p.columns.length < p.listed ? " (neighbours averaged)" : ""}` : "clients";
    queueMicrotask(() => veilHeatmap(place, { title: "Who holds which labels", x, y: "label", columns: p.columns, names: p.names }));
    return [el("p.about", {}, summary), el("div.chart-cell", {}, place)];
  }

  function attacks(g) {
    if (!g.attacks.length) return [];
    const show = (a) =>
      el(
        "figure",
        {},
        el("h3", {}, `Attack ${a.name}`),
        a.picture
          ? el("img", { src: a.picture, alt: `Attack ${a.name}: originals on top, what the attacker made of them below; the figures follow as text` })
          : null,
        a.too_large ? el("p.about", {}, `${a.too_large} is too large to be shown here.`) : null,
        a.figures ? facts(a.figures) : null,
        a.assumptions?.length
          ? el(
              "figcaption",
              {},
              el(
                "ul.list",
                {},
                a.assumptions.map((text) => el("li", {}, text)),
              ),
            )
          : null,
      );
    return [el("div.pictures", {}, g.attacks.map(show))];
  }

  function failures(g) {
    const f = g.failures;
    if (!f.total && !f.skipped.length) return [];
    const rows = f.reasons.map((r) =>
      el("tr", {}, el("th", { scope: "row" }, r.reason), cell("Updates", String(r.count)), cell("Rounds", r.rounds.join(", ") + (r.more ? ", …" : ""))),
    );
    return [
      f.total ? [el("p.about", {}, `${plural(f.total, "client update")} left out.`), table(["Reason", "Updates", "Rounds"], rows)] : null,
      f.skipped.length
        ? el(
            "ul.list",
            {},
            f.skipped.map((text) => el("li", {}, `Nothing released in ${text}`)),
          )
        : null,
    ].flat();
  }

  // --- how to repeat it -----------------------------------------------------------------------------------------------

  function repeat(g) {
    const noise = g.seeded
      ? "Noise was taken from the seed: the same version on the same machine gives the same figures, and no privacy."
      : "Noise is secret and new in every run: expect figures of the same size, not the same figures.";
    const supplied = g.handed_over
      ? "A program handed data or partition over, and the configuration alone does not make them: hand them over again in Python, as in fv.train(config, data=..., partition=...)."
      : "";
    const link = el(
      "a.download",
      { href: `data:text/plain;charset=utf-8,${encodeURIComponent(g.configuration)}`, download: "config.toml" },
      "Save config.toml",
    );
    const versions = facts(Object.entries(g.versions));
    return [
      g.commands.length ? el("pre.command", {}, g.commands.join("\n")) : null,
      el("p.about", {}, `Seed ${g.seeds.join(", ")}. ${noise} ${supplied}`),
      fold("Configuration", verbatim("Configuration of the run", g.configuration), el("p", {}, link)),
      fold("Versions", versions),
    ];
  }

  function differences() {
    const keys = [...new Set(groups.flatMap((g) => Object.keys(g.settings)))].filter((k) => new Set(groups.map((g) => JSON.stringify(g.settings[k]))).size > 1);
    if (!keys.length) return null;
    const rows = groups.map((g, i) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, el(`span.swatch.veil-c${i % 8}`), g.name),
        keys.map((k) => cell(k, g.settings[k] === undefined ? "–" : typeof g.settings[k] === "object" ? JSON.stringify(g.settings[k]) : String(g.settings[k]))),
      ),
    );
    return [el("h3", {}, "What differs"), table(["Run", ...keys], rows)];
  }

  const configurations = plural(groups.length, "configuration");
  if (several)
    head(
      "Runs compared",
      `${plural(data.runs, "run")} of ${configurations} on ${[...new Set(groups.map((g) => g.data))].join(", ")}.`,
      `fedveil report: ${configurations}`,
    );
  else {
    const [g] = groups;
    head(
      `${g.name}${g.statement ? ` (${g.statement.variant})` : ""} on ${g.data}`,
      "A federated training run: what it learned, what its privacy is worth, and how to repeat it.",
      `fedveil report: ${g.name} on ${g.data}`,
    );
  }
  result();
  training();
  section("privacy", "Privacy", spending(), each(statement), fold("Glossary: what the words mean", facts(Object.entries(data.glossary))));
  methodColumns();
  fairness();
  const partitions = new Set(groups.map((g) => g.partition?.sha256));
  section("data", "Data", partitions.size === 1 ? partition(groups[0]) : each(partition));
  section("attacks", "Attacks", each(attacks, true));
  section("failures", "Left out", each(failures, true));
  section("repeat", "How to repeat it", several && differences(), each(repeat));
  drawAll();
})();
