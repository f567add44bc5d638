// The page: reads the controls into one setting, asks privacy.js and families.js, writes numbers, a sentence and four charts.
"use strict";

(() => {
  const V = globalThis.veilPrivacy;
  const F = globalThis.veilFamilies;
  const W = globalThis.veilWords;
  const { el } = globalThis.veilPage;
  const { format, atMost } = globalThis.veilChart;
  const $ = (id) => document.getElementById(id);

  // [key, group, label, symbol, lowest, highest, start, whole, logarithmic]
  const SLIDERS = [
    ["clients", "federation", "Clients", "N", 2, 1e6, 5000, true, true],
    ["cohort", "federation", "Clients per round", "n", 1, 1e5, 500, true, true],
    ["rounds", "federation", "Rounds", "T", 1, 1e4, 300, true, true],
    ["dim", "federation", "Parameters sent", "d", 1, 1e9, 1e4, true, true],
    ["noise", "noise", "Noise multiplier", "z", 0.1, 1e3, 20, false, true],
    ["clip", "noise", "Clip norm", "C", 1e-3, 1e3, 1, false, true],
    ["delta", "noise", "Delta", "δ", 1e-12, 0.1, 1e-5, false, true],
    ["records", "local", "Records per client", "|D|", 1, 1e6, 500, true, true],
    ["batch", "local", "Batch size", "b", 1, 1e5, 50, true, true],
    ["steps", "local", "Local steps", "K", 1, 1e3, 5, true, true],
    ["lr", "local", "Learning rate", "η", 1e-4, 1, 0.1, false, true],
    ["smooth", "local", "Smoothness (assumed)", "L", 1e-3, 100, 1, false, true],
    ["diameter", "local", "Diameter of the ball", "D", 1e-3, 1e3, 0.05, false, true],
    ["prox", "local", "Proximal pull", "α", 1e-3, 100, 2, false, true],
    ["density", "local", "Share of coordinates", "γ", 0.01, 1, 0.5, false, false],
    ["eta", "local", "Bound parameter", "η′", -0.95, 0.95, 0.5, false, false],
  ].map(([key, group, label, symbol, low, high, start, whole, log]) => ({ key, group, label, symbol, low, high, start, whole, log }));
  const CHOICES = { family: "dp-fedavg", view: "aggregate", scope: "client:zero_out", sampling: "fixed", schedule: "constant", project: "no" };
  const STEPS = 1000;

  const values = {};

  // --- controls ------------------------------------------------------------------------------------------------------------------

  function fromPosition(s, position) {
    const share = position / STEPS;
    const exact = s.log ? s.low * (s.high / s.low) ** share : s.low + (s.high - s.low) * share;
    const rounded = Number(exact.toPrecision(exact >= 100 && s.whole ? 3 : 2));
    return Math.min(s.high, Math.max(s.low, s.whole ? Math.round(rounded) : rounded));
  }
  const toPosition = (s, v) => Math.round(STEPS * (s.log ? Math.log(v / s.low) / Math.log(s.high / s.low) : (v - s.low) / (s.high - s.low)));
  const plain = (v) => (v !== 0 && Math.abs(v) < 1e-3 ? v.toExponential().replace("e-", "e-") : String(v));

  function makeSlider(s) {
    const row = document.createElement("div");
    row.className = "slider";
    row.dataset.for = s.key;
    row.innerHTML = `<label for="n-${s.key}">${s.label}<i>${s.symbol}</i></label><input type="number" id="n-${s.key}" step="any" min="${s.low}" max="${s.high}">
      <input type="range" id="r-${s.key}" min="0" max="${STEPS}" step="1" aria-label="${s.label}">`;
    const group = $(`group-${s.group}`);
    group.insertBefore(row, group.querySelector(".calibrate"));
    $(`r-${s.key}`).addEventListener("input", (event) => set(s, fromPosition(s, Number(event.target.value)), "range"));
    $(`n-${s.key}`).addEventListener("input", (event) => {
      const value = event.target.value.trim() === "" ? NaN : Number(event.target.value);
      const allowed = value >= s.low && value <= s.high && (!s.whole || Number.isInteger(value));
      event.target.setAttribute("aria-invalid", String(!allowed));
      if (allowed) set(s, value, "number");
      else
        say(
          `${s.label} must be ${s.whole ? "a whole number" : "a number"} from ${format(s.low)} to ${format(s.high)}; still using ${format(values[s.key])}.`,
          true,
        );
    });
    $(`n-${s.key}`).addEventListener("blur", () => put(s));
  }

  /** Writes the value of a setting into its two inputs, except the one in use. */
  function put(s, except = "") {
    const [range, number] = [$(`r-${s.key}`), $(`n-${s.key}`)];
    if (except !== "range") range.value = toPosition(s, values[s.key]);
    if (except !== "number") {
      number.value = plain(values[s.key]);
      number.setAttribute("aria-invalid", "false");
    }
    range.style.setProperty("--share", `${toPosition(s, values[s.key]) / (STEPS / 100)}%`);
    range.setAttribute("aria-valuetext", `${s.symbol} = ${format(values[s.key])}`);
  }

  const sliderOf = (key) => SLIDERS.find((s) => s.key === key);
  const PAIRS = [
    ["cohort", "clients", "clients per round", "the number of clients"],
    ["batch", "records", "the batch size", "the records of a client"],
  ];

  function set(s, value, from) {
    values[s.key] = value;
    put(s, from);
    let message = "";
    for (const [small, large, smallName, largeName] of PAIRS) {
      if (values[small] <= values[large]) continue;
      const moved = s.key === small ? large : small;
      values[moved] = s.key === small ? Math.min(values[small], sliderOf(large).high) : values[large];
      if (values[small] > values[large]) values[small] = values[large];
      put(sliderOf(moved));
      message = `Moved ${moved === small ? smallName : largeName} to ${format(values[moved])}: ${smallName} cannot exceed ${largeName}.`;
    }
    say(message);
    render();
  }

  function say(message, error = false) {
    if ($("note").textContent !== message) $("note").textContent = message;
    $("note").classList.toggle("error", error);
  }

  // --- one setting ---------------------------------------------------------------------------------------------------------------

  function setting() {
    const p = { ...values };
    for (const key of ["family", "view", "sampling", "schedule", "project"]) p[key] = $(key).value;
    [p.unit, p.adjacency] = $("scope").value.split(":");
    return p;
  }

  /** Choices that make no sense are not offered: DP-SGD protects records only; a clipped update has no zero-out of one record. */
  function narrow() {
    const chosen = { family: $("family").value };
    const [family, sgd] = [F.familyOf(chosen), F.isSgd(chosen)];
    for (const option of $("scope").options) option.disabled = sgd ? option.value.startsWith("client") : option.value === "record:zero_out";
    if ($("scope").selectedOptions[0].disabled) {
      $("scope").value = sgd ? $("scope").value.replace("client", "record") : "record:replace_one";
      say(`Unit and adjacency changed to "${$("scope").selectedOptions[0].text}", which this family can speak of.`);
    }
    const hidden = sgd ? ["sampling", "clients", "cohort"] : F.isNoisy(chosen) ? ["sampling"] : [];
    if ($("view").value !== "final") hidden.push("project", "diameter");
    else if ($("project").value === "no") hidden.push("diameter");
    const local = ["records", "batch", "steps", "lr", "smooth", "prox", "density", "eta", "schedule", "project", "diameter"];
    for (const row of document.querySelectorAll("[data-for]")) {
      const key = row.dataset.for;
      row.hidden = hidden.includes(key) || (local.includes(key) && !family.uses.includes(key));
    }
    $("group-local").hidden = family.uses.length === 0;
    $("about").textContent = family.about;
    if (family.expert) $("expert").checked = true; // an address may name such a method
    const optional = $("family").querySelector("optgroup");
    optional.hidden = optional.disabled = !$("expert").checked;
  }

  // --- charts --------------------------------------------------------------------------------------------------------------------

  const NOISES = Array.from({ length: 33 }, (_, i) => Number((0.1 * 10 ** (i / 8)).toPrecision(6)));
  const RATES = Array.from({ length: 61 }, (_, i) => (i / 60) ** 2);
  const LOWEST = 1e-5; // log axes start here

  /** The lines over rounds or over noise: `at(kind)` gives epsilon at each x. */
  function epsilonSeries(p, xs, place) {
    const family = F.familyOf(p);
    const line = (name, color, of) => ({ name, color, points: xs.map((x) => [x, of(...place(x))]) });
    const series = [line(family.unbounded ? "proven, repaired" : "proven", 0, (t, z) => F.proven(p, t, p.view, z))];
    if (family.claim && F.sameView(p)) series.push(line("claimed", 1, (t, z) => F.claim(p, t, z).epsilon));
    if (family.unbounded) series.push(line("published form", 3, () => Infinity));
    if (F.isAttained(p)) {
      const some = xs.filter((_, i) => i % Math.ceil(xs.length / 8) === 3 || i === xs.length - 1);
      series.push({ name: "attained by linear losses", color: 2, kind: "scatter", points: some.map((x) => [x, F.attained(p, ...place(x))]) });
    }
    const e = F.event(p, p.view);
    if (e.kind === "sampled") series.push(line("without sampling", 5, (t, z) => V.epsilon(F.plainMu(p, F.event(p, p.view, z), t), p.delta)));
    return series;
  }

  function drawCharts(p, eps, claim, ratio) {
    const { rounds, noise } = p;
    const turns = [...new Set(Array.from({ length: 48 }, (_, i) => Math.round(1 + (rounds - 1) * (i / 47) ** 1.6)))];
    const epsilonAxis = (log) => ({ label: "ε (smaller is more private)", scale: log ? "log" : "linear", ...(log ? {} : { min: 0 }) });
    const clipLow = (series) => series.map((s) => ({ ...s, points: s.points.filter(([, y]) => !(y < LOWEST)) }));
    const log = $("log-epsilon").checked;
    const over = epsilonSeries(p, turns, (t) => [t, noise]);
    veilChart($("chart-rounds"), {
      title: claim ? "Claimed and proven, over rounds" : "Proven, over rounds",
      x: { label: "rounds", min: Math.min(...turns) === rounds ? 0 : 1 },
      y: epsilonAxis(log),
      series: log ? clipLow(over) : over,
    });
    const against = epsilonSeries(p, NOISES, (z) => [rounds, z]);
    veilChart($("chart-noise"), {
      title: "What more noise buys",
      x: { label: "noise multiplier z", scale: "log" },
      y: epsilonAxis(true),
      series: clipLow(against),
      marks: [{ x: noise, label: `z = ${format(noise)}` }],
    });
    const curve = F.provenTradeoff(p, RATES);
    const claimed =
      claim && F.sameView(p) && !Number.isNaN(claim.epsilon)
        ? RATES.map((a) => [a, claim.mu === undefined ? V.tprOfPair(claim.epsilon, claim.delta, a) : V.tpr(claim.mu, a)])
        : null;
    const trade = [{ name: F.familyOf(p).unbounded ? "proven, repaired" : "proven", color: 0, points: RATES.map((a, i) => [a, curve[i]]) }];
    if (claimed) trade.push({ name: "claimed", color: 1, points: claimed });
    trade.push({
      name: "guessing",
      color: 7,
      points: [
        [0, 0],
        [1, 1],
      ],
    });
    veilChart($("chart-tradeoff"), {
      title: "What an attacker can reach",
      x: { label: "false alarms", min: 0, max: 1 },
      y: { label: `${p.unit}s recognised, at most`, min: 0, max: 1 },
      series: trade,
      marks: [{ x: 0.05, label: "5 %" }],
    });
    learnChart(p, ratio);
  }

  function learnChart(p, ratio) {
    const sgd = F.isSgd(p);
    const [most, now] = sgd ? [p.records, p.batch] : [p.clients, p.cohort];
    const sizes = Array.from({ length: 25 }, (_, i) => most ** (i / 24));
    const line = (name, color, view) => ({ name, color, points: sizes.map((n) => [n, F.noiseRatio(p, view, n)]) });
    veilChart($("chart-learn"), {
      title: "Can it learn?",
      x: { label: sgd ? "batch size" : "clients per round", scale: "log" },
      y: { label: "norm of the noise on the mean / clip norm", scale: "log", max: undefined },
      series: sgd ? [line("noise on a step's mean gradient", 4)] : [line("server view", 4, "server"), line("aggregate and final view", 2, "aggregate")],
      marks: [
        { y: 1, label: "1: noise equals the largest signal" },
        { x: now, y: ratio, label: `now ${format(ratio, 2)}` },
      ],
    });
  }

  // --- all of it -----------------------------------------------------------------------------------------------------------------

  function render() {
    const p = setting();
    const eps = F.proven(p);
    const claim = F.claim(p);
    const ratio = F.noiseRatio(p);
    const rate = F.provenTradeoff(p, [0.05])[0];
    W.sentence(p, eps, claim, rate, ratio);
    W.cards(p, eps, claim, ratio);
    W.warning(p);
    W.viewTable(p);
    W.assumptions(p);
    W.captions(p);
    drawCharts(p, eps, claim, ratio);
    remember(p);
  }

  function remember() {
    const entries = [
      ...SLIDERS.filter((s) => values[s.key] !== s.start).map((s) => [s.key, values[s.key]]),
      ...Object.keys(CHOICES)
        .filter((key) => $(key).value !== CHOICES[key])
        .map((key) => [key, $(key).value]),
    ];
    clearTimeout(remember.timer);
    remember.timer = setTimeout(() => history.replaceState(null, "", entries.length ? `#${new URLSearchParams(entries)}` : "#"), 300);
    const shown = [...document.querySelectorAll("#controls select")]
      .filter((s) => !s.parentElement.hidden)
      .map((s) => [s.parentElement.querySelector("span").textContent, s.selectedOptions[0].text]);
    for (const s of SLIDERS) if (!document.querySelector(`.slider[data-for="${s.key}"]`).hidden) shown.push([`${s.label} ${s.symbol}`, format(values[s.key])]);
    $("settings").replaceChildren(...shown.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  }

  function restore() {
    const parameters = new URLSearchParams(location.hash.slice(1));
    for (const s of SLIDERS) {
      const value = Number(parameters.get(s.key) ?? s.start);
      values[s.key] = value >= s.low && value <= s.high && (!s.whole || Number.isInteger(value)) ? value : s.start;
    }
    for (const key of Object.keys(CHOICES)) {
      const allowed = [...$(key).options].some((option) => option.value === parameters.get(key));
      $(key).value = allowed ? parameters.get(key) : CHOICES[key];
    }
    values.cohort = Math.min(values.cohort, values.clients);
    values.batch = Math.min(values.batch, values.records);
    SLIDERS.forEach((s) => put(s));
    narrow();
    render();
  }

  function findNoise() {
    const target = Number($("target").value);
    $("target").setAttribute("aria-invalid", String(!(target > 0)));
    if (!(target > 0)) return say("The proven ε to reach must be a number above 0.", true);
    const p = setting();
    const found = F.calibrate(p, target);
    const s = sliderOf("noise");
    if (found === null) return say(`No noise proves ε = ${format(target)} in this view: ${F.event(p, p.view).reason ?? "the bound is too coarse"}.`, true);
    const rounded = Math.ceil(found * 1000) / 1000;
    if (rounded < s.low || rounded > s.high)
      return say(`ε = ${format(target)} needs z = ${format(found)}, outside the slider (${format(s.low)} to ${format(s.high)}).`, true);
    set(s, rounded, "");
    return say(`z = ${format(rounded, 4)} proves ε = ${atMost(F.proven(setting()), 4)}.`);
  }

  const families = Object.entries(F.FAMILIES);
  for (const [key, family] of families.filter(([, f]) => !f.expert)) $("family").append(new Option(family.title, key));
  const experts = el("optgroup", { label: "For experts" });
  for (const [key, family] of families.filter(([, f]) => f.expert)) experts.append(new Option(family.title, key));
  $("family").append(experts);
  globalThis.veilPage.reachable($("views-scroll"), "Three adversaries");
  $("expert").addEventListener("change", () => {
    if (!$("expert").checked && F.familyOf({ family: $("family").value }).expert) $("family").value = CHOICES.family;
    narrow();
    render();
  });
  SLIDERS.forEach(makeSlider);
  for (const key of Object.keys(CHOICES)) {
    $(key).addEventListener("change", () => {
      say("");
      narrow();
      render();
    });
  }
  $("log-epsilon").addEventListener("change", render);
  $("calibrate").addEventListener("click", findNoise);
  $("print").addEventListener("click", () => window.print());
  $("reset").addEventListener("click", () => {
    history.replaceState(null, "", "#");
    $("expert").checked = false;
    restore();
    say("Back to the starting values.");
  });
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", restore);
  restore();
})();
