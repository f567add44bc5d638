"""AdapLDP (Yue et al. 2025): noise scaled by how far a client moved, and uploads turned towards the last global step.

Published: the scaler is a raw norm that decides the noise and leaves in the clear, so nothing is proven. Proven: the scaler is
computed from what was released, and the rounds that it makes cheaper leave more for later ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.types import Claim
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Released, Upload
from fedveil.methods.adapldp_parts import LARGEST, SMALLEST, Scalers, Scaling, turned
from fedveil.methods.adaptive import paper_epsilon
from fedveil.methods.base import Mean, Policy, Release, Setting, SumServer, UploadServer, Weighting, sum_noise
from fedveil.methods.classical_noise import classical_scope, sequential_claim, training_reach
from fedveil.methods.two_variants import TwoVariants
from fedveil.training.local import Client, Plain, State

if TYPE_CHECKING:
    from torch import Tensor


class AdapLDP(TwoVariants):
    """Noise scaled by how far a client moved, and uploads turned towards the last global step.

    Args:
        variant: published or proven.
        source: published; `repo`: epsilon is that of the run, epsilon / (q T) a round; each layer's batch gradient is clipped to
            `gradient_clip`, the rate falls by `rate_decay` a batch, Delta = 2 eta G / n_i. `ladp-fl`: epsilon is that of a round,
            gradients are clipped as a whole to `training.batch_clip`, Delta = 2 eta E G_c.
        law: published; noise is Laplace of scale Delta / (epsilon c), or Gaussian with c inside the logarithm.
        gradient_clip, rate_decay: published, `repo`; as above.
        turn: alpha; each weight is multiplied by 1 + alpha cos(angle) of what the client moved and the last global step.
        degrees: published; take the cosine of degrees as if they were radians, as the code does; it is then of random sign.
        clip: proven; C, L2 bound on the update.
    """

    name: Literal["adapldp"] = "adapldp"
    reconstructed: ClassVar[str] = (
        "source = 'ladp-fl', its form as LaDP-FL's baseline; 'repo' was read in the authors' code, liyan2015/AdapLDP-FL"
    )
    published_weighting: ClassVar[Weighting] = "uniform"
    reason: ClassVar[str] = (
        "the noise is scaled by raw norms, which leave in the clear; several clipped steps have more than one step's sensitivity"
    )
    source: Literal["repo", "ladp-fl"] = "repo"
    law: Literal["laplace", "gaussian"] = "laplace"
    gradient_clip: float = Field(35.0, gt=0, allow_inf_nan=False)
    rate_decay: float = Field(0.995, gt=0, le=1)
    turn: float = Field(0.02, ge=0, lt=1)
    degrees: bool = True
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)

    def extras(self, s: Setting) -> Mapping[str, tuple[int, ...]]:
        """Published: the scaler."""
        return {"scaler": ()} if self.variant == "published" else {}

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: noise from the formula."""
        if self.variant == "proven" and s.amplified:
            raise ConfigError("adapldp's rounds cost what earlier ones released: set training.sampling = 'fixed'")
        return super().calibrate(s)

    def check_published(self, s: Setting) -> None:
        if sum_noise(s):
            raise ConfigError("the server of the published adapldp reads a scaler from each client: set privacy.view = 'server'")
        self.client(s)

    def release(self, s: Setting) -> Release:
        """Proven: noise by released norms. Published: what the server sends of scalers and steps."""
        return ReleasedScaler(self) if self.variant == "proven" else Scalers(s.clients, self.unproven)

    def client(self, s: Setting) -> Client:
        """Proven: plain training. Published: noise by the raw scaler."""
        if self.variant == "proven":
            return Plain()
        epsilon = paper_epsilon(s, self.name)
        if self.source == "ladp-fl":
            return Scaling(self, epsilon, s.delta, reach=training_reach(s, self.name))
        if s.local.optimizer.name != "sgd" or s.local.optimizer.weight_decay:
            raise ConfigError("the published adapldp takes SGD steps: set training.optimizer to sgd without weight_decay")
        return Scaling(self, epsilon / (s.rate * s.rounds), s.delta)

    def server(self, s: Setting) -> SumServer | UploadServer:
        """The plain mean; proven: of uploads turned by what the server knows of them."""
        return Mean() if self.variant == "published" or not self.turn else Turned(self.turn)

    def claim(self, s: Setting) -> Claim | None:
        """Epsilon for the expected number of rounds of a client; as LaDP-FL's baseline, epsilon in each round, added up."""
        if self.variant == "proven":
            return None
        epsilon = paper_epsilon(s, self.name)
        if self.source == "ladp-fl":
            return sequential_claim(s, s.rounds * epsilon, "AdapLDP, LaDP-FL, Section VII-B4")
        note = "pure" if self.law == "laplace" else "Gaussian, delta a round"
        return Claim(epsilon, s.delta, classical_scope(), "AdapLDP", f"{note}; summed over q T rounds")


@dataclass(frozen=True)
class Turned(UploadServer):
    """The mean of uploads, each of which is turned towards the last global step by `alpha`."""

    alpha: float

    def step(self, s: Setting, state: State, uploads: Sequence[Upload]) -> tuple[State, Tensor]:
        model = uploads[0].start
        assert model is not None
        total, step = sum(u.weight for u in uploads), model.new_zeros(model.shape)
        for u in uploads:
            public = u.plan.broadcast
            sent = model + u.vector
            moved = turned(sent, sent - public["sent"], public["step"], self.alpha, degrees=False)
            step.add_(moved - model, alpha=u.weight / total)
        return state, step


@dataclass(frozen=True)
class ReleasedScaler(Policy):
    """Proven policy: c from the last release, noise std proportional to sqrt(ln(1.25 / (delta c))), within the client's budget.

    Its state: c; the rounds taken; what is left of the budget, in rounds of multiplier z; the weights of the last release.
    A round costs the share w(c) <= 1 of what is left for each remaining round, so no path costs more than all rounds of z.
    """

    method: AdapLDP

    def start(self, s: Setting) -> State:
        return {"scaler": SMALLEST, "taken": 0, "left": float(s.participations)}

    def plan(self, s: Setting, seen: Released, state: State) -> Plan:
        """Noise for this round's cost, and what the server needs to turn the upload."""
        clip, cost = self.method.clip, _cost(s, state, seen.round)
        last = seen.model if seen.previous is None else seen.previous
        public = {"sent": state.get("sent", seen.model), "step": seen.model - last}
        broadcast = public if self.method.turn else {}
        place: Literal["sum", "upload"] = "sum" if sum_noise(s) else "upload"
        return Plan(clip=clip, noise_std=s.z * clip / math.sqrt(cost), place=place, broadcast=broadcast)

    def observe(self, s: Setting, state: State, left: Upload) -> State:
        """c <- 0.6 c + 0.4 ||update|| / (K eta), of the released update less its noise."""
        if left.start is None:
            raise ConfigError("AdapLDP's policy must be told the model that an upload started from: set Upload.start")
        energy = float(left.vector.square().sum()) - float(left.noise_std[0]) ** 2 * len(left.vector)
        moved = math.sqrt(max(energy, 0.0)) / s.local.optimizer.lr
        return {
            "scaler": 0.6 * state["scaler"] + 0.4 * moved,
            "taken": state["taken"] + 1,
            "left": state["left"] - _cost(s, state, left.round),
            "sent": left.start + left.vector,
        }


def _cost(s: Setting, state: State, round: int) -> float:
    """In rounds of multiplier z: w(c) = ln(1.25 / (delta c_max)) / ln(1.25 / (delta c)) of an equal share of what is left.

    The last round has all of it.
    """
    rounds = min(s.participations - state["taken"], s.rounds - round)
    share: float = state["left"] / rounds
    if rounds == 1:
        return share
    largest = min(LARGEST, 0.4 / s.delta)  # where the logarithm is surely positive
    c = min(max(state["scaler"], SMALLEST), largest)
    return math.log(1.25 / (s.delta * largest)) / math.log(1.25 / (s.delta * c)) * share
