// What the papers claim, as printed: by method, a function of the setting `p`, the rounds t, and the noise multiplier that one upload
// and the sum of a round carry. null where a theorem's condition fails. Words and scopes come with the methods, from fedveil.papers.
"use strict";

globalThis.veilClaims = (() => {
  const V = globalThis.veilPrivacy;
  const classical = (multiplier, delta) => Math.sqrt(2 * Math.log(1.25 / delta)) / multiplier;
  const zcdp = (rho, delta) => rho + 2 * Math.sqrt(rho * Math.log(1 / delta));
  const ofMu = (mu, { delta }) => ({ epsilon: V.epsilon(mu, delta), delta, mu });
  const localRate = (p) => Math.min(1, p.batch / p.records);

  /** sqrt(H_0) of the convergent-privacy paper, in units of gamma sqrt(m) / sigma: its Cauchy-Schwarz value, constant rho > 1. */
  const shiftedH0 = (rho, rounds) => {
    const end = Math.exp(-rounds * Math.log(rho)); // rho^-T
    return Math.sqrt((((rho + 1) / (rho - 1)) * (1 - end)) / (1 + end));
  };

  /** Distance a clipped FedProx trajectory can travel, in units of V / alpha. */
  function proxTravel(p) {
    const keep = Math.abs(1 - p.lr * p.prox);
    return keep === 1 ? p.lr * p.prox * p.steps : (p.lr * p.prox * (1 - keep ** p.steps)) / (1 - keep);
  }

  /** Mass of noise N(0, sigma^2) truncated to [-b, b] that a neighbour at distance `shift` cannot reach: a floor on delta. */
  function truncatedFloor(sigma, b, shift) {
    if (shift >= 2 * b) return 1;
    const mass = (from, to) => (from >= 0 ? V.normalCdf(-from) - V.normalCdf(-to) : V.normalCdf(to) - V.normalCdf(from));
    return mass((b - shift) / sigma, b / sigma) / mass(-b / sigma, b / sigma);
  }

  const CLAIMS = {
    "ladp-fl"(p, t, { upload }) {
      const times = localRate(p) * t;
      return { epsilon: times * classical(upload / 2, p.delta), delta: Math.min(1, times * p.delta) };
    },
    "fedglp-adp": (p, t, { sum }) => ({ epsilon: zcdp(t / (2 * sum ** 2), p.delta), delta: p.delta }),
    "noisy-fedavg": (p, t, { sum }) => ofMu((2 / sum) * (p.schedule === "stage" ? Math.sqrt(2 - 1 / t) : shiftedH0((1 + p.lr * p.smooth) ** p.steps, t)), p),
    "noisy-fedprox"(p, t, { sum }) {
      if (!(p.prox > p.smooth)) return null;
      const shape = Math.sqrt(((2 * p.prox - p.smooth) / p.smooth) * (1 - 2 / ((p.prox / (p.prox - p.smooth)) ** t + 1)));
      return ofMu(((2 / sum) * shape) / proxTravel(p), p);
    },
    fedanc: (p, t, { upload }) => ({ epsilon: Math.sqrt(t * p.density * p.dim) * classical(upload, p.delta), delta: p.delta }),
    "aldp-fl": (p, t, { upload }) => ({ epsilon: classical((upload * p.records) / 2, p.delta), delta: p.delta }),
    "blur-lus": (p, t, { sum }) => ({ epsilon: V.epsilonRdp(p.cohort / p.clients, sum, t, p.delta, "zero_out"), delta: p.delta }),
    "fed-dpa"(p, t, { sum }) {
      const [rate, share] = [p.cohort / p.clients, Math.min(1, p.batch / (p.clients * p.records))];
      const steps = rate * t * p.clients * p.steps; // of one DP-SGD run over all clients' records
      return { epsilon: V.epsilonRdp(share * rate, sum, steps, p.delta, "zero_out"), delta: p.delta };
    },
    "fed-addp"(p, t, { upload }) {
      const sigma = (e) => {
        const order = Math.ceil(Math.log2(1 / p.delta) / e + 1);
        const room = e + Math.log(p.delta) / (order - 1);
        return Math.sqrt((t * order) / (2 * room));
      };
      return { epsilon: V.bisect((e) => sigma(e) - upload, 1e-3, 1e6), delta: p.delta };
    },
    "fed-smp"(p, t, { sum }) {
      const a = (7 * (p.cohort / p.clients) ** 2 * t) / sum ** 2;
      return { epsilon: (a + Math.sqrt(a * a + 8 * a * Math.log(1 / p.delta))) / 2, delta: p.delta };
    },
  };

  /** Where noise is truncated: its bound, and the probability with which a coordinate moved by 2C is seen. */
  const FLOORS = {
    "aldp-fl"(p, noise) {
      const { epsilon } = CLAIMS["aldp-fl"](p, 1, noise);
      const bound = epsilon > 700 ? 1 : (Math.exp(epsilon) - p.eta) / (Math.exp(epsilon) + p.eta);
      return { bound, floor: truncatedFloor(noise.upload * p.clip, bound, 2 * p.clip) };
    },
  };

  return { CLAIMS, FLOORS, classical, localRate, shiftedH0, truncatedFloor, zcdp };
})();
