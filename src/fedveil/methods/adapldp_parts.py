"""AdapLDP's published parts: the raw scaler with its noise, the server's bookkeeping of scalers, and the turn of an upload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fedveil.mechanism.plan import Extra, Plan, Released, UnprovenPlan, Upload
from fedveil.methods.base import Policy
from fedveil.methods.setting import Setting
from fedveil.papers.ladp_fl.baseline_formulas import adapldp_scale
from fedveil.training.local import Local, Remembering, State

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.training.params import Layout

SMALLEST, LARGEST = 0.001, 10.0
"""The scaler that the code begins with, and the largest that the proven form takes."""
_LOCAL_EPOCHS = 1
"""K of the code's scaler, which counts one local epoch."""
_UNCLIPPED = 1e12


class ScalingOptions(Protocol):
    """The parameters of AdapLDP that its training reads."""

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
    """Published policy: the server standardises the scalers of all clients and sends each its own, and the last global step."""

    clients: int
    reason: str

    def plan(self, s: Setting, seen: Released, state: State) -> Plan:
        """Nothing is clipped or noised at the door; the scaler leaves as it is."""
        values = seen.server.get("scalers", [SMALLEST] * self.clients)
        center = sum(values) / len(values)
        last = seen.model if seen.previous is None else seen.previous
        public = {"scaler": values[seen.client], "mean": center, "step": seen.model - last}
        return UnprovenPlan(reason=self.reason, extras={"scaler": Extra(_UNCLIPPED, 0.0)}, broadcast=public)

    def observe_all(self, s: Setting, state: State, uploads: Sequence[Upload]) -> State:
        """(c - mean) / (std + 1e-5) over all clients, those of this round with their new values."""
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
        epsilon, delta: of one round. reach: Delta where it is that of LaDP-FL, or None for the code's 2 eta G / n_i.
    """

    method: ScalingOptions
    epsilon: float
    delta: float
    reach: float | None = None

    def begin(self, local: Local) -> None:
        """The rate goes on falling where the client's last round left it."""
        local.optimizer = local.spec.optimizer.build()
        local.scratch["rate"] = local.state.get("rate", local.spec.optimizer.lr)
        local.scratch["first_rate"] = local.scratch["rate"]

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """A clipped gradient step."""
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
        """The noisy and turned weights, as a difference; the scaler goes beside them."""
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
    """Laplace noise of scale 1 from standard normals: -sign(z) ln(2 Phi(-|z|))."""
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
        layout: the layers; None takes the whole vector as one. degrees: the cosine is of theta in degrees, as the code does.
    """
    import torch

    whole = layout is None
    parts = [(moved, step)] if whole else zip(layout.split(moved), layout.split(step), strict=True)  # type: ignore[union-attr]
    cosines = [(x * y / (x.norm() * y.norm() + 1e-4)).clamp(-1, 1) for x, y in parts]
    cosine = torch.cat([c.flatten() for c in cosines])
    if degrees:
        cosine = torch.rad2deg(cosine.arccos()).cos()
    return sent * (1 + alpha * cosine)
