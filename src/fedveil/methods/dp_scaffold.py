"""SCAFFOLD (Karimireddy et al. 2020) and DP-SCAFFOLD (Noble et al. 2022): control variates correct the drift of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fedveil.accounting.types import Event, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Extra, Plan, Released, UnprovenPlan, Upload
from fedveil.methods.base import MethodConfig, Policy, Release, Setting, calibrated, sum_noise
from fedveil.methods.shared import refuse_dp_sgd
from fedveil.training.local import Client, Local, Plain, Remembering, State

if TYPE_CHECKING:
    from torch import Tensor


class DPScaffold(MethodConfig):
    """SCAFFOLD with client-level noise on both vectors (Noble et al. 2022; Karimireddy et al. 2020, option II).

    The paper protects records inside local training; here whole updates are clipped and noised, which protects clients.

    Args:
        clip: C, L2 bound on each client's update. control_clip: L2 bound on the change of its control variate.
        control_share: the share of a round's mu^2 for the control variates.
    """

    name: Literal["dp-scaffold"] = "dp-scaffold"
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    control_clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    control_share: float = Field(0.25, gt=0, lt=1)

    def extras(self, s: Setting) -> Mapping[str, tuple[int, ...]]:
        """Return one vector: the change of the client's control variate."""
        return {"control": (s.layout.dimension,)}

    def calibrate(self, s: Setting) -> Setting:
        _need_plain_sgd(s, self.name)
        return calibrated(self, s)

    def release(self, s: Setting) -> Release:
        """Return the policy that releases both vectors and broadcasts the server's control variate."""
        return Controlled(self)

    def plan(self, s: Setting, control: Tensor) -> Plan:
        """Divide the round's mu^2 = (f / z)^2 between update and control variate."""
        return Plan(
            clip=self.clip,
            noise_std=s.z * self.clip / math.sqrt(1 - self.control_share),
            place="sum" if sum_noise(s) else "upload",
            extras={"control": Extra(self.control_clip, s.z * self.control_clip / math.sqrt(self.control_share))},
            broadcast={"control": control},
        )

    def client(self, s: Setting) -> Client:
        """Return SGD on gradient + c - c_i."""
        return Corrected(_correction, s.local.optimizer.lr)


_REASON = "scaffold adds no noise"
_NO_CLIP = 1e30
"""An extra needs a finite clip; no float32 vector that training.max_update_norm admits is cut by this one."""


class Scaffold(MethodConfig):
    """SCAFFOLD without privacy (Karimireddy et al. 2020, option II): nothing is clipped or noised, and nothing can be proven."""

    name: Literal["scaffold"] = "scaffold"

    def extras(self, s: Setting) -> Mapping[str, tuple[int, ...]]:
        """Return one vector: the change of the client's control variate."""
        return {"control": (s.layout.dimension,)}

    def calibrate(self, s: Setting) -> Setting:
        _need_plain_sgd(s, self.name)
        if s.epsilon is not None or s.noise_multiplier is not None:
            raise ConfigError(
                "scaffold adds no noise, so privacy.epsilon and privacy.noise_multiplier have no meaning here: remove them, or "
                "choose method.name = 'dp-scaffold'"
            )
        return s

    def release(self, s: Setting) -> Release:
        """Return the policy that releases both vectors as they are."""
        return Controlled(self)

    def plan(self, s: Setting, control: Tensor) -> Plan:
        """Release update and control variate unchanged."""
        return UnprovenPlan(extras={"control": Extra(_NO_CLIP, 0.0)}, broadcast={"control": control}, reason=_REASON)

    def client(self, s: Setting) -> Client:
        """Return SGD on gradient + c - c_i."""
        return Corrected(_correction, s.local.optimizer.lr)

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Return one unbounded release: nothing can be proven without clip and noise."""
        return [Unbounded(_REASON)]


def _need_plain_sgd(s: Setting, name: str) -> None:
    refuse_dp_sgd(s, name)
    o = s.local.optimizer
    if o.name != "sgd" or o.momentum or o.weight_decay or s.local.schedule != "constant":
        raise ConfigError(
            f"{name} reads the mean gradient off plain SGD steps: set training.optimizer to sgd without momentum or "
            "weight_decay, and training.schedule = 'constant'"
        )


@dataclass(frozen=True)
class Controlled(Policy):
    """Policy c <- c + (n / N) mean of the released changes (Algorithm 1, server)."""

    method: DPScaffold | Scaffold

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        """Return the method's plan with the server's control variate, zero at first."""
        server = state if sum_noise(s) else released.server
        control: Any = server.get("control", released.model.new_zeros(len(released.model)))
        return self.method.plan(s, control)

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        """Move c by the released mean (aggregate view)."""
        return self.observe_all(s, state, [upload]) if sum_noise(s) else state

    def observe_all(self, s: Setting, state: State, uploads: Sequence[Upload]) -> State:
        """Move c by the mean of the single uploads (server view)."""
        import torch

        if not uploads:
            return state
        change = torch.stack([u.extras["control"] for u in uploads]).mean(0) * s.rate
        return {"control": state["control"] + change if "control" in state else change}


def _correction(local: Local) -> None:
    """Add c - c_i to the gradient."""
    assert local.plan is not None
    control = local.state.get("control", 0.0)
    local.model.grad.add_(local.plan.broadcast["control"] - control)


@dataclass(frozen=True)
class Corrected(Plain, Remembering):
    """Local SGD on corrected gradients; c_i <- c_i - c + (x - y) / (K eta) (Algorithm 1, client, option II)."""

    lr: float = 0.1

    def finish(self, local: Local) -> Tensor:
        """Return the update, and set the change of the control variate as an extra."""
        assert local.plan is not None
        update = super().finish(local)
        before = local.state.get("control", update.new_zeros(len(update)))
        change = -local.plan.broadcast["control"] - update / (local.steps * self.lr) if local.steps else 0 * update
        local.state["control"] = before + change
        local.extras["control"] = change
        return update
