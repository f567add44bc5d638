"""GFL-ALDPA (Yang et al. 2024): another epsilon in each round, and an update of fewer coordinates, so that less is noised.

Published: the client's own largest coordinates, and classical noise for each round's epsilon. Proven: coordinates that a public
seed draws, the same growth of the budget in units of mu, and the exact cost of all rounds together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.gaussian import classical_noise_multiplier
from fedveil.accounting.types import Adjacency, Claim, Event, Gaussian, Scope, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Released
from fedveil.methods.adaptive import paper_epsilon, refuse_dp_sgd
from fedveil.methods.base import (
    MethodConfig,
    Release,
    Schedule,
    Setting,
    Unproven,
    Variant,
    calibrated,
    gaussian_plan,
    gaussian_releases,
    sum_noise,
)

if TYPE_CHECKING:
    from torch import Tensor

_REASON = "which coordinates leave is decided by the raw update, and the noise is for the mean of clipped examples (GFL-ALDPA)"


class GFLALDPA(MethodConfig):
    """A budget that grows over the rounds, and updates reduced to a share of their coordinates (GFL-ALDPA, Yang et al. 2024).

    Args:
        variant: published or proven.
        keep: rho, the share of the coordinates that leave.
        growth: p; the budget of round s, from 1, is proportional to s^p.
        clip: L2 bound on the reduced update.
        budget: published; whether privacy.epsilon is that of the whole `run`, or of a `round` on average.
        sensitivity: published; of an `update`, 2 C, or of a `mean` over the examples, 2 C / |D|, as ALDP-FL computes its.
        seed: proven; of the public choice of coordinates.
    """

    reconstructed: ClassVar[str] = (
        "the paper's abstract says that rounds get different budgets and that a dimension reduction compresses updates; how the "
        "budget grows, which coordinates are chosen and how much noise is added are ours"
    )
    name: Literal["gfl-aldpa"] = "gfl-aldpa"
    variant: Variant = "proven"
    keep: float = Field(0.1, gt=0, le=1)
    growth: float = Field(1.0, ge=0, le=10)
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    budget: Literal["run", "round"] = "run"
    sensitivity: Literal["update", "mean"] = "update"
    seed: int = Field(0, ge=0)

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: noise from each round's epsilon."""
        refuse_dp_sgd(s, self.name)
        if self.variant == "published":
            paper_epsilon(s, self.name)
            return s
        if s.sampling == "poisson":
            raise ConfigError(
                "gfl-aldpa adds less noise in each round than in the one before, which is priced round by round without "
                "amplification: set training.sampling = 'fixed'"
            )
        return calibrated(self, s)

    def release(self, s: Setting) -> Release:
        """Proven: everything follows from the round. Published: the largest coordinates of the update."""
        return Growing(self) if self.variant == "proven" else Unproven(("largest coordinates",), _REASON, self.of_largest)

    def of_largest(self, s: Setting, seen: Released, update: Tensor) -> Plan:
        """Published: the largest coordinates of the update, and the noise of the round."""
        place: Literal["sum", "upload"] = "sum" if sum_noise(s) else "upload"
        std, support = self.published_std(s, seen.round), largest(update, self.kept(s))
        return Plan(clip=self.clip, noise_std=std, place=place, support=support)

    def kept(self, s: Setting) -> int:
        """How many coordinates leave."""
        return max(1, round(self.keep * s.layout.dimension))

    def releases(self, s: Setting, view: View) -> list[Event]:
        """The exact mu of all rounds a client may be in, the dearest ones; nothing for the published variant."""
        if self.variant == "published":
            return super().releases(s, view)
        (each,) = gaussian_releases(s, view)
        if not isinstance(each, Gaussian):
            return [each]
        weights = sorted((self.weight(t, s.rounds) for t in range(s.rounds)), reverse=True)
        return [Gaussian(each.mu * math.hypot(*weights[: s.participations]))]

    def claim(self, s: Setting) -> Claim | None:
        """Epsilon as the sum over the rounds, or of a round, for one record."""
        if self.variant == "proven":
            return None
        scope = Scope(Unit.RECORD, Adjacency.REPLACE_ONE, View.SERVER)
        note = "summed over the rounds" if self.budget == "run" else "per round on average; not composed"
        return Claim(paper_epsilon(s, self.name), s.delta, scope, "GFL-ALDPA, reconstructed", note)

    def weight(self, round: int, rounds: int) -> float:
        """mu of that round (from 0) in units of the quadratic mean over all rounds; proportional to s^p."""
        return float((round + 1) ** self.growth * math.sqrt(rounds / _power_sum(2 * self.growth, rounds)))

    def epsilon(self, s: Setting, round: int) -> float:
        """Epsilon of that round (from 0): its share s^p / sum s^p of the budget of the run."""
        total = paper_epsilon(s, self.name) * (1 if self.budget == "run" else s.rounds)
        return float(total * (round + 1) ** self.growth / _power_sum(self.growth, s.rounds))

    def published_std(self, s: Setting, round: int) -> float:
        """sigma_t = sensitivity sqrt(2 ln(1.25 / delta_t)) / epsilon_t, with delta / T a round where epsilon is the run's."""
        delta = s.delta / (s.rounds if self.budget == "run" else 1)
        sensitivity = 2 * self.clip / (s.known_records if self.sensitivity == "mean" else 1)
        return sensitivity * classical_noise_multiplier(self.epsilon(s, round), delta)


@lru_cache(maxsize=16)
def _power_sum(power: float, rounds: int) -> float:
    """1^p + ... + T^p, which each of the T rounds asks for."""
    return float(sum(t**power for t in range(1, rounds + 1)))


@dataclass(frozen=True)
class Growing(Schedule):
    """Less noise in each round, on coordinates drawn by a public seed."""

    method: GFLALDPA

    def plan(self, s: Setting, t: int) -> Plan:
        m, plan = self.method, gaussian_plan(s, self.method.clip)
        std = float(plan.noise_std) / m.weight(t, s.rounds)
        return replace(plan, noise_std=std, support=drawn(s.layout.dimension, m.kept(s), m.seed, t))


def largest(update: Tensor, kept: int) -> Tensor:
    """The `kept` coordinates of largest absolute value, as a mask [d]."""
    import torch

    mask = torch.zeros_like(update, dtype=torch.bool)
    mask[update.abs().topk(kept).indices] = True
    return mask


def drawn(dimension: int, kept: int, seed: int, round: int) -> Tensor:
    """`kept` coordinates without replacement, as a mask [d]: the same for everybody who knows seed and round."""
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + round)
    mask = torch.zeros(dimension, dtype=torch.bool)
    mask[torch.randperm(dimension, generator=generator)[:kept]] = True
    return mask
