"""The pair of worlds that refutes the convergent privacy of Noisy-FedAvg at constant learning rates (Theorem 3a).

Client 0's loss is linear in one coordinate, +V w_e or -V w_e; every other client is flat there. Linear losses are L-smooth
for every L, so the theorem covers them. Each round moves w_e by plus or minus lr V K / m and adds N(0, sigma^2 / m). No step
contracts, so the final model alone is exactly mu-GDP with mu = 2 lr V K sqrt(T / m) / sigma, which grows like sqrt(T) and
exceeds every claim that converges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting.types import Adjacency, Audit, Scope, Unit, View
from fedveil.audit.two_world import Rates, audit_gdp, midpoint, rates
from fedveil.errors import ConfigError
from fedveil.papers.convergent_dp.claim import FedAvgClaim, StepRates

FINAL_MODEL = Scope(Unit.CLIENT, Adjacency.REPLACE_ONE, View.FINAL)


@dataclass(frozen=True)
class LinearRun:
    """A run of noisy FedAvg at a constant rate.

    rounds: T. clients: m, all in every round. steps: local steps K. clip: gradient clip V. lr: learning rate. noise_std: sigma on
    each upload. smoothness: L, used by the claim only.
    """

    rounds: int
    clients: int = 20
    steps: int = 5
    clip: float = 10.0
    lr: float = 0.01
    noise_std: float = 0.5
    smoothness: float = 10.0

    def __post_init__(self) -> None:
        if min(self.rounds, self.clients, self.steps) < 1 or min(self.clip, self.lr, self.noise_std, self.smoothness) <= 0:
            raise ConfigError(f"counts must be >= 1 and scales > 0, got {self}")

    @property
    def claimed_mu(self) -> float:
        """mu of the final model, as claimed (Theorem 3a, Eq. 15)."""
        return FedAvgClaim(
            StepRates.CONSTANT,
            learning_rate=self.lr,
            clip=self.clip,
            steps=self.steps,
            smoothness=self.smoothness,
            rounds=self.rounds,
            clients=self.clients,
            noise_std=self.noise_std,
        ).mu

    @property
    def true_mu(self) -> float:
        """The exact mu of the final model on this pair of worlds."""
        return 2 * self.lr * self.clip * self.steps * math.sqrt(self.rounds / self.clients) / self.noise_std

    def final_coordinate(self, world: int, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Simulate w_e after all rounds in n runs of `world`: clients train, clip and add noise; the server averages."""
        slope = np.zeros(self.clients)
        slope[0] = 1.5 * self.clip if world else -1.5 * self.clip
        model = np.zeros(n)
        for _ in range(self.rounds):
            local = np.repeat(model[:, None], self.clients, axis=1)
            for _ in range(self.steps):
                local -= self.lr * np.clip(-slope, -self.clip, self.clip)
            local += self.noise_std * rng.standard_normal(local.shape)
            model = local.mean(axis=1)
        return model


def counts(run: LinearRun, rng: np.random.Generator, *, n: int = 5000, pilot: int = 200) -> Rates:
    """Return error counts of the midpoint test on the final model; the midpoint comes from separate runs."""
    pilots = run.final_coordinate(0, pilot, rng), run.final_coordinate(1, pilot, rng)
    return rates(run.final_coordinate(0, n, rng), run.final_coordinate(1, n, rng), midpoint(*pilots))


def audit_linear_loss(
    run: LinearRun, rng: np.random.Generator, *, n: int = 5000, delta: float = 1e-5, alpha: float = 0.05
) -> tuple[float, Audit]:
    """Return (lower bound on mu, audit): a bound above `run.claimed_mu` refutes the claim at confidence 1 - alpha.

    Args:
        run: the configuration.
        rng: generator of all randomness.
        n: tested runs per world.
        delta: at which epsilon is reported; the pair's trade-off curve is Gaussian.
        alpha: error probability.
    """
    found = counts(run, rng, n=n)
    note = f"claimed mu = {run.claimed_mu:.4g}, exact mu of this pair = {run.true_mu:.4g}"
    return found.mu(alpha), audit_gdp(found, delta, FINAL_MODEL, alpha, note=note, test="two worlds, linear losses")
