// The formulas of fedveil.privacy in the browser: same quantities, same names, same conventions (sensitivity units, natural logarithms).
"use strict";

globalThis.veilPrivacy = (() => {
  const SQRT_2PI = Math.sqrt(2 * Math.PI);
  const LOG_SQRT_2PI = Math.log(SQRT_2PI);

  // Chebyshev series of ln(M(s) / t) in 2t - 1, t = 1 / (1 + s/3), for the Mills ratio M(s) = (1 - Phi(s)) / phi(s), s >= 0 (4e-16).
  const MILLS = [
    -0.46464473087815655, 0.6706947514066739, 0.02954600794459064, -0.008772093335356106, -0.0013771315367105141, 0.00029325569469087484,
    6.88295067036556e-5, -1.500185344797059e-5, -3.6180755686353743e-6, 9.740054462019104e-7, 1.8233490112256695e-7, -6.99817066228478e-8,
    -7.4153836174048905e-9, 5.038061766213325e-9, 8.469255263425854e-11, -3.361968495457461e-10, 2.6773754507148496e-11,
    1.8989623487676472e-11, -3.8483658768159096e-12, -7.380337185039811e-13, 3.337454848752385e-13, -1.163757019327542e-15,
    -1.945848356378969e-14, 3.164979430380192e-15, 5.08978053399745e-16, -2.662824864314311e-16,
  ];

  function mills(s) {
    if (s < 0) return SQRT_2PI * Math.exp((s * s) / 2) - mills(-s);
    const t = 1 / (1 + s / 3);
    const twice = 2 * (2 * t - 1);
    let a = 0;
    let b = 0;
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

  function gaussLegendre(n) {
    const nodes = [];
    for (let i = 1; i <= n; i++) {
      let x = Math.cos((Math.PI * (i - 0.25)) / (n + 0.5));
      let slope = 1;
      for (let pass = 0; pass < 50; pass++) {
        let [p, q] = [1, 0];
        for (let j = 1; j <= n; j++) [p, q] = [((2 * j - 1) * x * p - (j - 1) * q) / j, p];
        slope = (n * (x * p - q)) / (x * x - 1);
        const step = p / slope;
        x -= step;
        if (Math.abs(step) < 1e-15) break;
      }
      nodes.push([x, 2 / ((1 - x * x) * slope * slope)]);
    }
    return nodes;
  }
  const GAUSS_12 = gaussLegendre(12);

  /** M(x) - M(x + mu) without cancellation for small mu. */
  function millsDrop(x, mu) {
    if (mu > 1) return mills(x) - mills(x + mu);
    return 0.5 * mu * GAUSS_12.reduce((sum, [node, weight]) => sum + weight * millsSlope(x + 0.5 * mu * (node + 1)), 0);
  }

  const phi = (x) => Math.exp((-x * x) / 2) / SQRT_2PI;
  const normalCdf = (x) => (x < 0 ? phi(x) * mills(-x) : 1 - phi(x) * mills(x));
  const logNormalCdf = (x) => (x < 0 ? (-x * x) / 2 - LOG_SQRT_2PI + Math.log(mills(-x)) : Math.log1p(-phi(x) * mills(x)));

  /** Phi^-1(p) for p in (0, 1), by Newton on ln Phi, which is concave. */
  function normalQuantile(p) {
    if (p > 0.5) return -normalQuantile(1 - p);
    const target = Math.log(p);
    let x = p > 0.02 ? 0 : -Math.sqrt(-2 * target);
    for (let pass = 0; pass < 60; pass++) {
      const step = (logNormalCdf(x) - target) * mills(-x);
      x -= step;
      if (Math.abs(step) < 1e-15 * (1 + Math.abs(x))) break;
    }
    return x;
  }

  /** ln delta(epsilon; mu) of a mu-GDP Gaussian mechanism, exact. */
  function logDelta(mu, epsilon) {
    if (mu === 0) return -Infinity;
    const x = epsilon / mu - mu / 2;
    if (x <= 0 && mu > 1) return Math.log1p(-(normalCdf(x) + phi(x) * mills(x + mu)));
    return (-x * x) / 2 - LOG_SQRT_2PI + Math.log(millsDrop(x, mu));
  }
  const delta = (mu, epsilon) => Math.exp(logDelta(mu, epsilon));

  /** Root of a decreasing f on [low, high] by bisection (f(low) >= 0 > f(high)). */
  function bisect(f, low, high, passes = 90) {
    for (let pass = 0; pass < passes && high - low > 1e-15 * Math.abs(high); pass++) {
      const middle = (low + high) / 2;
      if (f(middle) > 0) low = middle;
      else high = middle;
    }
    return (low + high) / 2;
  }

  /** The exact epsilon at delta of a mu-GDP mechanism: Newton on the concave ln delta, inside a bracket. */
  function epsilon(mu, target) {
    if (mu === 0) return 0;
    if (!(target > 0) || mu === Infinity) return Infinity;
    const goal = Math.log(target);
    if (logDelta(mu, 0) <= goal) return 0;
    let low = 0;
    let high = mu * (mu / 2 - normalQuantile(target)) * (1 + 1e-9); // delta <= Phi(-x)
    let e = high;
    for (let pass = 0; pass < 100; pass++) {
      const value = logDelta(mu, e);
      if (value > goal) low = e;
      else high = e;
      const x = e / mu - mu / 2;
      const slope = -Math.exp((-x * x) / 2 - LOG_SQRT_2PI + Math.log(mills(x + mu)) - value);
      let next = e - (value - goal) / slope;
      if (!(next > low && next < high)) next = (low + high) / 2;
      if (Math.abs(next - e) <= 1e-14 * e || high - low <= 1e-15 * high) return next;
      e = next;
    }
    return e;
  }

  /** The largest mu that is (epsilon, delta)-DP. */
  function muOf(eps, target) {
    const goal = Math.log(target);
    return Math.exp(bisect((logMu) => goal - logDelta(Math.exp(logMu), eps), -40, 40, 200));
  }

  /** Largest true-positive rate at a false-positive rate against a mu-GDP release. */
  const tpr = (mu, fpr) => (fpr <= 0 ? 0 : fpr >= 1 || mu === Infinity ? 1 : normalCdf(normalQuantile(fpr) + mu));

  /** Largest true-positive rate that (epsilon, delta)-DP alone allows. */
  const tprOfPair = (eps, d, fpr) =>
    eps === Infinity ? 1 : Math.max(0, Math.min(1, Math.exp(eps) * fpr + d, 1 - Math.exp(-eps) * (1 - d - fpr)));

  // --- Poisson sampling: Renyi divergences at whole orders, an upper bound -------------------------------------------------------

  const range = (from, to, step = 1) => Array.from({ length: Math.floor((to - from) / step) + 1 }, (_, i) => from + i * step);
  const ORDERS = [...range(2, 64), ...range(68, 128, 4), ...range(144, 256, 16), ...range(288, 512, 32), 640, 768, 1024];
  const LOG_FACTORIAL = [0];
  for (let k = 1; k <= 1024; k++) LOG_FACTORIAL.push(LOG_FACTORIAL[k - 1] + Math.log(k));

  /** E_Q[(P/Q)^a] - 1 in logarithms, Mironov, Talwar & Zhang 2019, less the terms that sum to 1. */
  function logExcess(rate, lifts, order) {
    const [stay, join] = [Math.log1p(-rate), Math.log(rate)];
    const terms = new Float64Array(order - 1);
    let top = -Infinity;
    for (let k = 2; k <= order; k++) {
      const choose = LOG_FACTORIAL[order] - LOG_FACTORIAL[k] - LOG_FACTORIAL[order - k];
      const term = choose + (order - k) * stay + k * join + lifts[k];
      terms[k - 2] = term;
      if (term > top) top = term;
    }
    let sum = 0;
    for (const term of terms) if (term > top - 45) sum += Math.exp(term - top);
    return top + Math.log(sum);
  }

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

  /** ln(E_Q[(P/Q)^a] - 1), P and Q mixing N(0) with N(1/2) and with N(-1/2): replace-one, by the trapezoidal rule. */
  function logExcessReplace(rate, z, order) {
    const [low, high] = [-0.5 - 12 * z, order + 12 * z];
    const points = Math.ceil((high - low) / Math.min(0.5 * z, (order <= 64 ? 1.2 : Infinity) * z * z)) + 1;
    const step = (high - low) / (points - 1);
    const scale = Math.log(step) - Math.log(z) - LOG_SQRT_2PI;
    let [top, sum] = [-Infinity, 0];
    for (let i = 0; i < points; i++) {
      const x = low + i * step;
      const down = logMix(rate, (-x - 0.25) / (2 * z * z));
      const log = logMix(rate, (x - 0.25) / (2 * z * z)) - down;
      const term = scale - (x * x) / (2 * z * z) + down + (order * log > 100 ? order * log : Math.log(Math.max(0, convex(order, log))));
      if (term > top) [sum, top] = [sum * Math.exp(top - term) + 1, term];
      else if (term > top - 40) sum += Math.exp(term - top);
    }
    return top + Math.log(sum);
  }

  const curves = new Map();
  /** The Renyi curve of one Poisson-sampled Gaussian release; z = noise std / sensitivity of the adjacency. Orders are computed when asked for. */
  function curveOf(rate, z, adjacency) {
    const key = `${rate}|${z}|${adjacency}`;
    if (curves.has(key)) return curves.get(key);
    if (curves.size > 2000) curves.clear();
    const known = new Float64Array(ORDERS.length).fill(NaN);
    const lifts = [0, 0];
    const lift = (k) => {
      for (let j = lifts.length; j <= k; j++) {
        const growth = (j * (j - 1)) / (2 * z * z);
        lifts.push(growth + Math.log(-Math.expm1(-growth)));
      }
      return lifts;
    };
    const compute = (order) => {
      const flat = order / (2 * z * z);
      if (rate === 0) return 0;
      if (rate === 1 || z < 0.1) return flat; // sampling hardly helps so little noise
      const log = adjacency === "replace_one" ? logExcessReplace(rate, z, order) : logExcess(rate, lift(order), order);
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

  // --- conversions and bounds that papers use ------------------------------------------------------------------------------------

  const classicalMultiplier = (eps, d) => Math.sqrt(2 * Math.log(1.25 / d)) / eps;
  const classicalEpsilon = (multiplier, d) => Math.sqrt(2 * Math.log(1.25 / d)) / multiplier;
  const zcdpEpsilon = (rho, d) => rho + 2 * Math.sqrt(rho * Math.log(1 / d));

  /** sqrt(H_0) of the convergent-privacy paper, in units of gamma sqrt(m) / sigma: its Cauchy-Schwarz value, constant rho > 1. */
  const shiftedH0 = (rho, rounds) => {
    const end = Math.exp(-rounds * Math.log(rho)); // rho^-T
    return Math.sqrt((((rho + 1) / (rho - 1)) * (1 - end)) / (1 + end));
  };

  /** Mass of noise N(0, sigma^2) truncated to [-b, b] that a neighbour at distance `shift` cannot reach: a floor on delta. */
  function truncatedFloor(sigma, b, shift) {
    if (shift >= 2 * b) return 1;
    const mass = (from, to) => (from >= 0 ? normalCdf(-from) - normalCdf(-to) : normalCdf(to) - normalCdf(from));
    return mass((b - shift) / sigma, b / sigma) / mass(-b / sigma, b / sigma);
  }

  return {
    ORDERS, bisect, classicalEpsilon, classicalMultiplier, delta, epsilon, epsilonRdp, logDelta, logDeltaRdp, logNormalCdf, mills, muOf,
    normalCdf, normalQuantile, rdp, shiftedH0, tpr, tprOfPair, truncatedFloor, zcdpEpsilon,
  };
})();
