// What scrolls sideways is reached by keyboard: tables and code.
addEventListener("load", () => {
  const mark = () => document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code").forEach((region) => (region.tabIndex = 0));
  mark();
  new MutationObserver(mark).observe(document.querySelector("article") ?? document.body, { childList: true, subtree: true });
});
