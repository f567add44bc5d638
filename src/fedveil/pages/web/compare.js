// The comparison page: tables and text are in the page; this draws its charts from the values in #data.
"use strict";

(() => {
  const { charts } = JSON.parse(document.getElementById("data").textContent);
  charts.forEach((spec, i) => veilChart(document.getElementById(`chart-${i}`), spec));
})();
