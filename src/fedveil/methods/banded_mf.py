"""Banded matrix factorisation (DP-FTRL): noise correlated over the rounds, so that later rounds cancel part of it.

The server's model is a prefix sum of the rounds' means, in which independent noise accumulates. Noise C^-1 Z with a banded C
accumulates far less, but needs a participation rule: a client takes part at most every `separation` rounds.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedveil.accounting.correlated_noise import dyadic, square_root_coefficients
from fedveil.errors import ConfigError
from fedveil.mechanism.mechanisms import DYADIC_BITS, Banded, Participation
from fedveil.mechanism.plan import Plan
from fedveil.methods.base import Fixed, MethodConfig, Release, Setting, calibrated, sum_noise
from fedveil.methods.shared import refuse_dp_sgd


class BandedMF(MethodConfig):
    """DP-FedAvg with noise correlated over the rounds (Choquette-Choo et al. 2023; Kairouz et al. 2021).

    C is the band of the square root of the prefix sum matrix, c_j = binom(2j, j) / 4^j, rounded to multiples of 2^-10.

    Args:
        clip: C, L2 bound on each client's update.
        separation: b, least distance in rounds between two participations of a client; the sampler enforces it.
        band: width of the matrix; by default b. 1 is independent noise, T the whole square root.
    """

    name: Literal["banded-mf"] = "banded-mf"
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    separation: int = Field(10, ge=1)
    band: int | None = Field(None, ge=1)

    def calibrate(self, s: Setting) -> Setting:
        """Calibrate the noise to the configured epsilon: one Gaussian release for the whole run."""
        refuse_dp_sgd(s, self.name)
        if not sum_noise(s):
            raise ConfigError("banded-mf adds correlated noise to sums: set privacy.view = 'aggregate' or 'final'")
        if s.sampling != "fixed" or s.min_survivors is not None or s.max_participations is not None:
            raise ConfigError(
                "banded-mf has a participation rule of its own and releases every round: set training.sampling = 'fixed', and "
                "leave privacy.min_survivors and privacy.max_participations out"
            )
        if s.grid_bits is not None:
            raise ConfigError(f"privacy.grid_bits = {s.grid_bits}: banded-mf has a grid of its own; leave it out")
        if s.clients < s.cohort * min(self.separation, s.rounds):
            raise ConfigError(
                f"method.separation = {self.separation} rounds of training.clients_per_round = {s.cohort} need "
                f"{s.cohort * self.separation} clients, and there are {s.clients}: lower one of them"
            )
        return calibrated(self, s)

    def release(self, s: Setting) -> Release:
        """Use the same clip and noise in every round and one mechanism for the run; a client is in at most ceil(T / b) rounds."""
        band = min(self.band or self.separation, s.rounds)
        coefficients = dyadic(square_root_coefficients(band), DYADIC_BITS)
        rule = Participation(-(-s.rounds // self.separation), self.separation)
        mechanism = Banded(tuple(coefficients.tolist()), s.rounds, rule)
        return Fixed(Plan(clip=self.clip, noise_std=s.z * self.clip, place="sum", mechanism=mechanism))
