// A table of counts as shades: veilHeatmap(element, {title, x, y, columns: [[count per row]...], names: [column names]}).
"use strict";

globalThis.veilHeatmap = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const put = (parent, tag, attributes) => {
    const made = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) key === "text" ? (made.textContent = value) : made.setAttribute(key, value);
    parent.append(made);
    return made;
  };

  function build(element, spec) {
    const figure = document.createElement("figure");
    figure.className = "veil-chart";
    const [title, plot, tip, live] = ["figcaption", "div", "div", "p"].map((tag) => document.createElement(tag));
    [title.className, plot.className, tip.className, live.className] = ["veil-title", "veil-plot", "veil-tip", "veil-live"];
    title.textContent = spec.title;
    live.setAttribute("aria-live", "polite");
    tip.hidden = true;
    plot.append(tip);
    figure.append(title, plot, live);
    element.replaceChildren(figure);
    return { spec, plot, tip, live, at: null };
  }

  function draw(state) {
    const { spec, plot } = state;
    const [count, rows] = [spec.columns.length, spec.columns[0].length];
    const width = Math.max(240, plot.clientWidth || 480);
    const height = Math.max(200, Math.min(520, rows * 24)) + 66;
    const box = { left: 52, top: 22, right: width - 12, bottom: height - 44 };
    const [w, h] = [(box.right - box.left) / count, (box.bottom - box.top) / rows];
    const most = Math.max(1e-9, ...spec.columns.flat());
    plot.querySelector("svg")?.remove();
    const svg = put(plot, "svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      tabindex: "0",
      "aria-label": `${spec.title}. ${spec.y} against ${spec.x}; darker is more. Arrow keys read the values.`,
    });
    plot.prepend(svg);
    const gap = w > 6 ? 1 : 0;
    spec.columns.forEach((column, i) =>
      column.forEach((value, j) => {
        if (value)
          put(svg, "rect", {
            class: "heat-cell veil-c0",
            x: (box.left + i * w + gap / 2).toFixed(2),
            y: (box.top + j * h + 0.5).toFixed(2),
            width: Math.max(w - gap, 0.5).toFixed(2),
            height: Math.max(h - 1, 0.5).toFixed(2),
            "fill-opacity": (0.1 + 0.9 * (value / most)).toFixed(3),
          });
      }),
    );
    put(svg, "rect", { class: "heat-frame", x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top });
    const text = put(svg, "g", { class: "veil-ticks" });
    const every = Math.ceil(rows / Math.floor((box.bottom - box.top) / 16));
    for (let j = 0; j < rows; j += every) put(text, "text", { x: box.left - 8, y: box.top + (j + 0.5) * h, dy: "0.32em", "text-anchor": "end", text: j });
    put(text, "text", { x: box.left, y: 12, text: spec.y });
    put(text, "text", { x: (box.left + box.right) / 2, y: box.bottom + 24, "text-anchor": "middle", text: spec.x });
    state.view = { box, w, h, count, rows, width, ring: put(svg, "rect", { class: "heat-at", visibility: "hidden", width: Math.max(w, 3), height: h }) };
    state.tip.hidden = true;
  }

  function show(state, i, j) {
    const { box, w, h, width, ring } = state.view;
    state.at = [i, j];
    for (const [key, value] of Object.entries({ x: box.left + i * w, y: box.top + j * h, visibility: "visible" })) ring.setAttribute(key, value);
    const value = state.spec.columns[i][j];
    state.tip.textContent = `${state.spec.names[i]}, label ${j}: ${veilChart.format(value)}`;
    state.tip.hidden = false;
    const x = box.left + (i + 1) * w + 8;
    state.tip.style.left = `${Math.max(0, x + state.tip.offsetWidth > width ? box.left + i * w - state.tip.offsetWidth - 8 : x)}px`;
    state.tip.style.top = `${box.top + j * h}px`;
  }

  function listen(state) {
    const { plot } = state;
    const hide = () => {
      state.tip.hidden = true;
      state.at = null;
      state.view.ring.setAttribute("visibility", "hidden");
    };
    plot.addEventListener("pointermove", (event) => {
      const [origin, { box, w, h, count, rows }] = [plot.getBoundingClientRect(), state.view];
      const [i, j] = [Math.floor((event.clientX - origin.left - box.left) / w), Math.floor((event.clientY - origin.top - box.top) / h)];
      if (i >= 0 && i < count && j >= 0 && j < rows) show(state, i, j);
      else hide();
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("focusout", hide);
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (event.key === "Escape") return hide();
      if (!move) return undefined;
      event.preventDefault();
      const { count, rows } = state.view;
      const [i, j] = state.at ?? [-move[0], -move[1]];
      show(state, Math.max(0, Math.min(count - 1, i + move[0])), Math.max(0, Math.min(rows - 1, j + move[1])));
      state.live.textContent = state.tip.textContent;
      return undefined;
    });
    new ResizeObserver(() => {
      if (Math.abs(plot.clientWidth - state.drawnFor) >= 1) {
        state.drawnFor = plot.clientWidth;
        draw(state);
      }
    }).observe(plot);
  }

  return (element, spec) => {
    const state = build(element, spec);
    state.drawnFor = state.plot.clientWidth;
    draw(state);
    listen(state);
  };
})();
