"""Baselines of FedGLP-ADP that send shorter or fewer updates: Fed-SMP and BLUR+LUS.

Each upload is released, so in the server view a release has the noise multiplier sigma / sqrt(n). The published and the proven
variants train alike and differ in the size of their noise.

Fed-SMP: the mask is common and public, chosen before training, so clip and noise act in few dimensions at the same sensitivity.

BLUR+LUS: each client privately chooses the values that it drops; the clipped rest has dense noise, which hides the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.types import Adjacency, Claim, Scope, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Released
from fedveil.methods.base import (
    Fixed,
    MethodConfig,
    Policy,
    Release,
    Schedule,
    Setting,
    Variant,
    calibrated,
    gaussian_plan,
    reads_public_split,
    sum_noise,
)
from fedveil.methods.shared import refuse_dp_sgd
from fedveil.papers.fedglp_adp.claim import fedsmp_epsilon, fedsmp_noise_multiplier, opacus_epsilon, opacus_noise_multiplier
from fedveil.training.local import Client, Local, Plain, State

if TYPE_CHECKING:
    from torch import Tensor


SUMS = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
"""The scope of such claims: clients, and the sum of a round."""


def published_noise(s: Setting, name: str, given: float | None, formula: Callable[[float], float]) -> Setting:
    """Return the setting with the noise multiplier of one upload: from sigma, or by the paper's formula from privacy.epsilon.

    The result has no epsilon, because a budget cannot enforce an epsilon that is only claimed.

    Raises:
        ConfigError: the noise is on the sum, the clients run DP-SGD, or both sigma and epsilon are set.
    """
    refuse_dp_sgd(s, name)
    if sum_noise(s):
        raise ConfigError(
            f"the published variant of {name} sends each client's upload to the server, with a share of the noise: "
            "set privacy.view = 'server' (even so, the paper's claim is about the sum)"
        )
    if given is not None and s.epsilon is not None:
        raise ConfigError(f"method.sigma = {given:g} fixes the noise: remove privacy.epsilon and privacy.noise_multiplier")
    if s.noise_multiplier is not None or (given is None and s.epsilon is None):
        return s
    sigma = given if given is not None else formula(s.epsilon or 0.0)
    return replace(s, epsilon=None, noise_multiplier=sigma / math.sqrt(s.cohort))


def sigma_of(s: Setting) -> float:
    """Return the paper's sigma: noise std of the sum / clip if all n clients add their shares."""
    return s.z if sum_noise(s) else s.z * math.sqrt(s.cohort)


def summed_claim(s: Setting, formula: Callable[[float], float], source: str) -> Claim | None:
    """Return the paper's claim about sums, by its formula from sigma."""
    if not s.z:
        return None
    note = f"sigma = {sigma_of(s):.4g}, of which each upload carries the share 1/sqrt({s.cohort})"
    return Claim(formula(sigma_of(s)), s.delta, SUMS, source, note)


class FedSMP(MethodConfig):
    """DP-FedAvg on a few coordinates, the same for all clients of a round.

    Args:
        variant: published or proven; they train alike. Published: noise for the sum of a round, in shares on each upload.
        clip: C, L2 bound on the sent part of an update, after its scale.
        share: k / d, share of coordinates that are sent.
        mask: `random` coordinates, scaled by d / k so that their mean is that of all; those that a few steps of the server on the
            `public` split move most, as in the paper; or, without public data, those that the last global step `moved` most.
        mask_seed: public seed of the random mask.
        public_steps: tau, steps on the public split before each round, with the clients' batches and optimiser.
        sigma: published; noise std of the sum / clip; None is the paper's formula from privacy.epsilon.
    """

    name: Literal["fed-smp"] = "fed-smp"
    proven_difference: ClassVar[str] = (
        "only the noise differs; it is calibrated for the adversary of the run, where the paper has a looser condition"
    )
    reconstructed: ClassVar[str] = (
        "all but the abstract's idea; clip, scale, masks and noise are those of third-party programs, the default share and "
        "the number of steps on public data are guesses, and the mask by the last movement of the global model is ours"
    )
    variant: Variant = "proven"
    clip: float = Field(0.5, gt=0, allow_inf_nan=False)
    share: float = Field(0.1, gt=0, le=1)
    mask: Literal["random", "public", "moved"] = "random"
    mask_seed: int = 0
    public_steps: int = Field(10, ge=1)
    sigma: float | None = Field(None, ge=0, allow_inf_nan=False)

    def calibrate(self, s: Setting) -> Setting:
        """Published: the paper's sigma for the sum. Proven: noise for the configured epsilon in the run's view."""
        if self.mask == "public" and not s.public_split:
            raise ConfigError(
                "method.mask = 'public' sends what training on public examples moves most, and no examples are public: set "
                "data.public_fraction, such as 0.1, or method.mask = 'random' or 'moved'"
            )
        if self.variant == "published":
            formula = partial(fedsmp_noise_multiplier, rounds=s.rounds, delta=s.delta, rate=s.rate)
            return published_noise(s, self.name, self.sigma, formula)
        refuse_dp_sgd(s, self.name)
        return calibrated(self, s)

    def release(self, s: Setting) -> Release:
        kinds: dict[str, Callable[[FedSMP], Release]] = {"random": DrawnMask, "public": PublicMask, "moved": MovedMask}
        return kinds[self.mask](self)

    def client(self, s: Setting) -> Client:
        return Scaled(scale=self.scale(s))

    def claim(self, s: Setting) -> Claim | None:
        """The claim at user level for the sum."""
        if self.variant == "proven":
            return None
        return summed_claim(s, partial(fedsmp_epsilon, rounds=s.rounds, delta=s.delta, rate=s.rate), "Fed-SMP, sufficient sigma")

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Return the assumption about the data that the mask reads."""
        return reads_public_split(s) if self.mask == "public" else ()

    def kept(self, s: Setting) -> int:
        """k, the number of sent coordinates."""
        return max(1, round(self.share * s.layout.dimension))

    def scale(self, s: Setting) -> float:
        """d / k for random coordinates, else 1."""
        return s.layout.dimension / self.kept(s) if self.mask == "random" else 1.0


@dataclass(frozen=True)
class DrawnMask(Schedule):
    """k coordinates drawn from the round and a public seed."""

    method: FedSMP

    def plan(self, s: Setting, t: int) -> Plan:
        import torch

        from fedveil.release.noise import Randomness

        generator = Randomness(self.method.mask_seed).generator("fed-smp", t)
        return masked(self.method, s, torch.rand(s.layout.dimension, generator=generator))


@dataclass(frozen=True)
class PublicMask(Policy):
    """The k coordinates that training on the public split moves most; random if a plan is priced without a run."""

    method: FedSMP

    @property
    def public_steps(self) -> int:
        return self.method.public_steps

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        if released.public_update is None:
            return DrawnMask(self.method).plan(s, released.round)
        return masked(self.method, s, released.public_update.abs())


@dataclass(frozen=True)
class MovedMask(Policy):
    """The k coordinates that moved most in the global model; random before its first step."""

    method: FedSMP

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        if released.previous is None:
            return DrawnMask(self.method).plan(s, released.round)
        return masked(self.method, s, (released.model - released.previous).abs())


def masked(method: FedSMP, s: Setting, score: Tensor) -> Plan:
    """Plan clip and noise on the k coordinates with the largest score [d]."""
    import torch

    support = torch.zeros_like(score, dtype=torch.bool)
    support[score.topk(method.kept(s)).indices] = True
    return replace(gaussian_plan(s, method.clip), support=support)


@dataclass(frozen=True)
class Scaled(Plain):
    """Plain local training; the update is scaled before the clip."""

    scale: float = 1.0

    def finish(self, local: Local) -> Tensor:
        return super().finish(local) * self.scale


class BlurLus(MethodConfig):
    """DP-FedAvg with bounded local update regularisation and local update sparsification.

    Args:
        variant: published or proven; they train alike. Published: noise for the sum of a round, in shares on each upload.
        clip: S, L2 bound on an update, and the length above which BLUR pulls.
        blur: lambda of BLUR's penalty lambda/2 max(0, ||w_i - w||^2 - S^2); 0 for none.
        drop: share of each layer's values that LUS sets to zero; 0 for none.
        score: what LUS ranks by: the `effect` |update * gradient| on the local loss at the trained model, or the `size`.
        sigma: published; noise std of the sum / clip; None takes it from privacy.epsilon by the Renyi accountant.
    """

    name: Literal["blur-lus"] = "blur-lus"
    proven_difference: ClassVar[str] = (
        "only the noise differs; it is calibrated for the adversary of the run, where the paper's protects a sum"
    )
    reconstructed: ClassVar[str] = (
        "all but the abstract's idea; the penalty is that of a third party's program, LUS's score and share and both defaults "
        "are guesses"
    )
    variant: Variant = "proven"
    clip: float = Field(0.5, gt=0, allow_inf_nan=False)
    blur: float = Field(0.4, ge=0, allow_inf_nan=False)
    drop: float = Field(0.4, ge=0, lt=1)
    score: Literal["effect", "size"] = "effect"
    sigma: float | None = Field(None, ge=0, allow_inf_nan=False)

    def calibrate(self, s: Setting) -> Setting:
        """Published: the accountant's sigma for the sum. Proven: noise for the configured epsilon, in the run's view."""
        if self.variant == "published":
            formula = partial(opacus_noise_multiplier, steps=s.rounds, delta=s.delta, rate=s.rate)
            return published_noise(s, self.name, self.sigma, formula)
        refuse_dp_sgd(s, self.name)
        return calibrated(self, s)

    def release(self, s: Setting) -> Release:
        """Clip and dense noise, the same in every round."""
        return Fixed(gaussian_plan(s, self.clip))

    def client(self, s: Setting) -> Client:
        return ShortAndSparse(self)

    def claim(self, s: Setting) -> Claim | None:
        """The claim at user level for the sum of all uploads."""
        if self.variant == "proven":
            return None
        return summed_claim(s, partial(opacus_epsilon, steps=s.rounds, delta=s.delta, rate=s.rate), "BLUR+LUS, Renyi accountant")


@dataclass(frozen=True)
class ShortAndSparse:
    """SGD on loss + BLUR's penalty; LUS on the update."""

    method: BlurLus

    def begin(self, local: Local) -> None:
        """Start from the global model."""

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Add the gradient of the penalty, lambda (w_i - w) if the update is longer than S."""
        loss = local.gradient(local, x, y)
        moved = local.model.vector - local.start
        local.model.grad.add_(moved * (moved.norm() > self.method.clip), alpha=self.method.blur)
        local.descend()
        return loss

    def finish(self, local: Local) -> Tensor:
        """Return the update without the share of lowest score in each layer."""
        update = local.model.vector - local.start
        if not self.method.drop or not local.examples:
            return update
        score = (update * self._gradient(local) if self.method.score == "effect" else update).abs()
        for values, part in zip(local.model.layout.split(score), local.model.layout.split(update), strict=True):
            part[values.topk(int(self.method.drop * len(values) + 1e-9), largest=False).indices] = 0.0
        return update

    def _gradient(self, local: Local) -> Tensor:
        """Return the mean gradient [d] over all of the client's examples at the trained model."""
        import torch

        assert local.data is not None
        total, size = torch.zeros_like(local.start), 4 * local.spec.batch_size
        for x, y in zip(*(torch.split(part, size) for part in local.data), strict=True):
            local.gradient(local, x, y)
            total.add_(local.model.grad, alpha=len(y) / local.examples)
        return total
