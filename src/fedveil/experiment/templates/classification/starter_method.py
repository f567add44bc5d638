"""A custom method: DP-FedAvg with a clip that shrinks from round to round, as updates do while training converges.

Only what differs from DP-FedAvg is here: `MethodConfig` has defaults for local training, weights, mean, noise and prices.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedveil.mechanism.plan import Plan
from fedveil.methods.base import MethodConfig, Schedule, Setting, gaussian_plan
from fedveil.methods.method_registry import register


@register
class ShrinkingClip(MethodConfig, Schedule):
    """DP-FedAvg that clips the updates of round t at `clip` * `decay`^t: plans that follow from the round alone."""

    name: Literal["starter"] = "starter"
    clip: float = Field(1.0, gt=0)
    decay: float = Field(0.97, gt=0, le=1)

    def release(self, s: Setting) -> Schedule:
        return self

    def plan(self, s: Setting, t: int) -> Plan:
        return gaussian_plan(s, self.clip * self.decay**t)
