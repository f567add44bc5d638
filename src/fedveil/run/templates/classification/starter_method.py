"""A custom method: DP-FedAvg with a clip that shrinks from round to round, as updates do while training converges.

Only what differs from DP-FedAvg is here: `MethodConfig` has defaults for local training, weights, mean, noise and prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from fedveil.methods.base import MethodConfig, Setting, gaussian_plan
from fedveil.methods.method_registry import register
from fedveil.release.plan import Plan, Policy, Released, Upload
from fedveil.training.local import State


@register
class ShrinkingClip(MethodConfig):
    """DP-FedAvg that clips the updates of round t at `clip` * `decay`^t."""

    name: Literal["starter"] = "starter"
    clip: float = Field(1.0, gt=0)
    decay: float = Field(0.97, gt=0, le=1)

    def policy(self, s: Setting) -> Policy:
        return Shrinking(self, s)


@dataclass(frozen=True)
class Shrinking:
    """The policy: it plans each release before the data are touched, and sees only what was released."""

    method: ShrinkingClip
    setting: Setting
    common: ClassVar[bool] = True  # plans depend on the round alone

    def start(self) -> State:
        return {}  # what `observe` learns goes here

    def plan(self, released: Released, state: State) -> Plan:
        return gaussian_plan(self.setting, self.method.clip * self.method.decay**released.round)

    def observe(self, state: State, upload: Upload) -> State:
        return state
