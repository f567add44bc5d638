"""Baselines of ALDP-FL: LDP-Fed (Truex et al. 2020) and GFL-ALDPA (Yang et al. 2024).

LDP-Fed, published: each value is perturbed on a finite grid, with an epsilon for each step of distance (or, as in the comparison
of ALDP-FL, each gradient gets classical Gaussian noise). Proven: the same layers and bounds, an L2 clip and the door's noise.

GFL-ALDPA, published: a client sends its largest coordinates, with classical noise for each round's epsilon. Proven: a public seed
draws the coordinates, the budget grows in the same way in units of mu, and the cost of all rounds together is exact.
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
from fedveil.methods.base import (
    MethodConfig,
    Release,
    Schedule,
    Setting,
    Unproven,
    Variant,
    Weighting,
    calibrated,
    gaussian_plan,
    gaussian_releases,
    planned_releases,
    sum_noise,
)
from fedveil.methods.shared import TwoVariants, paper_epsilon, refuse_dp_sgd
from fedveil.training.local import Client, Local, Plain, clip_

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.training.params import Layout


_REASONS = {
    "ordinal": "alpha protects neighbouring steps of a grid; values 2c apart differ by alpha 2c 10^precision in all (LDP-Fed)",
    "gaussian": "noise for the mean of clipped examples on the gradient of a clipped batch, never composed (LDP-Fed)",
}


class LDPFed(TwoVariants):
    """Fixed bounds and fixed noise on each client, which sends its layers in turns (LDP-Fed, Truex et al. 2020).

    Args:
        variant: published or proven.
        mechanism: published; `ordinal`, each value of the update on a grid, privacy.epsilon being alpha of the paper; `gaussian`,
            clip and noise on each batch's gradient, as ALDP-FL describes this method.
        bound: c, to which each value is clamped: before the noise (ordinal), or after it (proven; free post-processing).
        precision: ordinal; values are rounded to this many decimal digits.
        clip: L2 bound on each gradient (gaussian), or on the update (proven).
        layers_a_round: number of layers of the network that are sent in a round, in turns from the last to the first; 0 for all.
    """

    reconstructed: ClassVar[str] = (
        "the grid, the budget of a value and the turns of layers are recalled of Truex et al. 2020, not read there; that the "
        "last layer comes first, and all of mechanism = 'gaussian' beyond 'fixed clipping and fixed noise', are ours"
    )
    name: Literal["ldp-fed"] = "ldp-fed"
    proven_difference: ClassVar[str] = (
        "the update is clipped in L2 norm and has Gaussian noise instead of a perturbation of each value, and the clamp "
        "follows the noise"
    )
    published_weighting: ClassVar[Weighting] = "uniform"
    mechanism: Literal["ordinal", "gaussian"] = "ordinal"
    bound: float = Field(1.0, gt=0, allow_inf_nan=False)
    precision: int = Field(10, ge=0, le=12)
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    layers_a_round: int = Field(0, ge=0)

    @property
    def unproven(self) -> str:
        return _REASONS[self.mechanism]

    def release(self, s: Setting) -> Release:
        """Send the layers of the round; proven: with clip, noise and a clamp."""
        if self.variant == "proven":
            return Turns(self)
        return Unproven(("values perturbed in training",), self.unproven, self.perturbed)

    def perturbed(self, s: Setting, released: Released, update: Tensor) -> Plan:
        """Published: send the layers of the round as training made them."""
        return Plan(support=turn(s.layout, self.layers_a_round, released.round))

    def client(self, s: Setting) -> Client:
        """Proven: plain training. Published: training with perturbation."""
        if self.variant == "proven":
            return Plain()
        if self.mechanism == "gaussian":
            return NoisyGradients(clip=self.clip, factor=classical_noise_multiplier(paper_epsilon(s, self.name), s.delta))
        alpha = paper_epsilon(s, self.name) / s.rounds
        return Ordinal(bound=self.bound, precision=self.precision, alpha=alpha, layers=self.layers_a_round)

    def clamped(self, s: Setting) -> Plan:
        """Clip, add noise, then clamp: each upload in the server view, so that a sum has less noise than its shares."""
        return replace(gaussian_plan(s, self.clip), clamp=self.bound * (s.cohort if sum_noise(s) else 1))

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Proven: mu is f / z per round; uploads that are clamped one by one get no credit for the summed noise."""
        return planned_releases(self.clamped(s), s, view) if self.variant == "proven" else super().releases(s, view)

    def claim(self, s: Setting) -> Claim | None:
        """Ordinal: alpha for the whole run, by sequential composition. Gaussian: epsilon for one batch."""
        if self.variant == "proven":
            return None
        epsilon = paper_epsilon(s, self.name)
        if self.mechanism == "gaussian":
            scope = Scope(Unit.RECORD, Adjacency.REPLACE_ONE, View.SERVER)
            return Claim(epsilon, s.delta, scope, "LDP-Fed as ALDP-FL compares it", "per batch; not composed")
        scope = Scope(Unit.CLIENT, Adjacency.REPLACE_ONE, View.SERVER)
        return Claim(
            epsilon, 0.0, scope, "LDP-Fed, condensed local privacy", "for values one step of the grid apart, not for any"
        )


@dataclass(frozen=True)
class Turns(Schedule):
    """Layers in turns, from the last to the first."""

    method: LDPFed

    def plan(self, s: Setting, t: int) -> Plan:
        return replace(self.method.clamped(s), support=turn(s.layout, self.method.layers_a_round, t))


@dataclass(frozen=True)
class Ordinal(Plain):
    """Published: clamp and round the values of the round's layers, and perturb each with an equal share of alpha."""

    bound: float = 1.0
    precision: int = 10
    alpha: float = 1.0
    layers: int = 0

    def finish(self, local: Local) -> Tensor:
        import torch

        update, support = super().finish(local), turn(local.model.layout, self.layers, local.round)
        shared = torch.ones_like(update, dtype=torch.bool) if support is None else support.to(update.device)
        grid, rate = 10.0**self.precision, self.alpha / max(int(shared.sum()), 1) / 2
        values = (update[shared].double().clamp(-self.bound, self.bound) * grid).round()
        uniform = torch.special.ndtr(local.noise(local.model.layout.dimension)[shared].double())
        noisy = truncated_laplace(values, uniform, rate, self.bound * grid) / grid
        local.noised(local.model.layout.norms(shared.to(update.dtype)).square() * laplace_variance(1 / rate / grid, self.bound))
        return torch.zeros_like(update).masked_scatter(shared, noisy.to(update.dtype))


@dataclass(frozen=True)
class NoisyGradients(Plain):
    """Published, as ALDP-FL describes it: each batch's gradient is clipped to C and gets noise of std 2C / |D| times a factor."""

    clip: float = 1.0
    factor: float = 1.0

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        loss = local.gradient(local, x, y)
        clip_(local.model.grad, self.clip)
        std, layout = 2 * self.clip / max(local.examples, 1) * self.factor, local.model.layout
        local.model.grad.add_(local.noise(layout.dimension), alpha=std)
        local.noised_gradient(local.model.grad.new_tensor([std**2 * n for n in layout.sizes]))
        local.descend()
        return loss


# --- turns and noise -----------------------------------------------------------------------------------------------------


def turn(layout: Layout, layers: int, round: int) -> Tensor | None:
    """Return the coordinates [d] of the layers that are sent in this round; None for all.

    Tensors whose names differ only in the last part (weight and bias) are one layer.
    """
    import torch

    owners = [name.rpartition(".")[0] or name for name in layout.names]
    order = list(dict.fromkeys(reversed(owners)))
    if not 0 < layers < len(order):
        return None
    mine = {order[(round * layers + i) % len(order)] for i in range(layers)}
    return layout.expand(torch.tensor([owner in mine for owner in owners]))


def truncated_laplace(values: Tensor, uniform: Tensor, rate: float, most: float) -> Tensor:
    """Draw integers y in [-most, most] with P(y) proportional to exp(-rate |y - value|), by inversion of `uniform` in (0, 1).

    Args:
        values: integers [n] in double precision. uniform: [n]. rate: > 0, the decrease of the exponent per step of distance.
    """
    left = (
        -(-rate * (values + most)).expm1() * (values.new_tensor(-rate)).exp()
    )  # probability weight below the value, times 1 - e^-rate
    right = -(-rate * (most - values + 1)).expm1()  # probability weight of the value and of all above
    target = uniform * (left + right)
    below = 1 + (-(-(target * values.new_tensor(rate).exp())).log1p() / rate).floor()
    above = (-(-(target - left).clamp(0, 1 - 1e-16)).log1p() / rate).floor()
    drawn: Tensor = (values - below).where(target < left, values + above)
    return drawn.clamp(-most, most)


def laplace_variance(scale: float, bound: float) -> float:
    """Variance of Laplace noise of that scale around 0 on [-bound, bound]: 2 s^2 - (c^2 + 2 c s) e^(-c/s) / (1 - e^(-c/s))."""
    ratio = bound / scale
    if ratio < 1e-3:  # nearly uniform: the formula cancels
        return bound**2 / 3
    return 2 * scale**2 - (bound**2 + 2 * bound * scale) * math.exp(-ratio) / -math.expm1(-ratio)


_REASON = "which coordinates leave is decided by the raw update, and the noise is for the mean of clipped examples (GFL-ALDPA)"


class GFLALDPA(MethodConfig):
    """A budget that grows over the rounds, and updates reduced to a share of their coordinates (GFL-ALDPA, Yang et al. 2024).

    Args:
        variant: published or proven.
        keep: rho, the share of the coordinates that are sent.
        growth: p; the budget of round s, from 1, is proportional to s^p.
        clip: L2 bound on the reduced update.
        budget: published; whether privacy.epsilon is for the whole `run`, or for a `round` on average.
        sensitivity: published; 2 C (of an `update`) or 2 C / |D| (of a `mean` over examples), as in ALDP-FL.
        seed: proven; public seed of the chosen coordinates.
    """

    reconstructed: ClassVar[str] = (
        "the paper's abstract says that rounds get different budgets and that a dimension reduction compresses updates; how the "
        "budget grows, which coordinates are chosen and how much noise is added are ours"
    )
    name: Literal["gfl-aldpa"] = "gfl-aldpa"
    proven_difference: ClassVar[str] = (
        "a public seed draws the coordinates instead of their size, and the growing budget is divided in units of mu, which "
        "compose exactly"
    )
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
        """Proven: a plan that depends on the round only. Published: the largest coordinates of the update."""
        return Growing(self) if self.variant == "proven" else Unproven(("largest coordinates",), _REASON, self.of_largest)

    def of_largest(self, s: Setting, released: Released, update: Tensor) -> Plan:
        """Published: the largest coordinates of the update, and the noise of the round."""
        place: Literal["sum", "upload"] = "sum" if sum_noise(s) else "upload"
        std, support = self.published_std(s, released.round), largest(update, self.kept(s))
        return Plan(clip=self.clip, noise_std=std, place=place, support=support)

    def kept(self, s: Setting) -> int:
        """The number of coordinates that are sent."""
        return max(1, round(self.keep * s.layout.dimension))

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Return the exact mu of the most expensive rounds that a client can be in; nothing for the published variant."""
        if self.variant == "published":
            return super().releases(s, view)
        (each,) = gaussian_releases(s, view)
        if not isinstance(each, Gaussian):
            return [each]
        weights = sorted((self.weight(t, s.rounds) for t in range(s.rounds)), reverse=True)
        return [Gaussian(each.mu * math.hypot(*weights[: s.participations]))]

    def claim(self, s: Setting) -> Claim | None:
        """Epsilon summed over the rounds, or of a round, for one record."""
        if self.variant == "proven":
            return None
        scope = Scope(Unit.RECORD, Adjacency.REPLACE_ONE, View.SERVER)
        note = "summed over the rounds" if self.budget == "run" else "per round on average; not composed"
        return Claim(paper_epsilon(s, self.name), s.delta, scope, "GFL-ALDPA, reconstructed", note)

    def weight(self, round: int, rounds: int) -> float:
        """Return mu of that round (from 0) in units of the quadratic mean over all rounds; proportional to s^p."""
        return float((round + 1) ** self.growth * math.sqrt(rounds / _power_sum(2 * self.growth, rounds)))

    def epsilon(self, s: Setting, round: int) -> float:
        """Return epsilon of that round (from 0): the share s^p / sum s^p of the budget of the run."""
        total = paper_epsilon(s, self.name) * (1 if self.budget == "run" else s.rounds)
        return float(total * (round + 1) ** self.growth / _power_sum(self.growth, s.rounds))

    def published_std(self, s: Setting, round: int) -> float:
        """sigma_t = sensitivity sqrt(2 ln(1.25 / delta_t)) / epsilon_t, with delta / T per round if epsilon is for the run."""
        delta = s.delta / (s.rounds if self.budget == "run" else 1)
        sensitivity = 2 * self.clip / (s.known_records if self.sensitivity == "mean" else 1)
        return sensitivity * classical_noise_multiplier(self.epsilon(s, round), delta)


@lru_cache(maxsize=16)
def _power_sum(power: float, rounds: int) -> float:
    """Return 1^p + ... + T^p, cached since each of the T rounds needs it."""
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
    """Return the mask [d] of the `kept` coordinates with the largest absolute values."""
    import torch

    mask = torch.zeros_like(update, dtype=torch.bool)
    mask[update.abs().topk(kept).indices] = True
    return mask


def drawn(dimension: int, kept: int, seed: int, round: int) -> Tensor:
    """Draw `kept` coordinates without replacement, as a mask [d] that anyone who knows seed and round can compute."""
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + round)
    mask = torch.zeros(dimension, dtype=torch.bool)
    mask[torch.randperm(dimension, generator=generator)[:kept]] = True
    return mask
