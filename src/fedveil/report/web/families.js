// What a run claims and what can be proven of it, as functions of one plain setting `p`:
// {family, view, unit, adjacency, sampling, schedule, clients, cohort, rounds, noise, clip, dim, delta, records, batch, steps, lr, smooth, prox, density, eta, project, diameter}
// `noise` is z, noise std / clip of what is released: of each upload in the server view, of a round's sum in the other two.
// What is particular to a method comes from Python, in #data: see fedveil.report.explorer. Where noise is added (`noise`):
// "sum", to each upload in the server view and once to the sum in the others; "shares", always to uploads; "steps", to local steps.
"use strict";

globalThis.veilFamilies = (() => {
  const V = globalThis.veilPrivacy;
  const { CLAIMS, FLOORS, localRate } = globalThis.veilClaims;
  const { methods: FAMILIES, rounding: ROUNDING, learning: LEARNING } = globalThis.veilPage.data;
  const VIEWS = ["server", "aggregate", "final"];

  const familyOf = (p) => FAMILIES[p.family];
  const isSgd = (p) => familyOf(p).noise === "steps";
  const isNoisy = (p) => familyOf(p).noise === "shares";
  const uses = (p, slider) => familyOf(p).uses.includes(slider);
  const onSum = (p) => p.view !== "server";
  /** Noises of uploads in a sum that an adversary with that view does not know: a fellow client knows the one that it drew itself. */
  const hidden = (p, view) => p.cohort - (view === "aggregate" ? 1 : 0);
  const perUpload = (p, z = p.noise) => (onSum(p) ? z / Math.sqrt(isNoisy(p) ? hidden(p, p.view) : p.cohort) : z);
  const onTheSum = (p, z = p.noise) => (onSum(p) && !isNoisy(p) ? z : perUpload(p, z) * Math.sqrt(p.cohort));
  const isStage = (p) => uses(p, "schedule") && p.schedule === "stage";
  const isProjected = (p) => uses(p, "project") && p.project === "yes" && p.view === "final";
  /** Sensitivity in clips. Taking one record out moves a whole clipped update, unless examples are clipped one by one. */
  const factor = (p) => (p.adjacency === "replace_one" || (p.unit === "record" && !isSgd(p)) ? 2 : 1);

  const squares = [0];
  /** sqrt(sum over t rounds of (step size / first step size)^2). */
  function growth(p, t) {
    if (!isStage(p)) return Math.sqrt(t);
    while (squares.length <= t) squares.push(squares[squares.length - 1] + 1 / squares.length ** 2);
    return Math.sqrt(squares[t]);
  }

  // --- the last model, projected on a ball each round ---------------------------------------------------------------------------------

  /** Lipschitz constant of one round's map under L-smooth losses. */
  function lipschitz(p) {
    const pull = uses(p, "prox") ? p.prox : 0;
    let distance = 1;
    for (let k = 0; k < p.steps; k++) distance = (Math.abs(1 - p.lr * pull) + p.lr * p.smooth) * distance + p.lr * pull;
    return distance;
  }

  const bounds = new Map();
  /** What the grid of uploads and float32 put between two models in a round, in units of clip / n: see docs/privacy.md, section 5. */
  function rounded(p, z) {
    const cell = 2 ** (Math.floor(Math.log2(perUpload(p, z) * p.clip)) - ROUNDING.bits) * Math.sqrt(p.dim);
    return ((cell * (1 + 1 / p.cohort) + p.diameter * 2 ** -20) * p.cohort) / p.clip;
  }

  /** mu of the last of t models, projected on a ball of diameter D each round: see fedveil.accounting.last_iterate.final_mu_constant. */
  function projectedMu(p, t, z = p.noise, extra = rounded(p, z)) {
    const rho = lipschitz(p);
    const [shift, size] = [factor(p) + extra, (p.diameter * p.cohort) / p.clip]; // in units of clip / n
    const key = `${rho}|${shift}|${size}`;
    if (!bounds.has(key)) bounds.clear();
    const least = bounds.get(key) ?? [Infinity];
    bounds.set(key, least);
    while (least.length < t) {
      const n = least.length;
      const sum = (r) => (r === 1 ? Math.log(n) : Math.log(-Math.expm1(-n * Math.log(r))) - Math.log(-Math.expm1(-Math.log(r))) + (n - 1) * Math.log(r));
      const [a, b] = [n * Math.log(rho) + Math.log(size), Math.log(shift) + sum(rho)];
      const [logY, logX] = [Math.max(a, b) + Math.log1p(Math.exp(-Math.abs(a - b))), sum(rho * rho)];
      const feasible = rho <= 1 || logY - logX >= Math.log(shift) - 1e-12;
      least.push(Math.min(least[n - 1], feasible ? Math.exp(2 * logY - logX) : Infinity));
    }
    const last = Math.sqrt(Math.min(t * shift ** 2, least[t - 1])) / onTheSum(p, z); // with the common start
    return Math.min((event(p, "final", z).mu ?? Infinity) * Math.sqrt(t), last);
  }

  // --- what is proven ------------------------------------------------------------------------------------------------------------------

  /** What a round releases to an adversary with that view: a Gaussian (mu of the first round), a Poisson-sampled one, or nothing provable. */
  function event(p, view, z = p.noise) {
    const f = factor(p);
    if (isSgd(p)) {
      if (p.unit !== "record") return { kind: "none", reason: familyOf(p).reason };
      const grid = 2 ** (Math.floor(Math.log2(z * p.clip)) - ROUNDING.bits); // step of the sums of gradients that are noised
      const batch = Math.max(p.records, Math.min(100 * p.records, 2 ** 17)) + 2; // the most terms of a sum, whose rounding counts
      const summed = (1 + ROUNDING.excess) * (1 + 2 * batch * (batch + 1) * 2 ** -53);
      const moved = f * (summed + (grid * Math.sqrt(p.dim)) / p.clip); // by one record, in clips
      return { kind: "sampled", rate: localRate(p), multiplier: z / moved, perRound: p.steps };
    }
    // uploads carry shares; without the bound on the last model an outsider counts as a client
    const [own, others] = [perUpload(p, z), Math.sqrt(Math.max(hidden(p, "aggregate"), onSum(p) ? 0 : 1))];
    if (isNoisy(p) && view !== "server" && !others)
      return { kind: "none", reason: "a fellow client knows the only noise of the sum: take two clients per round" };
    if (isNoisy(p)) return { kind: "gaussian", mu: f / (view === "server" ? own : own * others) };
    if (view === "server") return onSum(p) ? { kind: "none", reason: familyOf(p).reason } : { kind: "gaussian", mu: f / z };
    if (!onSum(p)) return { kind: "gaussian", mu: p.sampling === "fixed" ? f / (own * others) : f / z };
    if (p.sampling === "poisson" && p.cohort < p.clients) return { kind: "sampled", rate: p.cohort / p.clients, multiplier: z / f, perRound: 1 };
    return { kind: "gaussian", mu: f / z };
  }

  /** Total mu of the run without using that participation was sampled (also the bound when it was not). */
  const plainMu = (p, e, t) => (e.kind === "gaussian" ? e.mu * growth(p, t) : growth(p, t * e.perRound) / e.multiplier);

  /** The whole run as privacy.js composes it, or null where nothing can be proven. */
  function run(p, t, view, z = p.noise) {
    const e = event(p, view, z);
    if (e.kind === "none") return null;
    const mu = view === "final" && isProjected(p) && !isStage(p) ? projectedMu(p, t, z) : plainMu(p, e, t);
    return { mu, sampled: e.kind === "sampled" ? { rate: e.rate, multiplier: e.multiplier, count: t * e.perRound } : null };
  }

  /** Proven epsilon after t rounds: exact for Gaussian releases, an upper bound for Poisson-sampled ones. */
  function proven(p, t = p.rounds, view = p.view, z = p.noise) {
    const whole = run(p, t, view, z);
    return whole ? V.runEpsilon(whole, p.delta, p.adjacency) : Infinity;
  }

  /** Largest true-positive rate at each false-positive rate that the proof leaves to an attacker. */
  function provenTradeoff(p, rates, view = p.view) {
    const whole = run(p, p.rounds, view);
    return whole ? V.runTradeoff(whole, rates, p.adjacency) : rates.map(() => 1);
  }

  /** Epsilon that the worst linear losses attain in the last model: no theorem can promise less. NaN where they show nothing. */
  const attained = (p, t, z = p.noise) => V.epsilon((2 / onTheSum(p, z)) * Math.sqrt(t), p.delta);
  const isAttained = (p) => familyOf(p).linear && !isStage(p) && onSum(p) && !isProjected(p);

  // --- what is claimed -----------------------------------------------------------------------------------------------------------------

  const noiseOf = (p, z = p.noise) => ({ upload: perUpload(p, z), sum: onTheSum(p, z) });

  /** The paper's claim after t rounds, or null where it makes none; epsilon is NaN, with a reason, where it has no number here. */
  function claim(p, t = p.rounds, z = p.noise) {
    const { claim: claimed } = familyOf(p);
    if (!claimed) return null;
    const formula = CLAIMS[p.family];
    const why = formula ? claimed.needs : "this page has no formula for it: fedveil certify computes it";
    return formula?.(p, t, noiseOf(p, z)) ?? { epsilon: NaN, delta: p.delta, why };
  }

  /** In what the claim speaks of something else than the proof: [kind, of the claim, of the proof]. */
  function differences(p) {
    const { claim: claimed } = familyOf(p);
    return claimed ? ["view", "unit", "adjacency"].filter((kind) => claimed[kind] !== p[kind]).map((kind) => [kind, claimed[kind], p[kind]]) : [];
  }

  /** Whether the claim speaks of the view that the proof speaks of: else neither chart nor card has both. */
  const sameView = (p) => !differences(p).some(([kind]) => kind === "view");

  const floor = (p) => FLOORS[p.family]?.(p, noiseOf(p)) ?? null;

  // --- noise against signal ------------------------------------------------------------------------------------------------------------

  /** Coordinates that carry noise in one upload. */
  const sent = (p) => (uses(p, "density") ? Math.max(1, Math.ceil(p.density * p.dim)) : p.dim);

  /** Norm of the noise on the mean update, in clips; for DP-SGD on the mean gradient of one local step. */
  function noiseRatio(p, view = p.view, size = isSgd(p) ? p.batch : p.cohort) {
    if (isSgd(p)) return (p.noise * Math.sqrt(p.dim)) / size;
    return view === "server" ? p.noise * Math.sqrt(sent(p) / size) : (p.noise * Math.sqrt(sent(p))) / size;
  }

  /** Rounds, or local steps of all rounds under DP-SGD: what the noise averages out over. */
  const turns = (p) => p.rounds * (isSgd(p) ? p.steps : 1);

  /** The noise gathered over the whole run against the signal: see fedveil.accounting.learnability. */
  const gatheredRatio = (p, ratio = noiseRatio(p)) => ratio / Math.sqrt(turns(p));

  /** The share of the accuracy above chance that measured runs kept at such a ratio: a rule of thumb. */
  const expectedShare = (gathered) => 1 / (1 + (gathered / LEARNING.half) ** LEARNING.power);

  /** Can it learn? "yes", "perhaps" or "no", as `fedveil certify` says. */
  function verdict(p) {
    const share = expectedShare(gatheredRatio(p));
    return share >= LEARNING.learns ? "yes" : share >= LEARNING.hardly ? "perhaps" : "no";
  }

  /** What would bring that norm down to one clip, at the same noise multiplier. */
  function remedy(p) {
    const [z, k] = [p.noise, sent(p)];
    if (isSgd(p)) return { cohort: Math.ceil(z * Math.sqrt(k)), dim: Math.floor((p.batch / z) ** 2) };
    return p.view === "server"
      ? { cohort: Math.ceil(z * z * k), dim: Math.floor(p.cohort / (z * z)) }
      : { cohort: Math.ceil(z * Math.sqrt(k)), dim: Math.floor((p.cohort / z) ** 2) };
  }

  /** The smallest noise multiplier whose proven epsilon is at most the target, or null where no noise gives it. */
  function calibrate(p, target) {
    if (event(p, p.view).kind === "none") return null;
    const excess = (logZ) => proven(p, p.rounds, p.view, Math.exp(logZ)) - target;
    const [low, high] = [Math.log(1e-3), Math.log(1e5)];
    return excess(low) <= 0 ? Math.exp(low) : excess(high) > 0 ? null : Math.exp(V.bisect(excess, low, high, 50));
  }

  return {
    FAMILIES,
    VIEWS,
    attained,
    calibrate,
    claim,
    differences,
    event,
    expectedShare,
    factor,
    familyOf,
    floor,
    gatheredRatio,
    isAttained,
    isNoisy,
    isProjected,
    isSgd,
    isStage,
    lipschitz,
    localRate,
    noiseRatio,
    onSum,
    perUpload,
    plainMu,
    projectedMu,
    proven,
    provenTradeoff,
    remedy,
    sameView,
    sent,
    turns,
    verdict,
  };
})();
