"""Fed-SMP (Hu, Guo and Gong 2023): all clients send the same few coordinates of their updates, clipped and noised.

The mask is common and public, drawn before anybody trains, so that clip and noise act in few dimensions at unchanged sensitivity.
The published and the proven variant train alike and differ in how their noise is sized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.types import Claim
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Released
from fedveil.methods.adaptive import refuse_dp_sgd
from fedveil.methods.base import (
    MethodConfig,
    Policy,
    Release,
    Schedule,
    Setting,
    Variant,
    calibrated,
    gaussian_plan,
    reads_public_split,
)
from fedveil.methods.summed_noise import published_noise, summed_claim
from fedveil.papers.fedglp_adp.baseline_claims import fedsmp_epsilon, fedsmp_noise_multiplier
from fedveil.training.local import Client, Local, Plain, State

if TYPE_CHECKING:
    from torch import Tensor


class FedSMP(MethodConfig):
    """DP-FedAvg of a few coordinates, the same for all clients of a round.

    Args:
        variant: published or proven; they train alike. Published: noise for the sum of a round, in shares on each upload.
        clip: C, L2 bound on what is kept of an update, after its scale.
        share: k / d, share of coordinates that are sent.
        mask: `random` coordinates, scaled by d / k so that their mean is that of all; those that a few steps of the server on the
            `public` split move most, as in the paper; or, without public data, those that the global model `moved` most last.
        mask_seed: public seed of the random mask.
        public_steps: tau, steps on the public split before each round, with the clients' batches and optimiser.
        sigma: published; noise std of the sum / clip; None is the paper's formula from privacy.epsilon.
    """

    name: Literal["fed-smp"] = "fed-smp"
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
        """Published: the paper's sigma for the sum. Proven: noise for the configured epsilon, in the run's view."""
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
        """User level, for the sum."""
        if self.variant == "proven":
            return None
        return summed_claim(s, partial(fedsmp_epsilon, rounds=s.rounds, delta=s.delta, rate=s.rate), "Fed-SMP, sufficient sigma")

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """What the mask reads."""
        return reads_public_split(s) if self.mask == "public" else ()

    def kept(self, s: Setting) -> int:
        """k, coordinates sent."""
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
    """The k coordinates that training on the public split moves most; random where a plan is priced without a run."""

    method: FedSMP

    @property
    def public_steps(self) -> int:
        return self.method.public_steps

    def plan(self, s: Setting, seen: Released, state: State) -> Plan:
        if seen.public_update is None:
            return DrawnMask(self.method).plan(s, seen.round)
        return masked(self.method, s, seen.public_update.abs())


@dataclass(frozen=True)
class MovedMask(Policy):
    """The k coordinates that the global model moved most; random before it has moved."""

    method: FedSMP

    def plan(self, s: Setting, seen: Released, state: State) -> Plan:
        if seen.previous is None:
            return DrawnMask(self.method).plan(s, seen.round)
        return masked(self.method, s, (seen.model - seen.previous).abs())


def masked(method: FedSMP, s: Setting, score: Tensor) -> Plan:
    """Clip, noise, and the k coordinates with the largest score [d]."""
    import torch

    support = torch.zeros_like(score, dtype=torch.bool)
    support[score.topk(method.kept(s)).indices] = True
    return replace(gaussian_plan(s, method.clip), support=support)


@dataclass(frozen=True)
class Scaled(Plain):
    """Plain local training; the update leaves scaled, before the clip."""

    scale: float = 1.0

    def finish(self, local: Local) -> Tensor:
        return super().finish(local) * self.scale
