"""Adaptive quantile clipping (Andrew et al. 2021): the clip follows a quantile of the update norms, learned from noisy counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedveil.mechanism.plan import Extra, Plan, Released, Upload
from fedveil.methods.base import EvenPolicy, MethodConfig, Release, Setting, calibrated, sum_noise
from fedveil.methods.shared import refuse_dp_sgd
from fedveil.training.local import Client, Local, Plain, State

if TYPE_CHECKING:
    from torch import Tensor

_HALF = 0.5
"""A client's extra value: +1/2 if its update is within the clip, -1/2 if not."""


class AdaptiveClipping(MethodConfig):
    """DP-FedAvg whose clip follows the `quantile` of the update norms (Andrew et al. 2021, Algorithm 1).

    Args:
        clip: C of the first round.
        quantile: gamma, the share of updates that should lie within the clip.
        rate: eta_C of the geometric step C <- C exp(-eta_C (share within - gamma)).
        count_share: the share of a round's mu^2 for the noisy count.
    """

    name: Literal["adaptive-clipping"] = "adaptive-clipping"
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    quantile: float = Field(0.5, gt=0, lt=1)
    rate: float = Field(0.2, gt=0, allow_inf_nan=False)
    count_share: float = Field(0.01, gt=0, lt=1)

    def extras(self, s: Setting) -> Mapping[str, tuple[int, ...]]:
        """Return one number: whether the update is within the clip."""
        return {"within": ()}

    def calibrate(self, s: Setting) -> Setting:
        refuse_dp_sgd(s, self.name)
        return calibrated(self, s)

    def release(self, s: Setting) -> Release:
        """Return the policy that derives the clip of each round from earlier noisy counts."""
        return QuantileClip(self)

    def client(self, s: Setting) -> Client:
        """Return plain local training with the count."""
        return Counted()


@dataclass(frozen=True)
class QuantileClip(EvenPolicy):
    """Policy C <- C exp(-eta_C (b - gamma)), for the released share b of updates within the clip."""

    method: AdaptiveClipping

    def start(self, s: Setting) -> State:
        return {"clip": self.method.clip}

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        """Divide the round's mu^2 = (f / z)^2 between update and count."""
        share, clip = self.method.count_share, state["clip"]
        count = Extra(_HALF, _HALF * s.z / math.sqrt(share))
        place: Literal["sum", "upload"] = "sum" if sum_noise(s) else "upload"
        return Plan(clip=clip, noise_std=s.z * clip / math.sqrt(1 - share), place=place, extras={"within": count})

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        """Make one geometric step, keeping the clip between a millionth and a million times the first clip."""
        within = _HALF + float(upload.extras["within"])
        step = math.exp(-min(max(self.method.rate * (within - self.method.quantile), -20.0), 20.0))
        return {"clip": min(max(state["clip"] * step, 1e-6 * self.method.clip), 1e6 * self.method.clip)}


@dataclass(frozen=True)
class Counted(Plain):
    """Plain local training that also releases whether its update is within the plan's clip."""

    def finish(self, local: Local) -> Tensor:
        """Return the update, and set the count as an extra."""
        update = super().finish(local)
        assert local.plan is not None
        within = bool(update.norm() <= local.plan.clip)
        local.extras["within"] = update.new_tensor(_HALF if within else -_HALF)
        return update
