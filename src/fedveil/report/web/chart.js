// Small accessible SVG charts without dependencies: veilChart(element, spec) draws, and draws again in place on every later call.
//
// spec = { title, height?, x: {label, scale?, min?, max?}, y: {...}, series: [...], marks: [{x?, y?, label}] }
// scale: "linear" | "log" | "band" (x only: categories). whole: ticks at whole numbers only; ticks: these and no others.
// series = { name, points: [[x, y]...], band: [[x, low, high]...], dots: [[x, y]...], kind: "line" | "scatter" | "bar" | "area", dashed, color, stacked }
// The band of a scatter is drawn as bars; dots are small points without a read-out.
// y may be Infinity or "inf": drawn as a line at the top, labelled "no bound". null and NaN are gaps.
"use strict";

globalThis.veilChart = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 4", "2 4", "10 3 2 3", "5 2", "1 3", "12 4", "4 4 1 4"];
  const MARKERS = [
    (x, y) => `M${x - 3.5} ${y}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0`,
    (x, y) => `M${x - 3.2} ${y - 3.2}h6.4v6.4h-6.4z`,
    (x, y) => `M${x} ${y - 4.2}l4 7h-8z`,
    (x, y) => `M${x} ${y - 4.5}l4.5 4.5l-4.5 4.5l-4.5 -4.5z`,
    (x, y) => `M${x} ${y + 4.2}l4 -7h-8z`,
    (x, y) => `M${x - 1} ${y - 4}h2v3h3v2h-3v3h-2v-3h-3v-2h3z`,
    (x, y) => `M${x - 4.5} ${y - 2}h9v4h-9z`,
    (x, y) => `M${x - 2} ${y - 4.5}h4v9h-4z`,
  ];
  const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  const raise = (exponent) => [...String(exponent)].map((c) => SUPERSCRIPT[c]).join("");

  /** A number for people: 3 significant digits, powers of ten where they read better. */
  function format(value, digits = 3) {
    if (value === Infinity) return "no bound";
    if (typeof value !== "number" || Number.isNaN(value)) return String(value ?? "–");
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) {
      const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
      const short = String(Number(mantissa));
      return `${short === "1" ? "" : short + " × "}10${raise(Number(exponent))}`;
    }
    return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(digits)));
  }

  /** The least number of so many significant digits that is not below an upper bound, but for floating-point error. */
  function roundedUp(value, digits = 3) {
    if (!Number.isFinite(value) || value <= 0) return value;
    const unit = 10 ** Math.min(Math.floor(Math.log10(value)) - digits + 1, value < 1e7 ? 0 : Infinity);
    return Number((Math.ceil((value * (1 - 1e-9)) / unit) * unit).toPrecision(15));
  }

  /** An upper bound for people: as `format`, rounded up. */
  const atMost = (value, digits = 3) => format(roundedUp(value, digits), digits);

  function node(tag, attributes = {}, children = []) {
    const made = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "text") made.textContent = value;
      else if (value !== undefined && value !== null) made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  }

  const read = (value) => (value === "inf" ? Infinity : value === null || value === undefined ? NaN : Number(value));

  function normalise(spec) {
    const place = ([x, ...values]) => [spec.x.scale === "band" ? x : read(x), ...values.map(read)];
    return spec.series.map((series, index) => ({
      ...series,
      index: series.color ?? index,
      kind: series.kind ?? "line",
      points: (series.points ?? []).map(place),
      band: (series.band ?? []).map(place),
      dots: (series.dots ?? []).map(place),
    }));
  }

  function linearTicks(low, high, count) {
    const raw = (high - low) / count;
    const decade = 10 ** Math.floor(Math.log10(raw));
    const step = decade * [1, 2, 2.5, 5, 10].find((m) => m * decade >= raw * 0.999);
    const first = Math.ceil(low / step - 1e-9);
    const last = Math.floor(high / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
  }

  function logTicks(low, high, count) {
    const [from, to] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
    if (to - from < 2) {
      const fine = [];
      for (let e = from - 1; e <= to; e++) for (const m of [1, 2, 5]) fine.push(m * 10 ** e);
      return fine.filter((t) => t >= low * 0.999 && t <= high * 1.001);
    }
    const every = Math.max(1, Math.ceil((to - from + 1) / count));
    return Array.from({ length: Math.floor((to - from) / every) + 1 }, (_, i) => 10 ** (from + i * every));
  }

  /** A scale maps data to pixels: {at, within (not beyond its ends), ticks}. */
  function scaleOf(axis, values, start, end, count) {
    if (axis.scale === "band") {
      const names = [...new Set(values)];
      const step = (end - start) / Math.max(1, names.length);
      const every = Math.ceil(names.length / Math.max(1, count * 2));
      return { at: (v) => start + (names.indexOf(v) + 0.5) * step, ticks: names.filter((_, i) => i % every === 0), step };
    }
    const log = axis.scale === "log";
    const usable = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
    let low = axis.min ?? (usable.length ? Math.min(...usable) : log ? 0.1 : 0);
    let high = axis.max ?? (usable.length ? Math.max(...usable) : 1);
    if (log) {
      if (axis.min === undefined && axis.snap !== false) low = 10 ** Math.floor(Math.log10(low) + 1e-9);
      if (axis.max === undefined && axis.snap !== false) high = 10 ** Math.ceil(Math.log10(high) - 1e-9);
      if (high <= low) [low, high] = [low / 2, low * 5];
    } else {
      if (high <= low) [low, high] = [Math.min(low, 0), high + (Math.abs(high) || 1)];
      const ticks = linearTicks(low, high, count);
      const step = ticks.length > 1 ? ticks[1] - ticks[0] : high - low;
      if (axis.max === undefined && axis.snap !== false) high = Math.ceil(high / step - 1e-9) * step;
      if (axis.min === undefined && axis.snap !== false) low = Math.floor(low / step + 1e-9) * step;
    }
    const place = log ? Math.log : (v) => v;
    const [from, to] = [place(low), place(high)];
    const at = (v) => start + ((place(Math.max(v, log ? low : -Infinity)) - from) / (to - from)) * (end - start);
    return {
      at,
      within: (v) => at(Math.min(high, Math.max(low, v))),
      ticks: axis.ticks ?? (log ? logTicks(low, high, count) : linearTicks(low, high, count).filter((t) => !axis.whole || Number.isInteger(t))),
    };
  }

  /** Paths of the runs of points that satisfy `keep`. */
  function runs(points, keep) {
    const parts = [[]];
    for (const point of points) {
      if (keep(point)) parts[parts.length - 1].push(point);
      else if (parts[parts.length - 1].length) parts.push([]);
    }
    return parts.filter((part) => part.length);
  }
  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  const tickText = (value) => (typeof value === "number" && value >= 1e5 ? power(value) : format(value));
  function power(value) {
    const exponent = Math.floor(Math.log10(value) + 1e-9);
    const mantissa = Number((value / 10 ** exponent).toPrecision(3));
    return `${mantissa === 1 ? "" : `${mantissa}×`}10${raise(exponent)}`;
  }

  function drawAxes(svg, spec, box, x, y) {
    const grid = node("svg:g", { class: "veil-grid" });
    const text = node("svg:g", { class: "veil-ticks" });
    for (const tick of y.ticks) {
      const at = y.at(tick).toFixed(1);
      grid.append(node("svg:line", { x1: box.left, x2: box.right, y1: at, y2: at }));
      text.append(node("svg:text", { x: box.left - 8, y: at, dy: "0.32em", "text-anchor": "end", text: tickText(tick) }));
    }
    for (const tick of x.ticks) {
      const at = x.at(tick).toFixed(1);
      grid.append(node("svg:line", { x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }));
      text.append(node("svg:text", { x: at, y: box.bottom + 18, "text-anchor": "middle", text: tickText(tick) }));
    }
    grid.append(node("svg:line", { class: "veil-base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    const middle = (box.left + box.right) / 2;
    text.append(node("svg:text", { class: "veil-label", x: middle, y: box.bottom + 38, "text-anchor": "middle", text: spec.x.label }));
    text.append(node("svg:text", { class: "veil-label", x: box.left, y: 12, "text-anchor": "start", text: spec.y.label }));
    svg.append(grid, text);
  }

  function drawInfinite(svg, series, box, x, row) {
    for (const part of runs(series.points, ([, value]) => value === Infinity)) {
      const at = box.infinite - row * 7;
      const ends = [x.at(part[0][0]), x.at(part[part.length - 1][0])];
      if (ends[1] - ends[0] < 12) ends[0] = ends[1] - 12;
      svg.append(node("svg:path", { class: `veil-line veil-c${series.index % 8} veil-infinite`, d: `M${ends[0]} ${at}H${ends[1]}` }));
      if (row === 0) svg.append(node("svg:text", { class: "veil-nobound", x: ends[1] - 2, y: at + 14, "text-anchor": "end", text: "∞ no bound" }));
    }
  }

  function drawSeries(svg, spec, series, box, x, y, stack) {
    const color = `veil-c${series.index % 8}`;
    const dash = series.dashed ? DASHES[1 + (series.index % 7)] : series.kind === "line" && series.dashed === undefined ? DASHES[series.index % 8] : "";
    const finite = ([, value]) => Number.isFinite(value);
    for (const part of runs(series.band, ([, low, high]) => Number.isFinite(low) && Number.isFinite(high))) {
      if (series.kind === "scatter") {
        const bars = part.map(([a, low, high]) => `M${x.at(a) - 5} ${y.within(low)}h10m-5 0V${y.within(high)}m-5 0h10`);
        svg.append(node("svg:path", { class: `veil-line veil-reach ${color}`, d: bars.join("") }));
        continue;
      }
      const upper = part.map(([a, , high]) => [x.at(a), y.within(high)]);
      const lower = part.map(([a, low]) => [x.at(a), y.within(low)]).reverse();
      svg.append(node("svg:path", { class: `veil-band ${color}`, d: `${path([...upper, ...lower])}Z` }));
    }
    if (series.kind === "bar") {
      drawBars(svg, spec, series, box, x, y, stack);
      return;
    }
    const aside = series.kind === "scatter" ? 12 : 0;
    for (const [a, b] of series.dots)
      svg.append(node("svg:circle", { class: `veil-dot ${color}`, cx: (x.at(a) + aside).toFixed(1), cy: y.within(b).toFixed(1), r: 2 }));
    for (const part of runs(series.points, finite)) {
      const drawn = part.map(([a, b]) => [x.at(a), y.at(b)]);
      if (series.kind === "area") {
        const floor = [
          [drawn[drawn.length - 1][0], box.bottom],
          [drawn[0][0], box.bottom],
        ];
        svg.append(node("svg:path", { class: `veil-band ${color}`, d: `${path([...drawn, ...floor])}Z` }));
      }
      if (series.kind !== "scatter") svg.append(node("svg:path", { class: `veil-line ${color}`, "stroke-dasharray": dash, d: path(drawn) }));
      const every = series.kind === "scatter" ? 1 : Math.max(1, Math.round(drawn.length / 5));
      const shape = MARKERS[series.index % 8];
      const marks = drawn.filter((_, i) => i % every === Math.floor(every / 2)).map(([a, b]) => shape(Number(a.toFixed(1)), Number(b.toFixed(1))));
      svg.append(node("svg:path", { class: `veil-marker ${color}`, d: marks.join("") }));
    }
  }

  function drawBars(svg, spec, series, box, x, y, stack) {
    const steps = series.points.map(([a], i, all) => (i ? x.at(a) - x.at(all[i - 1][0]) : Infinity));
    const step = x.step ?? Math.min(40, ...steps);
    const wide = Math.max(1, (step * 0.8) / (series.stacked ? 1 : stack.count));
    for (const [a, value] of series.points) {
      if (!Number.isFinite(value)) continue;
      const below = series.stacked ? (stack.sums.get(a) ?? 0) : 0;
      const left = x.at(a) + (series.stacked ? -wide / 2 : -step * 0.4 + stack.row * wide);
      const [top, bottom] = [y.at(below + value), below ? y.at(below) : box.bottom];
      svg.append(
        node("svg:rect", {
          class: `veil-bar veil-c${series.index % 8}`,
          x: left.toFixed(1),
          y: top.toFixed(1),
          width: wide.toFixed(1),
          height: Math.max(0, bottom - top).toFixed(1),
        }),
      );
      if (series.stacked) stack.sums.set(a, below + value);
    }
  }

  function drawMarks(svg, spec, box, x, y) {
    for (const mark of spec.marks ?? []) {
      const group = node("svg:g", { class: "veil-mark" });
      const [px, py] = [mark.x === undefined ? null : x.at(mark.x), mark.y === undefined ? null : y.at(mark.y)];
      const inside = (value, a, b) => value >= Math.min(a, b) - 1 && value <= Math.max(a, b) + 1;
      if ((px !== null && !inside(px, box.left, box.right)) || (py !== null && !inside(py, box.top, box.bottom))) continue;
      if (px !== null && py !== null) group.append(node("svg:circle", { cx: px, cy: py, r: 5 }));
      else if (px !== null) group.append(node("svg:line", { x1: px, x2: px, y1: box.top, y2: box.bottom }));
      else group.append(node("svg:line", { x1: box.left, x2: box.right, y1: py, y2: py }));
      const right = px !== null && px > box.right - 9 * mark.label.length;
      const [tx, ty] = px !== null ? [px + (right ? -8 : 8), py !== null ? py - 8 : box.bottom - 8] : [box.left + 6, py - 6];
      group.append(node("svg:text", { x: tx, y: ty, "text-anchor": right ? "end" : "start", text: mark.label }));
      svg.append(group);
    }
  }

  /** Values at which the series are compared, and the pixel of each point. */
  function hitList(visible, x, y, box) {
    const hits = [];
    for (const series of visible) {
      for (const [a, b] of series.points) {
        if (Number.isNaN(b)) continue;
        hits.push({ series, value: [a, b], px: x.at(a), py: b === Infinity ? box.infinite : y.at(b) });
      }
    }
    return hits;
  }

  function draw(state) {
    const { spec, plot } = state;
    const all = normalise(spec);
    const visible = all.filter((series) => !state.hidden.has(series.name));
    state.drawnFor = plot.clientWidth;
    const width = Math.max(240, plot.clientWidth || 480);
    const height = spec.height ?? Math.round(Math.max(220, Math.min(320, width * 0.62)));
    const anyInfinite = visible.some((series) => series.points.some(([, value]) => value === Infinity));
    const box = { left: 58, right: width - 20, top: 26 + (anyInfinite ? 30 : 0), bottom: height - 46, infinite: 36 };
    const xs = all.flatMap((series) => [...series.points.map(([a]) => a), ...series.band.map(([a]) => a)]);
    const sums = new Map();
    for (const s of visible) if (s.stacked) for (const [a, b] of s.points) sums.set(a, (sums.get(a) ?? 0) + (b || 0));
    const ys = [...visible.flatMap((s) => [...s.points, ...s.dots, ...s.band].flatMap(([, ...values]) => values)), ...sums.values()];
    ys.push(...(spec.marks ?? []).map((mark) => mark.y).filter((value) => value !== undefined));
    if (visible.some((s) => s.kind === "bar") && spec.y.scale !== "log") ys.push(0);
    const x = scaleOf({ snap: false, ...spec.x }, xs, box.left, box.right, Math.floor(width / 90));
    const y = scaleOf(spec.y, ys, box.bottom, box.top, 5);
    const names = visible.map((series) => series.name).join(", ");
    const svg = node("svg:svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      tabindex: "0",
      "aria-label": `${spec.title}. ${spec.y.label} against ${spec.x.label}: ${names || "nothing shown"}. Arrow keys read the values.`,
    });
    drawAxes(svg, spec, box, x, y);
    const bars = visible.filter((series) => series.kind === "bar");
    const stack = { count: bars.length, row: 0, sums: new Map() };
    let infiniteRow = 0;
    for (const series of visible) {
      drawSeries(svg, spec, series, box, x, y, stack);
      if (series.points.some(([, value]) => value === Infinity)) drawInfinite(svg, series, box, x, infiniteRow++);
      if (series.kind === "bar") stack.row++;
    }
    drawMarks(svg, spec, box, x, y);
    const pointer = node("svg:g", { class: "veil-pointer" });
    svg.append(pointer);
    const focused = plot.contains(document.activeElement) && document.activeElement.tagName === "svg";
    plot.querySelector("svg")?.remove();
    plot.prepend(svg);
    if (focused) svg.focus({ preventScroll: true });
    state.tip.hidden = true;
    state.hits = hitList(visible, x, y, box);
    state.view = { svg, pointer, box, width, visible };
  }

  /** The read-out: the nearest point, and every other visible series at (about) the same x. */
  function show(state, hit) {
    const { pointer, box, width, visible } = state.view;
    pointer.replaceChildren(
      node("svg:line", { x1: hit.px, x2: hit.px, y1: box.top, y2: box.bottom }),
      node("svg:circle", { class: `veil-c${hit.series.index % 8}`, cx: hit.px, cy: hit.py, r: 5 }),
    );
    const rows = visible.map((series) => {
      const own = state.hits.filter((other) => other.series === series);
      const near = own.reduce((best, other) => (best && Math.abs(best.px - hit.px) <= Math.abs(other.px - hit.px) ? best : other), null);
      return near && Math.abs(near.px - hit.px) < 24 ? { series, value: near.value[1] } : null;
    });
    const lines = rows
      .filter(Boolean)
      .map(({ series, value }) =>
        node("div", { class: series === hit.series ? "veil-near" : "" }, [
          node("span", { class: `veil-swatch veil-c${series.index % 8}` }),
          `${series.name}: ${format(value)}`,
        ]),
      );
    state.tip.replaceChildren(node("div", { class: "veil-at", text: `${state.spec.x.label}: ${format(hit.value[0])}` }), ...lines);
    state.tip.hidden = false;
    const room = state.tip.offsetWidth + 14;
    state.tip.style.left = `${Math.max(0, hit.px + room > width ? hit.px - room : hit.px + 14)}px`;
    state.tip.style.top = `${Math.max(0, Math.min(hit.py - 20, box.bottom - state.tip.offsetHeight))}px`;
    state.hit = hit;
  }

  function hide(state) {
    state.tip.hidden = true;
    state.hit = null;
    state.view?.pointer.replaceChildren();
  }

  function listen(state) {
    const { plot } = state;
    plot.addEventListener("pointermove", (event) => {
      const origin = plot.getBoundingClientRect();
      const [px, py] = [event.clientX - origin.left, event.clientY - origin.top];
      const far = (hit) => 4 * (hit.px - px) ** 2 + (hit.py - py) ** 2;
      const best = state.hits.reduce((a, b) => (a && far(a) <= far(b) ? a : b), null);
      if (best) show(state, best);
    });
    plot.addEventListener("pointerleave", () => hide(state));
    plot.addEventListener("focusout", () => hide(state));
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: "next", ArrowDown: "previous" }[event.key];
      if (event.key === "Escape") return hide(state);
      if (!move || !state.hits.length) return undefined;
      event.preventDefault();
      const names = [...new Set(state.hits.map((hit) => hit.series))];
      let series = state.hit?.series ?? names[0];
      if (typeof move === "string") series = names[(names.indexOf(series) + (move === "next" ? 1 : names.length - 1)) % names.length];
      const own = state.hits.filter((hit) => hit.series === series);
      const near = state.hit ? own.reduce((a, b) => (Math.abs(a.px - state.hit.px) <= Math.abs(b.px - state.hit.px) ? a : b)) : own[0];
      const at = own.indexOf(near) + (state.hit && typeof move === "number" ? move : 0);
      show(state, own[Math.max(0, Math.min(own.length - 1, at))]);
      state.live.textContent = state.tip.textContent;
      return undefined;
    });
    new ResizeObserver(() => {
      if (Math.abs(plot.clientWidth - state.drawnFor) >= 1) draw(state);
    }).observe(plot);
  }

  function legend(state) {
    const key = JSON.stringify(state.spec.series.map((series, i) => [series.name, series.color ?? i, series.dashed, series.kind]));
    if (state.legendKey === key) return;
    state.legendKey = key;
    state.legend.hidden = state.spec.series.length === 1 && state.spec.series[0].name === state.spec.title;
    const buttons = normalise(state.spec).map((series) => {
      const dash = series.dashed ? DASHES[1 + (series.index % 7)] : series.dashed === undefined ? DASHES[series.index % 8] : "";
      const line = node("svg:path", { class: `veil-line veil-c${series.index % 8}`, d: "M1 6H25", "stroke-dasharray": series.kind === "line" ? dash : "" });
      const marker = node("svg:path", { class: `veil-marker veil-c${series.index % 8}`, d: MARKERS[series.index % 8](13, 6) });
      const sample = node(
        "svg:svg",
        { width: 26, height: 12, "aria-hidden": "true" },
        series.kind === "scatter" || series.kind === "bar" ? [marker] : [line, marker],
      );
      const button = node("button", { type: "button", class: "veil-key", "aria-pressed": String(!state.hidden.has(series.name)) }, [sample, series.name]);
      button.addEventListener("click", () => {
        if (!state.hidden.delete(series.name)) state.hidden.add(series.name);
        button.setAttribute("aria-pressed", String(!state.hidden.has(series.name)));
        draw(state);
      });
      return button;
    });
    state.legend.replaceChildren(...buttons);
  }

  function build(element) {
    const state = { hidden: new Set(), hits: [], hit: null };
    state.title = node("figcaption", { class: "veil-title" });
    state.legend = node("div", { class: "veil-legend", role: "group", "aria-label": "Show or hide series" });
    state.tip = node("div", { class: "veil-tip", hidden: "" });
    state.plot = node("div", { class: "veil-plot" }, [state.tip]);
    state.live = node("p", { class: "veil-live", "aria-live": "polite" });
    element.replaceChildren(node("figure", { class: "veil-chart" }, [state.title, state.legend, state.plot, state.live]));
    return state;
  }

  const states = new WeakMap();
  function veilChart(element, spec) {
    const known = states.get(element);
    const state = known ?? build(element);
    state.spec = spec;
    state.title.textContent = spec.title;
    legend(state);
    draw(state);
    if (!known) {
      states.set(element, state);
      listen(state);
    }
    return state;
  }
  veilChart.format = format;
  veilChart.atMost = atMost;
  veilChart.roundedUp = roundedUp;
  return veilChart;
})();
