// What the pages share: elements, sections with their links, tables, lists and folds. Text is always set as text, never as markup.
"use strict";

globalThis.veilPage = (() => {
  /** el("td.number", {attribute: value}, child, "text", ...) */
  function el(what, attributes = {}, ...children) {
    const [tag, ...classes] = what.split(".");
    const made = document.createElement(tag);
    if (classes.length) made.className = classes.join(" ");
    for (const [key, value] of Object.entries(attributes)) if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
    made.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== ""));
    return made;
  }

  /** Title and lead of the page; `name` is that of the window, where it is another. */
  function head(title, lead, name = title) {
    document.title = name;
    document.getElementById("title").textContent = title;
    document.getElementById("lead").textContent = lead;
  }

  /** A section and its link; none without children. */
  function section(id, title, ...children) {
    const kept = children.flat(9).filter(Boolean);
    if (!kept.length) return;
    document.getElementById("report").append(el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), kept));
    document.getElementById("jump").append(el("li", {}, el("a", { href: `#${id}` }, title)));
  }

  /** Makes a region that scrolls reachable by keyboard, as long as there is something to scroll. */
  function reachable(region, label) {
    const mark = () => {
      const scrolls = window.getComputedStyle(region).overflowX !== "hidden" && region.scrollWidth > region.clientWidth;
      for (const [key, value] of Object.entries({ tabindex: "0", role: "region", "aria-label": label })) {
        if (scrolls) region.setAttribute(key, value);
        else region.removeAttribute(key);
      }
    };
    new ResizeObserver(mark).observe(region);
    return region;
  }
  const scroll = (label, ...children) => reachable(el("div.scroll", {}, ...children), label);
  /** Text as it was written, which may be wider than the page. */
  const verbatim = (label, text) => reachable(el("pre", {}, text), label);

  function table(headings, rows, attributes = {}) {
    const top = el(
      "tr",
      {},
      headings.map((text) => el("th", { scope: "col" }, text)),
    );
    return scroll(`Table: ${headings.join(", ")}`, el("table", attributes, el("thead", {}, top), el("tbody", {}, rows)));
  }
  const cell = (label, ...children) => el("td", { "data-label": label }, ...children);
  const list = (items) =>
    items.length
      ? el(
          "ul.list",
          {},
          items.map((item) => el("li", {}, item)),
        )
      : null;
  /** Lines of a statement, each with the reason. */
  const statementList = (items) =>
    el(
      "ul.list",
      {},
      items.map(({ text, why }) => el("li", {}, text, why && el("small", {}, `because ${why}`))),
    );
  const fold = (title, ...children) => el("details", {}, el("summary", {}, title), ...children);

  /** The outcome of verifying the runs, with every finding in a fold; below it, in words, what is contradicted. */
  function verification(found) {
    if (!found) return null;
    const badge = el(`span.badge.${found.outcome.replace(" ", "-")}`, {}, `Verification: ${found.outcome}${found.count}`);
    const many = found.runs.length > 1;
    const run = ({ headline, kinds }) => [
      many ? el("h3", {}, headline) : "",
      kinds.map(([title, lines]) => [el(many ? "h4" : "h3", {}, `${title} (${lines.length})`), list(lines)]),
    ];
    const wrong = found.contradictions;
    return [
      el("details.findings", {}, el("summary", {}, badge), found.runs.map(run)),
      wrong.length ? el("div.warning.refuted", {}, el("b", {}, "Do not rely on the numbers of this page: a run contradicts itself."), list(wrong)) : "",
    ];
  }

  /** The link of the section that is read, kept in sight where the links do not fit. */
  function follow() {
    const links = [...document.querySelectorAll("#jump a")];
    const atEnd = window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 2;
    const begun = links.findLast((link) => document.querySelector(link.hash).getBoundingClientRect().top <= 80);
    const read = atEnd ? links.at(-1) : (begun ?? links[0]);
    for (const link of links) {
      if (link === read && !link.hasAttribute("aria-current")) link.parentElement.parentElement.scrollTo({ left: link.offsetLeft - 60 });
      if (link === read) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }
  if (document.getElementById("jump")) addEventListener("scroll", follow, { passive: true });

  // On paper folds are open, except the checks, which would push the numbers off the first page; what is contradicted stands below.
  addEventListener("beforeprint", () => document.querySelectorAll("details:not(.findings)").forEach((d) => (d.open = true)));
  return {
    cell,
    data: JSON.parse(document.getElementById("data").textContent),
    el,
    fold,
    head,
    list,
    reachable,
    scroll,
    section,
    statementList,
    table,
    verbatim,
    verification,
  };
})();
