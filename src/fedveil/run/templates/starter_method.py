"""A custom method: DP-FedAvg with a clip that shrinks from round to round, as updates do while training converges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedveil.accounting.types import Claim, Event, View
from fedveil.methods.base import MethodConfig, Setting, Weighting, calibrated, gaussian_plan, gaussian_releases, mean
from fedveil.methods.method_registry import register
from fedveil.release.plan import Plan, Policy, Released, Upload
from fedveil.training.local import Objective, Plain, State

if TYPE_CHECKING:
    from torch import Tensor


@register
class ShrinkingClip(MethodConfig):
    """DP-FedAvg that clips the updates of round t at `first` * `decay`^t."""

    name: Literal["starter"] = "starter"
    first: float = Field(1.0, gt=0)
    decay: float = Field(0.97, gt=0, le=1)

    @property
    def weighting(self) -> Weighting:
        return "uniform"

    def calibrate(self, s: Setting) -> Setting:
        return calibrated(self, s)  # the least noise that reaches the configured epsilon

    def policy(self, s: Setting) -> Policy:
        return Shrinking(self, s)

    def objective(self, s: Setting) -> Objective:
        return Plain()  # ordinary local training

    def aggregate(self, uploads: Sequence[Upload], model: Tensor) -> Tensor:
        return mean(uploads)

    def releases(self, s: Setting, view: View) -> list[Event]:
        return gaussian_releases(s, view)  # noise is z times the clip, so a round costs the same whatever the clip

    def claim(self, s: Setting) -> Claim | None:
        return None  # what a paper claims, if the method has one

    def clip_norm(self, s: Setting) -> float | None:
        return self.first

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Shrinking:
    """The policy: it plans each release before the data are touched, and sees only what was released."""

    method: ShrinkingClip
    setting: Setting

    def start(self) -> State:
        return {}

    def plan(self, released: Released, state: State) -> Plan:
        return gaussian_plan(self.setting, self.method.first * self.method.decay**released.round)

    def observe(self, state: State, upload: Upload) -> State:
        return state
