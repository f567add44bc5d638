// What each method family claims and what can be proven of it, as functions of one plain setting `p`:
// {family, view, unit, adjacency, sampling, schedule, clients, cohort, rounds, noise, clip, dim, delta, records, batch, steps, lr, smooth, prox, density, eta, project, diameter}
// `noise` is z, noise std / clip of what is released: of each upload in the server view, of a round's sum in the other two.
"use strict";

globalThis.veilFamilies = (() => {
  const V = globalThis.veilPrivacy;
  const VIEWS = ["server", "aggregate", "final"];

  const onSum = (p) => p.view !== "server";
  const perUpload = (p, z = p.noise) => (onSum(p) ? z / Math.sqrt(p.cohort) : z);
  const onTheSum = (p, z = p.noise) => (onSum(p) ? z : z * Math.sqrt(p.cohort));
  const isSgd = (p) => p.family === "silo-dp-sgd";
  const isNoisy = (p) => p.family === "noisy-fedavg" || p.family === "noisy-fedprox";
  const isProjected = (p) => isNoisy(p) && p.project === "yes" && p.view === "final";
  /** Sensitivity in clips. Taking one record out moves a whole clipped update, unless examples are clipped one by one. */
  const factor = (p) => (p.adjacency === "replace_one" || (p.unit === "record" && !isSgd(p)) ? 2 : 1);
  const localRate = (p) => Math.min(1, p.batch / p.records);

  const squares = [0];
  /** sqrt(sum over t rounds of (step size / first step size)^2). */
  function growth(p, t) {
    if (!isStage(p)) return Math.sqrt(t);
    while (squares.length <= t) squares.push(squares[squares.length - 1] + 1 / squares.length ** 2);
    return Math.sqrt(squares[t]);
  }
  const isStage = (p) => p.family === "noisy-fedavg" && p.schedule === "stage";

  /** Lipschitz constant of one round's map under L-smooth losses. */
  function lipschitz(p) {
    const pull = p.family === "noisy-fedprox" ? p.prox : 0;
    let distance = 1;
    for (let k = 0; k < p.steps; k++) distance = (Math.abs(1 - p.lr * pull) + p.lr * p.smooth) * distance + p.lr * pull;
    return distance;
  }

  const bounds = new Map();
  /** mu of the last of t models, projected on a ball of diameter D each round: see fedveil.privacy.last_iterate.final_mu_constant. */
  function projectedMu(p, t, z = p.noise) {
    const rho = lipschitz(p);
    const [shift, size] = [factor(p), (p.diameter * p.cohort) / p.clip]; // in units of clip / n
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
    return Math.sqrt(Math.min(t * shift * shift, least[t - 1])) / onTheSum(p, z);
  }

  /** What a run releases to an adversary with that view: a Gaussian (mu of the first round), a Poisson-sampled one, or nothing provable. */
  function event(p, view, z = p.noise) {
    const f = factor(p);
    if (isSgd(p)) {
      if (p.unit !== "record") return { kind: "none", reason: "DP-SGD inside a client protects records, not the client" };
      return { kind: "sampled", rate: localRate(p), multiplier: z / f, perRound: p.steps };
    }
    if (view === "server") {
      if (isNoisy(p)) return { kind: "gaussian", mu: f / perUpload(p, z) }; // its uploads carry shares of the noise
      if (onSum(p)) return { kind: "none", reason: "the server receives uploads without noise of their own; only their sum is protected" };
      return { kind: "gaussian", mu: f / z };
    }
    if (isNoisy(p)) return { kind: "gaussian", mu: f / onTheSum(p, z) };
    if (!onSum(p)) return { kind: "gaussian", mu: p.sampling === "fixed" ? f / (z * Math.sqrt(p.cohort)) : f / z };
    if (p.sampling === "poisson" && p.cohort < p.clients) return { kind: "sampled", rate: p.cohort / p.clients, multiplier: z / f, perRound: 1 };
    return { kind: "gaussian", mu: f / z };
  }

  /** Total mu of the run without using that participation was sampled (also the bound when it was not). */
  const plainMu = (p, e, t) => (e.kind === "gaussian" ? e.mu * growth(p, t) : growth(p, t * e.perRound) / e.multiplier);

  /** Proven epsilon after t rounds: exact for Gaussian releases, an upper bound for Poisson-sampled ones. */
  function proven(p, t = p.rounds, view = p.view, z = p.noise) {
    const e = event(p, view, z);
    if (e.kind === "none") return Infinity;
    const plain = V.epsilon(view === "final" && isProjected(p) && !isStage(p) ? projectedMu(p, t, z) : plainMu(p, e, t), p.delta);
    if (e.kind === "gaussian") return plain;
    return Math.min(plain, V.epsilonRdp(e.rate, e.multiplier, t * e.perRound, p.delta, p.adjacency));
  }

  /** Largest true-positive rate at each false-positive rate that the proof leaves to an attacker. */
  function provenTradeoff(p, rates, view = p.view) {
    const e = event(p, view);
    if (e.kind === "none") return rates.map(() => 1);
    const mu = view === "final" && isProjected(p) && !isStage(p) ? projectedMu(p, p.rounds) : plainMu(p, e, p.rounds);
    const exact = rates.map((fpr) => V.tpr(mu, fpr));
    if (e.kind === "gaussian") return exact;
    const count = p.rounds * e.perRound;
    const grid = Array.from({ length: 60 }, (_, i) => 0.02 * 1.15 ** i).filter((eps) => eps < 60);
    const deltas = grid.map((eps) => Math.exp(V.logDeltaRdp(e.rate, e.multiplier, count, eps, p.adjacency)));
    return rates.map((fpr, i) => grid.reduce((best, eps, j) => Math.min(best, V.tprOfPair(eps, deltas[j], fpr)), exact[i]));
  }

  const attained = (p, t, z = p.noise) => V.epsilon((2 / onTheSum(p, z)) * Math.sqrt(t), p.delta);

  /** Distance a clipped FedProx trajectory can travel, in units of V / alpha. */
  function proxTravel(p) {
    const keep = Math.abs(1 - p.lr * p.prox);
    return keep === 1 ? p.lr * p.prox * p.steps : (p.lr * p.prox * (1 - keep ** p.steps)) / (1 - keep);
  }

  const raw = (what) => what;

  const FAMILIES = {
    "dp-fedavg": {
      name: "DP-FedAvg", source: "McMahan et al. 2018", extra: [],
      about: "Clip each update as a whole, add Gaussian noise, average. Its accounting is a proof; nothing else is claimed.",
      claim: null, published: null,
    },
    "ladp-fl": {
      name: "LaDP-FL", source: "sequential accountant, q T ε", extra: ["records", "batch"],
      about: "Noise per layer, by how far a layer moved. The paper adds up (qε, qδ) per round with q = batch / records.",
      claimScope: (p) => `each upload; δ grows to q T δ = ${globalThis.veilChart.format(localRate(p) * p.rounds * p.delta)}`,
      claim: (p, t, z) => ({ epsilon: localRate(p) * t * V.classicalEpsilon(perUpload(p, z) / 2, p.delta), delta: Math.min(1, localRate(p) * t * p.delta) }),
      published: () => raw("Layers under the threshold leave without noise, and the noise scale reads raw weights"),
      refuted: "Batch sampling inside a client does not make its upload a sample: the factor q has no proof, nor has a sum over rounds the plain δ.",
    },
    "fedglp-adp": {
      name: "FedGLP-ADP", source: "RDP accountant, T α / 2σ²", extra: [],
      about: "Personal masks and clip weights per layer. The paper accounts for the sum of a round as seen under secure aggregation.",
      claimScope: () => "client level, zero-out, aggregate view",
      claim: (p, t, z) => ({ epsilon: V.zcdpEpsilon(t / (2 * onTheSum(p, z) ** 2), p.delta), delta: p.delta }),
      published: () => raw("Clip weights follow the norms of raw updates"),
      refuted: "The number speaks of the sum. One upload carries 1/n of the noise variance: there μ is √n times as large.",
    },
    "noisy-fedavg": {
      name: "Noisy-FedAvg", source: "convergent privacy, Theorem 3", extra: ["steps", "lr", "smooth", "schedule", "project", "diameter"],
      about: "K clipped local steps, noise on each upload. The paper claims that the loss of privacy of the last model converges.",
      claimScope: () => "client level, replace-one, final view",
      claim(p, t, z) {
        const shape = p.schedule === "stage" ? Math.sqrt(2 - 1 / t) : V.shiftedH0((1 + p.lr * p.smooth) ** p.steps, t);
        const mu = (2 / onTheSum(p, z)) * shape;
        return { epsilon: V.epsilon(mu, p.delta), delta: p.delta, mu };
      },
      published: null,
      attained: (p) => p.schedule === "constant" && p.view !== "server" && !isProjected(p),
      refuted: "With a constant rate, linear losses reach μ = 2√T / z in the last model alone, z being the noise on the sum. The theorem needs an interpolation coefficient above 1.",
    },
    "noisy-fedprox": {
      name: "Noisy-FedProx", source: "convergent privacy, Theorem 4", extra: ["steps", "lr", "smooth", "prox", "project", "diameter"],
      about: "As Noisy-FedAvg, with a pull α toward the global model. The paper claims a constant bound for α > L.",
      claimScope: () => "client level, replace-one, final view",
      claim(p, t, z) {
        if (!(p.prox > p.smooth)) return { epsilon: NaN, delta: p.delta, why: "the theorem needs α > L" };
        const shape = Math.sqrt(((2 * p.prox - p.smooth) / p.smooth) * (1 - 2 / ((p.prox / (p.prox - p.smooth)) ** t + 1)));
        const mu = ((2 / onTheSum(p, z)) * shape) / proxTravel(p);
        return { epsilon: V.epsilon(mu, p.delta), delta: p.delta, mu };
      },
      published: null,
      attained: (p) => p.view !== "server" && !isProjected(p),
      refuted: "Linear losses reach μ = 2√T / z in the last model alone, z being the noise on the sum: a bound that stops growing with T cannot hold.",
    },
    fedanc: {
      name: "FedANC", source: "Theorem 2 and √R", extra: ["density"],
      about: "Noise on the top γ share of coordinates, scale learned. The paper takes C√(γd) for the sensitivity.",
      claimScope: () => "each noised step; constant of the O(√R) taken as 1",
      claim: (p, t, z) => ({ epsilon: Math.sqrt(t * p.density * p.dim) * V.classicalEpsilon(perUpload(p, z), p.delta), delta: p.delta }),
      published: () => raw("The top-k choice reads raw gradients, and coordinates outside it enter the model without noise"),
      refuted: "A clipped update moves by 2C at most, whatever d: the stated sensitivity is not the sensitivity, and the published form leaks elsewhere.",
    },
    "aldp-fl": {
      name: "ALDP-FL", source: "classical Gaussian, one iteration", extra: ["records", "eta"],
      about: "Clip by a sliding window of norms, truncated Gaussian noise. The paper divides the sensitivity by the number of records.",
      claimScope: () => "record level, replace-one, server view; one iteration, no composition is stated",
      claim: (p, t, z) => ({ epsilon: V.classicalEpsilon((perUpload(p, z) * p.records) / 2, p.delta), delta: p.delta }),
      published(p) {
        const eps = this.claim(p, 1).epsilon;
        const bound = eps > 700 ? 1 : (Math.exp(eps) - p.eta) / (Math.exp(eps) + p.eta);
        const floor = V.truncatedFloor(perUpload(p) * p.clip, bound, 2 * p.clip);
        return `Truncated noise ends at ±${globalThis.veilChart.format(bound)}: one coordinate moved by 2C is seen with probability ${globalThis.veilChart.format(floor)}, whatever ε`;
      },
      refuted: "Noise with bounded support cannot hide a shift: outputs that only one of two neighbours can produce identify it.",
    },
    "silo-dp-sgd": {
      name: "Silo DP-SGD", source: "Abadi et al. 2016", extra: ["records", "batch", "steps"],
      about: "Each example's gradient is clipped and every local step is noised: record-level privacy inside each silo, in every view.",
      claim: null, published: null,
    },
  };

  const claim = (p, t = p.rounds, z = p.noise) => FAMILIES[p.family].claim?.(p, t, z) ?? null;

  /** Coordinates that carry noise in one upload. */
  const sent = (p) => (p.family === "fedanc" ? Math.max(1, Math.ceil(p.density * p.dim)) : p.dim);

  /** Norm of the noise on the mean update, in clips; for DP-SGD on the mean gradient of one local step. */
  function noiseRatio(p, view = p.view, size = isSgd(p) ? p.batch : p.cohort) {
    if (isSgd(p)) return (p.noise * Math.sqrt(p.dim)) / size;
    return view === "server" ? p.noise * Math.sqrt(sent(p) / size) : (p.noise * Math.sqrt(sent(p))) / size;
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
    FAMILIES, VIEWS, attained, calibrate, claim, event, factor, isNoisy, isProjected, isSgd, isStage, lipschitz, localRate, noiseRatio, onSum, perUpload,
    plainMu, projectedMu, proven, provenTradeoff, remedy, sent,
  };
})();
