// The mathematical core: Gaussian releases, Poisson-sampled Gaussian releases, and their composition over rounds.
// The quantities of fedveil.accounting under its conventions: noise in units of sensitivity, natural logarithms.
"use strict";

globalThis.veilPrivacy = (() => {
  const LOG_SQRT_2PI = Math.log(2 * Math.PI) / 2;

  // --- the normal distribution ---------------------------------------------------------------------------------------------------

  // Chebyshev series of ln(M(s) / t) in 2t - 1, t = 1 / (1 + s/3), for the Mills ratio M(s) = (1 - Phi(s)) / phi(s), s >= 0 (4e-16).
  const MILLS = [
    -0.46464473087815655, 0.6706947514066739, 0.02954600794459064, -0.008772093335356106, -0.0013771315367105141, 0.00029325569469087484, 6.88295067036556e-5,
    -1.500185344797059e-5, -3.6180755686353743e-6, 9.740054462019104e-7, 1.8233490112256695e-7, -6.99817066228478e-8, -7.4153836174048905e-9,
    5.038061766213325e-9, 8.469255263425854e-11, -3.361968495457461e-10, 2.6773754507148496e-11, 1.8989623487676472e-11, -3.8483658768159096e-12,
    -7.380337185039811e-13, 3.337454848752385e-13, -1.163757019327542e-15, -1.945848356378969e-14, 3.164979430380192e-15, 5.08978053399745e-16,
    -2.662824864314311e-16,
  ];

  function mills(s) {
    if (s < 0) return Math.exp((s * s) / 2 + LOG_SQRT_2PI) - mills(-s);
    const t = 1 / (1 + s / 3);
    const twice = 2 * (2 * t - 1);
    let [a, b] = [0, 0];
    for (let j = MILLS.length - 1; j > 0; j--) [a, b] = [twice * a - b + MILLS[j], a];
    return t * Math.exp((twice * a) / 2 - b + MILLS[0]);
  }

  /** 1 - s M(s) for s >= -1: by its asymptotic series where the difference would cancel. */
  function millsSlope(s) {
    if (s < 30) return 1 - s * mills(s);
    let series = 0;
    for (let k = 12; k > 0; k--) series = ((2 * k - 1) / (s * s)) * (1 - series);
    return series;
  }

  /** Nodes and weights of the Gauss-Legendre rule with 12 points, the positive half. */
  const GAUSS = [
    [0.1252334085114689, 0.2491470458134028],
    [0.3678314989981802, 0.2334925365383548],
    [0.5873179542866175, 0.20316742672306592],
    [0.7699026741943047, 0.16007832854334622],
    [0.9041172563704749, 0.10693932599531843],
    [0.9815606342467192, 0.04717533638651183],
  ];

  /** M(x) - M(x + mu) without cancellation for small mu. */
  function millsDrop(x, mu) {
    if (mu > 1) return mills(x) - mills(x + mu);
    const middle = x + mu / 2;
    return (mu / 2) * GAUSS.reduce((sum, [node, weight]) => sum + weight * (millsSlope(middle - (node * mu) / 2) + millsSlope(middle + (node * mu) / 2)), 0);
  }

  const phi = (x) => Math.exp((-x * x) / 2 - LOG_SQRT_2PI);
  const normalCdf = (x) => (x < 0 ? phi(x) * mills(-x) : 1 - phi(x) * mills(x));
  const logNormalCdf = (x) => (x < 0 ? (-x * x) / 2 - LOG_SQRT_2PI + Math.log(mills(-x)) : Math.log1p(-phi(x) * mills(x)));

  /** Root of a decreasing f on [low, high] by bisection (f(low) >= 0 > f(high)). */
  function bisect(f, low, high, passes = 90) {
    for (let pass = 0; pass < passes && high - low > 1e-12 * Math.abs(high); pass++) {
      const middle = (low + high) / 2;
      if (f(middle) > 0) low = middle;
      else high = middle;
    }
    return (low + high) / 2;
  }

  /** Phi^-1(p) for p in (0, 1). */
  const normalQuantile = (p) => (p > 0.5 ? -normalQuantile(1 - p) : bisect((x) => Math.log(p) - logNormalCdf(x), -40, 0));

  // --- Gaussian releases: exact --------------------------------------------------------------------------------------------------

  /** ln delta(epsilon; mu) of a mu-GDP Gaussian mechanism. */
  function logDelta(mu, eps) {
    if (mu === 0) return -Infinity;
    const x = eps / mu - mu / 2;
    if (x <= 0 && mu > 1) return Math.log1p(-(normalCdf(x) + phi(x) * mills(x + mu)));
    return (-x * x) / 2 - LOG_SQRT_2PI + Math.log(millsDrop(x, mu));
  }

  /** Epsilon at delta of a mu-GDP mechanism. */
  function epsilon(mu, delta) {
    if (mu === 0) return 0;
    if (!(delta > 0) || mu === Infinity) return Infinity;
    const excess = (e) => logDelta(mu, e) - Math.log(delta);
    if (excess(0) <= 0) return 0;
    return bisect(excess, 0, mu * (mu / 2 - normalQuantile(delta)) * (1 + 1e-9)); // delta <= Phi(-x)
  }

  /** Largest true-positive rate at a false-positive rate against a mu-GDP release. */
  const tpr = (mu, fpr) => (fpr <= 0 ? 0 : fpr >= 1 || mu === Infinity ? 1 : normalCdf(normalQuantile(fpr) + mu));

  /** Largest true-positive rate that (epsilon, delta)-DP alone allows. */
  const tprOfPair = (eps, d, fpr) => (eps === Infinity ? 1 : Math.max(0, Math.min(1, Math.exp(eps) * fpr + d, 1 - Math.exp(-eps) * (1 - d - fpr))));

  // --- Poisson-sampled Gaussian releases: Renyi divergences at whole orders, an upper bound -------------------------------------------

  const range = (from, to, step = 1) => Array.from({ length: Math.floor((to - from) / step) + 1 }, (_, i) => from + i * step);
  const ORDERS = [...range(2, 64), ...range(68, 128, 4), ...range(144, 256, 16), ...range(288, 512, 32), 640, 768, 1024];

  /** L^p - 1 - p (L - 1), given ln L; at least 0 for p > 1. */
  function convex(p, log) {
    const excess = Math.expm1(log);
    if (Math.abs(p * excess) > 1e-2) return Math.exp(p * log) - 1 - p * excess;
    let term = (p * (p - 1) * excess * excess) / 2;
    let sum = term;
    for (let k = 3; k < 9; k++) sum += term *= ((p - k + 1) * excess) / k;
    return sum;
  }

  /** ln((1 - q) + q e^s). */
  const logMix = (rate, s) => (s < 30 ? Math.log1p(rate * Math.expm1(s)) : s + Math.log(rate) + Math.log1p(((1 - rate) / rate) * Math.exp(-s)));

  /**
   * ln(E_Q[(P/Q)^a] - 1) by the trapezoidal rule. P mixes N(0) with N(shift), the record present; Q mixes N(0) with N(shift - 1),
   * another in its place (replace-one, shift 1/2), or is N(0) (zero-out, shift 1).
   */
  function logExcess(rate, z, order, adjacency) {
    const shift = adjacency === "replace_one" ? 0.5 : 1;
    const [low, high] = [shift - 1 - 12 * z, order + 12 * z];
    const points = Math.ceil((high - low) / Math.min(0.5 * z, (order <= 64 ? 1.2 : Infinity) * z * z)) + 1;
    const step = (high - low) / (points - 1);
    const scale = Math.log(step) - Math.log(z) - LOG_SQRT_2PI;
    const mixed = (x, to) => (to === 0 ? 0 : logMix(rate, (to * x - (to * to) / 2) / (z * z))); // ln of a mixture over N(0), at x
    let [top, sum] = [-Infinity, 0];
    for (let i = 0; i < points; i++) {
      const x = low + i * step;
      const down = mixed(x, shift - 1);
      const log = mixed(x, shift) - down;
      const term = scale - (x * x) / (2 * z * z) + down + (order * log > 100 ? order * log : Math.log(Math.max(0, convex(order, log))));
      if (term > top) [sum, top] = [sum * Math.exp(top - term) + 1, term];
      else if (term > top - 40) sum += Math.exp(term - top);
    }
    return top + Math.log(sum);
  }

  const curves = new Map();
  /** The Renyi curve of one release; z = noise std / sensitivity of the adjacency. Orders are computed when asked for. */
  function curveOf(rate, z, adjacency) {
    const key = `${rate}|${z}|${adjacency}`;
    if (curves.has(key)) return curves.get(key);
    if (curves.size > 2000) curves.clear();
    const known = new Float64Array(ORDERS.length).fill(NaN);
    const compute = (order) => {
      const flat = order / (2 * z * z);
      if (rate === 0) return 0;
      if (rate === 1 || z < 0.1) return flat; // sampling hardly helps so little noise
      const log = logExcess(rate, z, order, adjacency);
      const total = log > 0 ? log + Math.log1p(Math.exp(-log)) : Math.log1p(Math.exp(log));
      return Math.min(total / (order - 1), flat);
    };
    const curve = { best: 20, at: (i) => (Number.isNaN(known[i]) ? (known[i] = compute(ORDERS[i])) : known[i]) };
    curves.set(key, curve);
    return curve;
  }
  const rdp = (rate, z, adjacency) => ORDERS.map((_, i) => curveOf(rate, z, adjacency).at(i));

  /** The least of f over the orders, from where it was found last. Every order gives a valid bound, so a search cannot harm. */
  function leastOver(curve, f) {
    let best = curve.best;
    let value = f(best);
    let step = 16;
    while (step >= 1) {
      const next = [best - step, best + step].filter((i) => i >= 0 && i < ORDERS.length).map((i) => [f(i), i]);
      const [least, index] = next.reduce((a, b) => (a[0] <= b[0] ? a : b), [Infinity, best]);
      if (least < value) [value, best] = [least, index];
      else step >>= 1;
    }
    curve.best = best;
    return value;
  }

  /** Epsilon of `count` sampled releases, Canonne, Kamath & Steinke 2020, Proposition 12: an upper bound. */
  function epsilonRdp(rate, z, count, target, adjacency) {
    if (rate === 0 || count === 0) return 0;
    const curve = curveOf(rate, z, adjacency);
    const at = (i) => count * curve.at(i) + Math.log1p(-1 / ORDERS[i]) - (Math.log(target) + Math.log(ORDERS[i])) / (ORDERS[i] - 1);
    return Math.max(0, leastOver(curve, at));
  }

  /** ln of the delta that the same curve proves at epsilon. */
  function logDeltaRdp(rate, z, count, eps, adjacency) {
    const curve = curveOf(rate, z, adjacency);
    const at = (i) => (ORDERS[i] - 1) * (count * curve.at(i) - eps + Math.log1p(-1 / ORDERS[i])) - Math.log(ORDERS[i]);
    return Math.min(0, leastOver(curve, at));
  }

  // --- whole runs: {mu, sampled: {rate, multiplier, count} or null} --------------------------------------------------------------------

  /** Epsilon of a run: that of mu, and where participation was sampled in secret the least of both bounds. */
  function runEpsilon({ mu, sampled }, delta, adjacency) {
    const plain = epsilon(mu, delta);
    return sampled ? Math.min(plain, epsilonRdp(sampled.rate, sampled.multiplier, sampled.count, delta, adjacency)) : plain;
  }

  /** Largest true-positive rate at each false-positive rate that a run leaves to an attacker. */
  function runTradeoff({ mu, sampled }, rates, adjacency) {
    const exact = rates.map((fpr) => tpr(mu, fpr));
    if (!sampled) return exact;
    const grid = Array.from({ length: 60 }, (_, i) => 0.02 * 1.15 ** i).filter((eps) => eps < 60);
    const deltas = grid.map((eps) => Math.exp(logDeltaRdp(sampled.rate, sampled.multiplier, sampled.count, eps, adjacency)));
    return rates.map((fpr, i) => grid.reduce((best, eps, j) => Math.min(best, tprOfPair(eps, deltas[j], fpr)), exact[i]));
  }

  return { ORDERS, bisect, epsilon, epsilonRdp, logDelta, normalCdf, rdp, runEpsilon, runTradeoff, tpr, tprOfPair };
})();
