// The words and numbers of the page: sentence, cards, warnings, table of views, assumptions, captions.
"use strict";

globalThis.veilWords = (() => {
  const { cell, el } = globalThis.veilPage;
  const F = globalThis.veilFamilies;
  const { format, atMost, roundedUp } = globalThis.veilChart;
  const $ = (id) => document.getElementById(id);
  const percent = (x) => (x > 0.9995 ? "100 %" : `${Number((100 * roundedUp(x, x < 0.1 ? 2 : 3)).toPrecision(12))} %`);
  const SEES = { server: "each upload", aggregate: "each round's sum", final: "the last model only" };
  const dashed = (name) => name.replace("_", "-");
  const scopeText = (p) => `${p.unit} level, ${dashed(p.adjacency)}, ${p.view} view, δ\u00a0=\u00a0${format(p.delta)}`;
  const bold = (text) => el("b", {}, text);

  /** What the claim is about: the scope in which the paper says it, and what it adds. */
  function claimScope(p, claim) {
    const { unit, adjacency, view, note } = F.familyOf(p).claim;
    const grown = claim && claim.delta !== p.delta ? ` = ${format(claim.delta)}` : "";
    return `${unit} level, ${dashed(adjacency)}, ${view} view${note && `; ${note}${grown}`}`;
  }

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
    if (view === "final" && F.isProjected(p) && !F.isStage(p))
      return `μ = ${format(F.projectedMu(p, p.rounds))} for the last projected model; composition gives ${format(F.plainMu(p, e, p.rounds))}`;
    return `μ = ${format(F.plainMu(p, e, p.rounds))} over ${times}${view === "final" ? "; hiding the earlier models adds no proof here" : ""}`;
  }

  const VERDICTS = { yes: "it can learn, as far as noise goes", perhaps: "perhaps it can learn", no: "it can hardly learn" };

  /** What the noise means over the whole run, as `fedveil certify` says it. */
  function gathered(p) {
    const [over, share] = [F.gatheredRatio(p), F.expectedShare(F.gatheredRatio(p))];
    const kept = `Linear models kept about ${Math.round(100 * share)} % of their accuracy above chance at that level.`;
    return `Over ${format(F.turns(p))} ${F.isSgd(p) ? "local steps" : "rounds"} it is ${format(over, 2)} × the signal. ${kept}`;
  }

  /** What the headline says of the claim: beside the proof only where both speak of the same. */
  function besideProof(p, eps, claim) {
    const claimed = `The paper's claim of ε = ${format(claim.epsilon)}`;
    const others = F.differences(p).map(([kind, theirs, ours]) => `another ${kind} (${dashed(theirs)}, not ${dashed(ours)})`);
    if (claim.delta !== p.delta) others.push(`another δ (${format(claim.delta)}, not ${format(p.delta)})`);
    if (others.length) return `The paper's claim is for ${others.join(" and ")}: it does not stand beside this proof. `;
    const times = eps / claim.epsilon;
    if (eps === Infinity) return `${claimed} has no proof. `;
    if (times > 1.05) return `${claimed} is ${format(times, 2)} times smaller. `;
    if (times < 0.95) return `${claimed} is ${format(1 / times, 2)} times larger, and is no bound on the published form. `;
    return `${claimed} agrees. `;
  }

  function sentence(p, eps, claim, rate, ratio) {
    const parts = [];
    const whom = p.unit === "client" ? "a client" : "a record";
    if (eps === Infinity) parts.push("Of this configuration ", bold("nothing can be proven"), `: ${F.event(p, p.view).reason ?? "the bound is infinite"}. `);
    else {
      parts.push(`After ${format(p.rounds)} rounds, someone who sees ${SEES[p.view]} and accepts 5 % false alarms recognises ${whom} at most `);
      parts.push(bold(percent(rate)), " of the time (guessing: 5 %); proven ", bold(`ε = ${atMost(eps)}`), ". ");
    }
    if (eps !== Infinity && F.familyOf(p).unbounded) parts.push("That holds for the repaired variant; the published form has no bound. ");
    if (claim && Number.isFinite(claim.epsilon)) parts.push(besideProof(p, eps, claim));
    const unit = F.isSgd(p) ? "the mean gradient of a step" : "the mean update";
    parts.push(`The noise on ${unit} is `, bold(`${format(ratio, 2)} × the clip norm`), `: ${VERDICTS[F.verdict(p)]}.`);
    $("sentence").replaceChildren(...parts);
  }

  function cards(p, eps, claim, ratio) {
    const family = F.familyOf(p);
    const number = (value, shown = format) => (value === Infinity ? "no bound" : Number.isNaN(value) ? "–" : `ε = ${shown(value)}`);
    const beside = claim && F.sameView(p);
    $("claimed-card").hidden = !claim;
    $("claimed").textContent = beside ? number(claim.epsilon) : "another view";
    $("claimed").dataset.value = beside ? claim.epsilon : "";
    if (claim && !beside) $("claimed-scope").textContent = `The claim is for the ${family.claim.view} view: choose that view to see it beside its proof.`;
    else $("claimed-scope").textContent = claim ? (claim.why ?? `${family.source}. Scope: ${claimScope(p, claim)}; δ\u00a0=\u00a0${format(p.delta)}.`) : "";
    $("proven-title").textContent = family.unbounded ? "Proven, repaired variant" : "Proven";
    $("proven").textContent = number(eps, atMost);
    $("proven").dataset.value = eps;
    const why = eps === Infinity ? ` No bound: ${F.event(p, p.view).reason}.` : ` ${accountant(p)}.`;
    $("proven-scope").textContent = `${scopeText(p)};${why}`;
    $("ratio").replaceChildren(`${format(ratio, 2)} ×`, el("small", {}, " clip norm"));
    $("ratio").dataset.value = ratio;
    for (const id of ["claimed", "proven", "ratio"])
      $(id).classList.toggle("long", $(id).textContent.length > 18 || (id !== "ratio" && $(id).textContent.length > 10));
    const remedy = F.remedy(p);
    const what = F.isSgd(p) ? "a batch of" : "";
    const who = F.isSgd(p) ? "" : " clients per round";
    const way = remedy.dim >= 2 ? `, or at most ${format(remedy.dim)} parameters` : "";
    $("ratio-scope").textContent =
      `${gathered(p)} ${ratio > 1 && F.verdict(p) !== "yes" ? `Noise and signal of one ${F.isSgd(p) ? "step" : "round"} are equal at ${what} ${format(remedy.cohort)}${who}${way}, with the same z.` : ""}`.replace(
        / +/g,
        " ",
      );
    const row = (name, value) => el("div", {}, el("span", {}, `${name} `), bold(value));
    const bare = (value) => number(value).replace("ε = ", "");
    $("strip").replaceChildren(
      row("proven", bare(eps)),
      ...(claim ? [row("claimed", beside ? bare(claim.epsilon) : "another view")] : []),
      row("noise", `${format(ratio, 2)} ×`),
    );
  }

  function warning(p) {
    const family = F.familyOf(p);
    const floor = F.floor(p);
    const units = p.unit === "client" ? p.clients : F.isSgd(p) ? p.records : p.clients;
    const lines = [];
    if (p.delta >= 1 / units)
      lines.push([
        "Delta is too large.",
        `δ = ${format(p.delta)} is at least 1 / ${format(units)}: publishing one ${p.unit === "client" ? "client" : "unit"} at random would satisfy it. A proven run refuses this.`,
      ]);
    const seen = floor && family.floor.replace("{bound}", format(floor.bound)).replace("{floor}", format(floor.floor));
    const reason = family.unbounded && `${family.unbounded[0].toUpperCase()}${family.unbounded.slice(1)}.`;
    if (reason) lines.push(["The published form has no bound.", [reason, seen, family.refuted].filter(Boolean).join(" ")]);
    else if (family.refuted && !F.isStage(p))
      lines.push(["Why the claim fails.", `${family.refuted}${F.isProjected(p) ? " The claim does without projection; the bound above needs it." : ""}`]);
    $("warning").hidden = lines.length === 0;
    $("warning").replaceChildren(...lines.flatMap(([title, text]) => [bold(title), ` ${text} `]));
  }

  function viewTable(p) {
    const rows = F.VIEWS.map((view) => {
      const eps = F.proven(p, p.rounds, view);
      const rate = F.provenTradeoff(p, [0.05], view)[0];
      const cells = [
        ["Proven ε", atMost(eps)],
        ["At 5 % false alarms", eps === Infinity ? "no bound" : percent(rate)],
        ["Because", becauseOf(p, view)],
      ];
      return el(
        view === p.view ? "tr.current" : "tr",
        {},
        el("th", { scope: "row" }, `${view}: ${SEES[view]}`),
        cells.map(([label, text]) => cell(label, text)),
      );
    });
    $("views").tBodies[0].replaceChildren(...rows);
  }

  function assumptions(p) {
    const f = F.factor(p);
    const place = F.isSgd(p)
      ? "each local step's sum of clipped gradients"
      : F.isNoisy(p) && F.onSum(p)
        ? `the sum of each round, in shares of ${format(F.perUpload(p) * p.clip)} on each upload${p.view === "aggregate" ? ", besides the one that a fellow client drew itself and knows" : ""}`
        : F.onSum(p)
          ? "the sum of each round, added once"
          : "each upload";
    const lines = [
      `Noise: Gaussian with std z·C = ${format(p.noise * p.clip)} on ${place}; sensitivity ${f === 2 ? "2C" : "C"} (${p.adjacency.replace("_", "-")}${p.unit === "record" && !F.isSgd(p) ? "; one record can move its client's whole update" : ""}).`,
    ];
    if (F.isSgd(p))
      lines.push(
        `Each record joins each batch independently and in secret, with probability b / |D| = ${format(F.localRate(p))}; the client takes part in all ${format(p.rounds)} rounds.`,
      );
    else if (p.sampling === "fixed" || p.view === "server" || F.isNoisy(p))
      lines.push(
        `One client may take part in all ${format(p.rounds)} rounds; being chosen at random is not counted as protection${p.view === "server" ? ", because this adversary sees who uploads" : F.isNoisy(p) ? ", because noise in shares shows how many took part" : ", because a fixed-size draw is not a Poisson sample"}.`,
      );
    else
      lines.push(
        `Each client joins each round independently and in secret with probability n / N = ${format(p.cohort / p.clients)}; the adversary must not learn who took part.`,
      );
    if (F.familyOf(p).unbounded)
      lines.push("Repaired variant: noise scale, clip and mask are functions of what was already released, and every coordinate that leaves carries noise.");
    if (accountant(p).startsWith("Rényi"))
      lines.push("Rényi accounting gives an upper bound; fedveil certify may prove a smaller number with privacy loss distributions.");
    if (F.isAttained(p))
      lines.push("“Attained” is a lower bound on the last model, replace-one: the value of the worst linear losses. No theorem can promise less.");
    if (F.isProjected(p)) {
      lines.push(
        `Hidden state: only for somebody who never saw an earlier model, so for no client. The round's map is taken to be ${format(F.lipschitz(p))}-Lipschitz, from L; for a network L is an assumption.`,
      );
      if (F.isStage(p)) lines.push("With a decaying rate this page quotes composition; fedveil computes the projected bound for any schedule.");
    }
    if (F.isNoisy(p)) lines.push("The clip norm C of an update is what K clipped steps can travel; the claim uses L, an assumption about the network.");
    lines.push("The noise must come from a cryptographic generator and be used once; ε speaks of the whole run, not of one round.");
    $("assumptions").replaceChildren(...lines.map((text) => el("li", {}, text)));
  }

  function captions(p) {
    const claim = F.familyOf(p).claim && F.sameView(p) ? ` Claimed: ${claimScope(p)}.` : "";
    $("rounds-scope").textContent = `Proven: ${scopeText(p)}; z = ${format(p.noise)}.${claim}`;
    $("noise-scope").textContent = `After ${format(p.rounds)} rounds; ${scopeText(p)}.`;
    $("tradeoff-scope").textContent =
      `After ${format(p.rounds)} rounds; ${p.unit} level, ${p.adjacency.replace("_", "-")}, ${p.view} view${F.event(p, p.view).kind === "sampled" ? "; an upper bound" : ""}.`;
    $("learn-scope").textContent = F.isSgd(p)
      ? `z = ${format(p.noise)}, d = ${format(p.dim)}.`
      : `z = ${format(p.noise)}, ${format(F.sent(p))} noised coordinates. At equal ε without sampling both views need the same z.`;
  }

  return { accountant, assumptions, besideProof, captions, cards, sentence, viewTable, warning };
})();
