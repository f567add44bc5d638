"""AdapLDP (Yue et al. 2025): noise scaled by how far a client moved, and uploads turned towards the last global model.

Published: the scaler is a raw norm that determines the noise and is sent in the clear, so nothing is proven. Proven: the scaler
is computed from releases, and the budget that it saves in a round is available later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from pydantic import Field

from fedveil.accounting.types import Claim
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Extra, Plan, Released, UnprovenPlan, Upload
from fedveil.methods.base import Mean, Policy, Release, Setting, SumServer, UploadServer, Weighting, sum_noise
from fedveil.methods.shared import TwoVariants, paper_epsilon
from fedveil.papers.ladp_fl.baselines import classical_scope, sequential_claim, training_reach
from fedveil.papers.ladp_fl.claim import adapldp_scale
from fedveil.training.local import Client, Local, Plain, Remembering, State

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.training.params import Layout


SMALLEST, LARGEST = 0.001, 10.0
"""The initial scaler of the code, and the largest scaler of the proven variant."""
_LOCAL_EPOCHS = 1
"""K in the scaler of the code, which counts one local epoch."""
_UNCLIPPED = 1e12


class ScalingOptions(Protocol):
    """The options of AdapLDP that local training uses."""

    @property
    def source(self) -> str: ...
    @property
    def law(self) -> str: ...
    @property
    def gradient_clip(self) -> float: ...
    @property
    def rate_decay(self) -> float: ...
    @property
    def turn(self) -> float: ...
    @property
    def degrees(self) -> bool: ...


@dataclass(frozen=True)
class Scalers(Policy):
    """Published policy: the server standardises all scalers, and sends each client its scaler and the last global step."""

    clients: int
    reason: str

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        """Return a plan without clip and noise; the scaler is released unprotected."""
        values = released.server.get("scalers", [SMALLEST] * self.clients)
        center = sum(values) / len(values)
        last = released.model if released.previous is None else released.previous
        public = {"scaler": values[released.client], "mean": center, "step": released.model - last}
        return UnprovenPlan(reason=self.reason, extras={"scaler": Extra(_UNCLIPPED, 0.0)}, broadcast=public)

    def observe_all(self, s: Setting, state: State, uploads: Sequence[Upload]) -> State:
        """Compute (c - mean) / (std + 1e-5) over all clients, with the new values of this round."""
        values = list(state.get("scalers", [SMALLEST] * self.clients))
        for upload in uploads:
            values[upload.client] = float(upload.extras["scaler"])
        center = sum(values) / len(values)
        spread = (sum((v - center) ** 2 for v in values) / len(values)) ** 0.5
        return {"scalers": [(v - center) / (spread + 1e-5) for v in values]}


@dataclass(frozen=True)
class Scaling(Remembering):
    """Published objective: clipped steps, noise by the scaler c = 0.6 |c - mean c| + 0.4 ||w - w_i|| / (K eta), and the turn.

    Args:
        epsilon, delta: of one round. reach: Delta of LaDP-FL, or None for the code's 2 eta G / n_i.
    """

    method: ScalingOptions
    epsilon: float
    delta: float
    reach: float | None = None

    def begin(self, local: Local) -> None:
        """Continue with the learning rate at the end of the client's last round."""
        local.optimizer = local.spec.optimizer.build()
        local.scratch["rate"] = local.state.get("rate", local.spec.optimizer.lr)
        local.scratch["first_rate"] = local.scratch["rate"]

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Take a clipped gradient step."""
        loss = local.gradient(local, x, y)
        assert local.optimizer is not None
        if self.reach is None:
            order = 1 if self.method.law == "laplace" else 2
            for part in local.model.layout.split(local.model.grad):
                part.div_((part.norm(order) / self.method.gradient_clip).clamp_min(1.0))
        local.optimizer.step(local.model.vector, local.model.grad, local.scratch["rate"])
        if self.reach is None:
            local.scratch["rate"] *= self.method.rate_decay
        return loss

    def finish(self, local: Local) -> Tensor:
        """Return the noisy, turned weights as an update, with the scaler as an extra."""
        assert local.plan is not None
        public, state, m = local.plan.broadcast, local.state, self.method
        update = local.model.vector - local.start
        scaler, rate = float(public["scaler"]), local.scratch["rate"]
        if local.round > 0:
            scaler = 0.6 * abs(scaler - float(public["mean"])) + 0.4 * float(update.norm()) / (_LOCAL_EPOCHS * rate)
        reach = self.reach
        if reach is None:
            reach = 2 * local.scratch["first_rate"] * m.gradient_clip / max(local.examples, 1)
        scale = adapldp_scale(self.epsilon, self.delta, reach, max(scaler, 1e-12), m.law)
        noise, power = local.noise(len(update)), scale**2
        if m.law == "laplace":
            noise, power = laplace(noise), 2 * scale**2
        sent = local.model.vector + scale * noise
        local.noised(update.new_tensor([power * n for n in local.model.layout.sizes]))
        moved = sent - state.get("sent", local.start)
        state.update(sent=sent.clone(), rate=rate, scaler=scaler)
        local.extras["scaler"] = update.new_tensor(scaler)
        if local.round > 0:
            sent = turned(sent, moved, public["step"], m.turn, layout=local.model.layout, degrees=m.degrees)
        return sent - local.start

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """The scaler."""
        return {"scaler": state["scaler"]} if "scaler" in state else {}


def laplace(normal: Tensor) -> Tensor:
    """Return Laplace noise of scale 1 from standard normals: -sign(z) ln(2 Phi(-|z|))."""
    import math

    import torch

    z = normal.double()
    drawn: Tensor = -z.sign() * (torch.special.log_ndtr(-z.abs()) + math.log(2))
    return drawn.to(normal.dtype)


def turned(
    sent: Tensor, moved: Tensor, step: Tensor, alpha: float, *, layout: Layout | None = None, degrees: bool = True
) -> Tensor:
    """`sent` (1 + alpha cos theta), theta = arccos(moved step / (||moved|| ||step|| + 1e-4)) of each coordinate, norms by layer.

    Args:
        layout: the layers; None takes the whole vector as one. degrees: theta is in degrees, as in the code.
    """
    import torch

    whole = layout is None
    parts = [(moved, step)] if whole else zip(layout.split(moved), layout.split(step), strict=True)  # type: ignore[union-attr]
    cosines = [(x * y / (x.norm() * y.norm() + 1e-4)).clamp(-1, 1) for x, y in parts]
    cosine = torch.cat([c.flatten() for c in cosines])
    if degrees:
        cosine = torch.rad2deg(cosine.arccos()).cos()
    return sent * (1 + alpha * cosine)


class AdapLDP(TwoVariants):
    """Noise scaled by how far a client moved, and uploads turned towards the last global step.

    Args:
        variant: published or proven.
        source: published; `repo`: epsilon is for the run, epsilon / (q T) per round; each layer's batch gradient is clipped to
            `gradient_clip`, the rate falls by `rate_decay` per batch, Delta = 2 eta G / n_i. `ladp-fl`: epsilon of a round,
            gradients are clipped as a whole to `training.batch_clip`, Delta = 2 eta E G_c.
        law: published; noise is Laplace of scale Delta / (epsilon c), or Gaussian with c inside the logarithm.
        gradient_clip, rate_decay: published, `repo`; see `source`.
        turn: alpha; each weight is multiplied by 1 + alpha cos(angle of the client's movement and the last global step).
        degrees: published; take the cosine of degrees as if they were radians, as the code does; it is then of random sign.
        clip: proven; C, L2 bound on the update.
    """

    name: Literal["adapldp"] = "adapldp"
    proven_difference: ClassVar[str] = (
        "the scaler is computed from noisy releases, updates are clipped, and later rounds spend what a round saves"
    )
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
        """Proven: noise by released norms. Published: scalers and steps that the server sends."""
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
        """The plain mean; proven: of uploads that the server turns."""
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

    Its state: c; the number of rounds so far; the remaining budget in rounds of multiplier z; the weights of the last release.
    A round costs w(c) <= 1 of an equal share of the remaining budget, so no run costs more than all rounds at z.
    """

    method: AdapLDP

    def start(self, s: Setting) -> State:
        return {"scaler": SMALLEST, "taken": 0, "left": float(s.participations)}

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        """Plan the noise for this round's cost, and the values with which the server turns the upload."""
        clip, cost = self.method.clip, _cost(s, state, released.round)
        last = released.model if released.previous is None else released.previous
        public = {"sent": state.get("sent", released.model), "step": released.model - last}
        broadcast = public if self.method.turn else {}
        place: Literal["sum", "upload"] = "sum" if sum_noise(s) else "upload"
        return Plan(clip=clip, noise_std=s.z * clip / math.sqrt(cost), place=place, broadcast=broadcast)

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        """c <- 0.6 c + 0.4 ||update|| / (K eta), with the released update less its noise."""
        if upload.start is None:
            raise ConfigError("AdapLDP's policy must be told the model that an upload started from: set Upload.start")
        energy = float(upload.vector.square().sum()) - float(upload.noise_std[0]) ** 2 * len(upload.vector)
        moved = math.sqrt(max(energy, 0.0)) / s.local.optimizer.lr
        return {
            "scaler": 0.6 * state["scaler"] + 0.4 * moved,
            "taken": state["taken"] + 1,
            "left": state["left"] - _cost(s, state, upload.round),
            "sent": upload.start + upload.vector,
        }


def _cost(s: Setting, state: State, round: int) -> float:
    """Cost in rounds of multiplier z: w(c) = ln(1.25 / (delta c_max)) / ln(1.25 / (delta c)) of an equal share.

    The last round costs all of the remaining budget.
    """
    rounds = min(s.participations - state["taken"], s.rounds - round)
    share: float = state["left"] / rounds
    if rounds == 1:
        return share
    largest = min(LARGEST, 0.4 / s.delta)  # keeps the logarithm positive
    c = min(max(state["scaler"], SMALLEST), largest)
    return math.log(1.25 / (s.delta * largest)) / math.log(1.25 / (s.delta * c)) * share
