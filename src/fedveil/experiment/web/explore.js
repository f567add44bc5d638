// The page: reads the controls into one setting, asks privacy.js and families.js, writes numbers, a sentence and four charts.
"use strict";

(() => {
  const V = globalThis.veilPrivacy;
  const F = globalThis.veilFamilies;
  const format = globalThis.veilChart.format;
  const $ = (id) => document.getElementById(id);
  const percent = (x) => (x > 0.9995 ? "100 %" : `${Number((100 * x).toPrecision(x < 0.1 ? 2 : 3))} %`);

  // [key, group, label, symbol, lowest, highest, start, whole, logarithmic]
  const SLIDERS = [
    ["clients", "federation", "Clients", "N", 2, 1e6, 5000, true, true],
    ["cohort", "federation", "Clients a round", "n", 1, 1e5, 500, true, true],
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
  const CHOICES = { family: "noisy-fedavg", view: "aggregate", scope: "client:replace_one", sampling: "fixed", schedule: "constant", project: "no" };
  const STEPS = 1000;
  const SEES = { server: "each upload", aggregate: "each round's sum", final: "the last model only" };

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
      const given = event.target.value.trim() === "" ? NaN : Number(event.target.value);
      const allowed = given >= s.low && given <= s.high && (!s.whole || Number.isInteger(given));
      event.target.setAttribute("aria-invalid", String(!allowed));
      if (allowed) set(s, given, "number");
      else say(`${s.label} must be ${s.whole ? "a whole number" : "a number"} from ${format(s.low)} to ${format(s.high)}; still using ${format(values[s.key])}.`, true);
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
  const PAIRS = [["cohort", "clients", "clients a round", "the number of clients"], ["batch", "records", "the batch size", "the records of a client"]];

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
    const sgd = $("family").value === "silo-dp-sgd";
    for (const option of $("scope").options) option.disabled = sgd ? option.value.startsWith("client") : option.value === "record:zero_out";
    if ($("scope").selectedOptions[0].disabled) {
      $("scope").value = sgd ? $("scope").value.replace("client", "record") : "record:replace_one";
      say(`Unit and adjacency changed to "${$("scope").selectedOptions[0].text}", which this family can speak of.`);
    }
    const family = F.FAMILIES[$("family").value];
    const noisy = F.isNoisy({ family: $("family").value });
    const hidden = sgd ? ["sampling", "clients", "cohort"] : noisy ? ["sampling"] : [];
    if ($("view").value !== "final") hidden.push("project", "diameter");
    else if ($("project").value === "no") hidden.push("diameter");
    const local = ["records", "batch", "steps", "lr", "smooth", "prox", "density", "eta", "schedule", "project", "diameter"];
    for (const row of document.querySelectorAll("[data-for]")) {
      const key = row.dataset.for;
      row.hidden = hidden.includes(key) || (local.includes(key) && !family.extra.includes(key));
    }
    $("group-local").hidden = family.extra.length === 0;
    $("about").textContent = family.about;
  }

  const scopeText = (p, view = p.view) => `${p.unit} level, ${p.adjacency.replace("_", "-")}, ${view} view, δ\u00a0=\u00a0${format(p.delta)}`;

  // --- words ---------------------------------------------------------------------------------------------------------------------

  function accountant(p) {
    const e = F.event(p, p.view);
    if (e.kind === "none") return "";
    if (F.isProjected(p) && !F.isStage(p)) return "shifted interpolation on a ball, an upper bound";
    return e.kind === "gaussian" ? "exact Gaussian curve" : "Rényi accounting at whole orders, an upper bound";
  }

  function becauseOf(p, view) {
    const e = F.event(p, view);
    if (e.kind === "none") return e.reason;
    const times = `${format(p.rounds * (e.perRound ?? 1))} ${F.isSgd(p) ? "local steps" : "rounds"}`;
    if (e.kind === "sampled") return `${times}, Poisson rate ${format(e.rate)}, noise ${format(e.multiplier)} × sensitivity`;
    if (view === "final" && F.isProjected(p) && !F.isStage(p)) return `μ = ${format(F.projectedMu(p, p.rounds))} for the last projected model; composition gives ${format(F.plainMu(p, e, p.rounds))}`;
    return `μ = ${format(F.plainMu(p, e, p.rounds))} over ${times}${view === "final" ? "; hiding the earlier models adds no proof here" : ""}`;
  }

  function verdict(ratio, rounds) {
    if (ratio <= 1) return ["there is room to learn", "The noise is smaller than the largest signal a round can carry."];
    if (ratio <= Math.sqrt(rounds)) return ["slow at best", `A round is mostly noise; at best ${format(rounds)} rounds that agree shrink it to ${format(ratio / Math.sqrt(rounds))} × the signal.`];
    return ["no room to learn", `Even ${format(rounds)} rounds in perfect agreement stay below the noise.`];
  }

  const bold = (text) => Object.assign(document.createElement("b"), { textContent: text });

  function sentence(p, eps, claim, rate, ratio) {
    const parts = [];
    const whom = p.unit === "client" ? "a client" : "a record";
    if (eps === Infinity) parts.push("Of this configuration ", bold("nothing can be proven"), `: ${F.event(p, p.view).reason ?? "the bound is infinite"}. `);
    else {
      parts.push(`After ${format(p.rounds)} rounds, someone who sees ${SEES[p.view]} and accepts 5 % false alarms recognises ${whom} at most `);
      parts.push(bold(percent(rate)), " of the time (guessing: 5 %); proven ", bold(`ε = ${format(eps)}`), ". ");
    }
    const repaired = F.FAMILIES[p.family].published ? "That holds for the repaired variant; the published form has no bound. " : "";
    if (eps !== Infinity) parts.push(repaired);
    if (claim && Number.isFinite(claim.epsilon)) {
      const times = eps / claim.epsilon;
      const claimed = `The paper's claim of ε = ${format(claim.epsilon)}`;
      if (eps === Infinity) parts.push(`${claimed} speaks of something else. `);
      else if (times > 1.05) parts.push(`${claimed} is ${format(times, 2)} times smaller. `);
      else if (times < 0.95) parts.push(`${claimed} is ${format(1 / times, 2)} times larger, and is no bound on the published form. `);
      else parts.push(`${claimed} agrees. `);
    }
    const unit = F.isSgd(p) ? "the mean gradient of a step" : "the mean update";
    parts.push(`The noise on ${unit} is `, bold(`${format(ratio, 2)} × the clip norm`), `: ${verdict(ratio, p.rounds * (F.isSgd(p) ? p.steps : 1))[0]}.`);
    $("sentence").replaceChildren(...parts);
  }

  function cards(p, eps, claim, ratio) {
    const family = F.FAMILIES[p.family];
    const number = (value) => (value === Infinity ? "no bound" : Number.isNaN(value) ? "–" : `ε = ${format(value)}`);
    $("claimed").textContent = claim ? number(claim.epsilon) : "no claim";
    $("claimed").dataset.value = claim ? claim.epsilon : "";
    $("claimed-scope").textContent = claim
      ? claim.why ?? `${family.source}. Scope: ${family.claimScope(p)}; δ\u00a0=\u00a0${format(p.delta)}.`
      : "The method's own accounting is the proof; there is no separate claim.";
    $("proven-title").textContent = family.published ? "Proven, repaired variant" : "Proven";
    $("proven").textContent = number(eps);
    $("proven").dataset.value = eps;
    const why = eps === Infinity ? ` No bound: ${F.event(p, p.view).reason}.` : ` ${accountant(p)}.`;
    $("proven-scope").textContent = `${scopeText(p)};${why}`;
    $("ratio").replaceChildren(`${format(ratio, 2)} ×`, Object.assign(document.createElement("small"), { textContent: " clip norm" }));
    $("ratio").dataset.value = ratio;
    for (const id of ["claimed", "proven", "ratio"]) $(id).classList.toggle("long", $(id).textContent.length > 18 || (id !== "ratio" && $(id).textContent.length > 10));
    const remedy = F.remedy(p);
    const what = F.isSgd(p) ? "a batch of" : "";
    const who = F.isSgd(p) ? "" : " clients a round";
    const steps = p.rounds * (F.isSgd(p) ? p.steps : 1);
    const way = remedy.dim >= 2 ? `, or at most ${format(remedy.dim)} parameters` : "";
    $("ratio-scope").textContent = `${verdict(ratio, steps)[1]} ${ratio > 1 ? `Equal at ${what} ${format(remedy.cohort)}${who}${way}, with the same z.` : ""}`.replace(/ +/g, " ");
    const row = (name, value) => {
      const label = Object.assign(document.createElement("span"), { textContent: `${name} ` });
      const cell = document.createElement("div");
      cell.append(label, bold(value));
      return cell;
    };
    $("strip").replaceChildren(
      row("claimed", claim ? number(claim.epsilon).replace("ε = ", "") : "–"), row("proven", number(eps).replace("ε = ", "")), row("noise", `${format(ratio, 2)} ×`),
    );
  }

  function warning(p) {
    const family = F.FAMILIES[p.family];
    const units = p.unit === "client" ? p.clients : F.isSgd(p) ? p.records : p.clients;
    const lines = [];
    if (p.delta >= 1 / units) lines.push(["Delta is too large.", `δ = ${format(p.delta)} is at least 1 / ${format(units)}: publishing one ${p.unit === "client" ? "client" : "unit"} at random would satisfy it. A proven run refuses this.`]);
    if (family.published) lines.push(["The published form has no bound.", `${family.published(p)}. ${family.refuted}`]);
    else if (family.refuted && !F.isStage(p)) lines.push(["Why the claim fails.", `${family.refuted}${F.isProjected(p) ? " The claim does without projection; the bound above needs it." : ""}`]);
    $("warning").hidden = lines.length === 0;
    $("warning").replaceChildren(...lines.flatMap(([title, text]) => [bold(title), ` ${text} `]));
  }

  function viewTable(p) {
    const rows = F.VIEWS.map((view) => {
      const eps = F.proven(p, p.rounds, view);
      const rate = F.provenTradeoff(p, [0.05], view)[0];
      const cells = [["Proven ε", format(eps)], ["At 5 % false alarms", eps === Infinity ? "no bound" : percent(rate)], ["Because", becauseOf(p, view)]];
      const tr = document.createElement("tr");
      tr.className = view === p.view ? "current" : "";
      tr.append(Object.assign(document.createElement("th"), { scope: "row", textContent: `${view}: ${SEES[view]}` }));
      for (const [label, text] of cells) {
        const td = Object.assign(document.createElement("td"), { textContent: text });
        td.dataset.label = label;
        tr.append(td);
      }
      return tr;
    });
    $("views").tBodies[0].replaceChildren(...rows);
  }

  function assumptions(p) {
    const f = F.factor(p);
    const place = F.isSgd(p) ? "each local step's sum of clipped gradients" : F.isNoisy(p) && F.onSum(p) ? `the sum of a round, in shares of ${format(F.perUpload(p) * p.clip)} on each upload` : F.onSum(p) ? "the sum of a round, added once" : "each upload";
    const lines = [
      `Noise: Gaussian with std z·C = ${format(p.noise * p.clip)} on ${place}; sensitivity ${f === 2 ? "2C" : "C"} (${p.adjacency.replace("_", "-")}${p.unit === "record" && !F.isSgd(p) ? "; one record can move its client's whole update" : ""}).`,
    ];
    if (F.isSgd(p)) lines.push(`Each record joins each batch independently and in secret, with probability b / |D| = ${format(F.localRate(p))}; the client takes part in all ${format(p.rounds)} rounds.`);
    else if (p.sampling === "fixed" || p.view === "server" || F.isNoisy(p)) lines.push(`One client may take part in all ${format(p.rounds)} rounds; being chosen at random is not counted as protection${p.view === "server" ? ", because this adversary sees who uploads" : F.isNoisy(p) ? ", because noise in shares shows how many took part" : ", because a fixed-size draw is not a Poisson sample"}.`);
    else lines.push(`Each client joins each round independently and in secret with probability n / N = ${format(p.cohort / p.clients)}; the adversary must not learn who took part.`);
    if (F.FAMILIES[p.family].published) lines.push("Repaired variant: noise scale, clip and mask are functions of what was already released, and every coordinate that leaves carries noise.");
    if (accountant(p).startsWith("Rényi")) lines.push("Rényi accounting gives an upper bound; fedveil certify may prove a smaller number with privacy loss distributions.");
    if (F.FAMILIES[p.family].attained?.(p)) lines.push("“Attained” is a lower bound on the last model, replace-one: the value of the worst linear losses. No theorem can promise less.");
    if (F.isProjected(p)) {
      lines.push(`Hidden state: only for somebody who never saw an earlier model, so for no client. The round's map is taken to be ${format(F.lipschitz(p))}-Lipschitz, from L; for a network L is an assumption.`);
      if (F.isStage(p)) lines.push("With a decaying rate this page quotes composition; fedveil computes the projected bound for any schedule.");
    }
    if (F.isNoisy(p)) lines.push("The clip norm C of an update is what K clipped steps can travel; the claim uses L, an assumption about the network.");
    lines.push("The noise must come from a cryptographic generator and be used once; ε speaks of the whole run, not of a round.");
    $("assumptions").replaceChildren(...lines.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
  }

  // --- charts --------------------------------------------------------------------------------------------------------------------

  const NOISES = Array.from({ length: 33 }, (_, i) => Number((0.1 * 10 ** (i / 8)).toPrecision(6)));
  const RATES = Array.from({ length: 61 }, (_, i) => (i / 60) ** 2);
  const LOWEST = 1e-5; // log axes start here

  /** The lines over rounds or over noise: `at(kind)` gives epsilon at each x. */
  function epsilonSeries(p, xs, place) {
    const family = F.FAMILIES[p.family];
    const line = (name, color, of) => ({ name, color, points: xs.map((x) => [x, of(...place(x))]) });
    const series = [line(family.published ? "proven, repaired" : "proven", 0, (t, z) => F.proven(p, t, p.view, z))];
    if (family.claim) series.push(line("claimed", 1, (t, z) => F.claim(p, t, z).epsilon));
    if (family.published) series.push(line("published form", 3, () => Infinity));
    if (family.attained?.(p)) {
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
    veilChart($("chart-rounds"), { title: "Claimed and proven, over rounds", x: { label: "rounds", min: Math.min(...turns) === rounds ? 0 : 1 }, y: epsilonAxis(log), series: log ? clipLow(over) : over });
    const against = epsilonSeries(p, NOISES, (z) => [rounds, z]);
    veilChart($("chart-noise"), {
      title: "What more noise buys", x: { label: "noise multiplier z", scale: "log" }, y: epsilonAxis(true), series: clipLow(against),
      marks: [{ x: noise, label: `z = ${format(noise)}` }],
    });
    const curve = F.provenTradeoff(p, RATES);
    const claimed = claim && !Number.isNaN(claim.epsilon) ? RATES.map((a) => [a, claim.mu === undefined ? V.tprOfPair(claim.epsilon, claim.delta, a) : V.tpr(claim.mu, a)]) : null;
    const trade = [{ name: F.FAMILIES[p.family].published ? "proven, repaired" : "proven", color: 0, points: RATES.map((a, i) => [a, curve[i]]) }];
    if (claimed) trade.push({ name: "claimed", color: 1, points: claimed });
    trade.push({ name: "guessing", color: 7, points: [[0, 0], [1, 1]] });
    veilChart($("chart-tradeoff"), {
      title: "What an attacker can reach", x: { label: "false alarms", min: 0, max: 1 }, y: { label: `${p.unit}s recognised, at most`, min: 0, max: 1 }, series: trade,
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
      title: "Can it learn?", x: { label: sgd ? "batch size" : "clients a round", scale: "log" }, y: { label: "norm of the noise on the mean / clip norm", scale: "log", max: undefined },
      series: sgd ? [line("noise on a step's mean gradient", 4)] : [line("server view", 4, "server"), line("aggregate and final view", 2, "aggregate")],
      marks: [{ y: 1, label: "1: noise equals the largest signal" }, { x: now, y: ratio, label: `now ${format(ratio, 2)}` }],
    });
  }

  function captions(p) {
    const family = F.FAMILIES[p.family];
    const claim = family.claim ? ` Claimed: ${family.claimScope(p)}.` : "";
    $("rounds-scope").textContent = `Proven: ${scopeText(p)}; z = ${format(p.noise)}.${claim}`;
    $("noise-scope").textContent = `After ${format(p.rounds)} rounds; ${scopeText(p)}.`;
    $("tradeoff-scope").textContent = `After ${format(p.rounds)} rounds; ${p.unit} level, ${p.adjacency.replace("_", "-")}, ${p.view} view${F.event(p, p.view).kind === "sampled" ? "; an upper bound" : ""}.`;
    $("learn-scope").textContent = F.isSgd(p) ? `z = ${format(p.noise)}, d = ${format(p.dim)}.` : `z = ${format(p.noise)}, ${format(F.sent(p))} noised coordinates. At equal ε without sampling both views need the same z.`;
  }

  // --- all of it -----------------------------------------------------------------------------------------------------------------

  function render() {
    const p = setting();
    const eps = F.proven(p);
    const claim = F.claim(p);
    const ratio = F.noiseRatio(p);
    const rate = F.provenTradeoff(p, [0.05])[0];
    sentence(p, eps, claim, rate, ratio);
    cards(p, eps, claim, ratio);
    warning(p);
    viewTable(p);
    assumptions(p);
    captions(p);
    drawCharts(p, eps, claim, ratio);
    remember(p);
  }

  function remember() {
    const entries = [...SLIDERS.filter((s) => values[s.key] !== s.start).map((s) => [s.key, values[s.key]]), ...Object.keys(CHOICES).filter((key) => $(key).value !== CHOICES[key]).map((key) => [key, $(key).value])];
    clearTimeout(remember.timer);
    remember.timer = setTimeout(() => history.replaceState(null, "", entries.length ? `#${new URLSearchParams(entries)}` : "#"), 300);
    const shown = [...document.querySelectorAll("#controls select")].filter((s) => !s.parentElement.hidden).map((s) => [s.parentElement.querySelector("span").textContent, s.selectedOptions[0].text]);
    for (const s of SLIDERS) if (!document.querySelector(`.slider[data-for="${s.key}"]`).hidden) shown.push([`${s.label} ${s.symbol}`, format(values[s.key])]);
    $("settings").replaceChildren(...shown.flatMap(([name, value]) => [Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: value })]));
  }

  function restore() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const s of SLIDERS) {
      const value = Number(given.get(s.key) ?? s.start);
      values[s.key] = value >= s.low && value <= s.high && (!s.whole || Number.isInteger(value)) ? value : s.start;
    }
    for (const key of Object.keys(CHOICES)) {
      const allowed = [...$(key).options].some((option) => option.value === given.get(key));
      $(key).value = allowed ? given.get(key) : CHOICES[key];
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
    if (rounded < s.low || rounded > s.high) return say(`ε = ${format(target)} needs z = ${format(found)}, outside the slider (${format(s.low)} to ${format(s.high)}).`, true);
    set(s, rounded, "");
    return say(`z = ${format(rounded, 4)} proves ε = ${format(F.proven(setting()), 4)}.`);
  }

  for (const [key, family] of Object.entries(F.FAMILIES)) $("family").append(new Option(family.name, key));
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
    restore();
    say("Back to the starting values.");
  });
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", restore);
  restore();
})();
