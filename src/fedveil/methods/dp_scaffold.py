"""DP-SCAFFOLD (Noble et al. 2022): control variates correct the drift of clients; both vectors are released with noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Extra, Plan, Released, Upload
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
        refuse_dp_sgd(s, self.name)
        o = s.local.optimizer
        if o.name != "sgd" or o.momentum or o.weight_decay or s.local.schedule != "constant":
            raise ConfigError(
                "dp-scaffold reads the mean gradient off plain SGD steps: set training.optimizer to sgd without momentum or "
                "weight_decay, and training.schedule = 'constant'"
            )
        return calibrated(self, s)

    def release(self, s: Setting) -> Release:
        """Return the policy that releases both vectors and broadcasts the server's control variate."""
        return Controlled(self)

    def client(self, s: Setting) -> Client:
        """Return SGD on gradient + c - c_i."""
        return Corrected(_correction, s.local.optimizer.lr)


@dataclass(frozen=True)
class Controlled(Policy):
    """Policy c <- c + (n / N) mean of the released changes (Algorithm 1, server)."""

    method: DPScaffold

    def plan(self, s: Setting, seen: Released, state: State) -> Plan:
        """Divide the round's mu^2 = (f / z)^2 between update and control variate."""
        m, server = self.method, state if sum_noise(s) else seen.server
        control: Any = server.get("control", seen.model.new_zeros(len(seen.model)))
        return Plan(
            clip=m.clip,
            noise_std=s.z * m.clip / math.sqrt(1 - m.control_share),
            place="sum" if sum_noise(s) else "upload",
            extras={"control": Extra(m.control_clip, s.z * m.control_clip / math.sqrt(m.control_share))},
            broadcast={"control": control},
        )

    def observe(self, s: Setting, state: State, left: Upload) -> State:
        """Move c by the released mean (aggregate view)."""
        return self.observe_all(s, state, [left]) if sum_noise(s) else state

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
