"""Adap DP-FL (Fu et al. 2022): DP-SGD whose clip follows each client's noisy gradients, and whose noise falls with progress.

Everything it adapts to has left already: the clip follows the norm of what was released, the noise the loss on public examples.
So the published rule is proven as well; the proven variant takes the noise out of the norm, which alone can drive the clip up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import Field

from fedveil.accounting.accountant import bound
from fedveil.accounting.types import Adjacency, Claim, SampledGaussian, Scope, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.cost import step_sensitivity
from fedveil.mechanism.plan import DpSgd, LocalDpSgd, Plan, Released, Upload, step_of
from fedveil.methods.adaptive import ClipRange
from fedveil.methods.base import (
    MethodConfig,
    Policy,
    Release,
    Setting,
    Variant,
    calibrated,
    reads_public_split,
    sum_noise,
)
from fedveil.training.local import State

FALLS = 3
"""Falls of the public loss in a row after which the noise is lowered."""


class AdapDPFL(MethodConfig):
    """DP-SGD on each client with a clip and a noise that follow the training (Adap DP-FL, Fu et al. 2022).

    The first clip is `training.example_clip`. The noise falls only where `data.public_fraction` gives a public loss.

    Args:
        variant: published or proven; a bound is proven of both, and they differ in what the clip follows.
        factor: published; alpha, the next clip is alpha times the norm of a step's gradient as it was released, noise and all.
        headroom: proven; the next clip is this multiple of the same norm without the power of its noise: that of a mean of
            clipped gradients, so without it the clip could only shrink.
        decay: beta; the noise is multiplied by it each time the public loss has fallen three times in a row.
        clip_range: proven; the clip stays within these multiples of its start.
    """

    reconstructed: ClassVar[str] = (
        "the rules are read in notes about the paper, not in the paper: alpha = 1, beta about 0.999, three falls, and Renyi "
        "accounting; that the norm is read off the update of a round, not step by step, is ours"
    )
    name: Literal["adap-dp-fl"] = "adap-dp-fl"
    variant: Variant = "proven"
    factor: float = Field(1.0, gt=0, allow_inf_nan=False)
    decay: float = Field(0.999, gt=0, le=1)
    headroom: float = Field(10.0, gt=0, allow_inf_nan=False)
    clip_range: ClipRange = (0.1, 4.0)

    def calibrate(self, s: Setting) -> Setting:
        """z is the least noise that the schedule can reach; each step is charged at it."""
        o = s.local.optimizer
        if s.example_clip is None:
            raise ConfigError("adap-dp-fl adapts DP-SGD inside the clients: set training.local = 'dp-sgd'")
        if o.name != "sgd" or o.momentum or o.weight_decay or s.local.schedule != "constant":
            raise ConfigError(
                "adap-dp-fl reads the norm of a gradient off plain SGD steps: set training.optimizer to sgd without momentum or "
                "weight_decay, and training.schedule = 'constant'"
            )
        return calibrated(self, s)

    def release(self, s: Setting) -> Release:
        return Following(self)

    def claim(self, s: Setting) -> Claim | None:
        """Published: the Renyi accountant over all steps, one record taken away."""
        step = s.dp_sgd()
        if self.variant == "proven" or step is None or s.z == 0:
            return None
        scope = Scope(Unit.RECORD, Adjacency.ZERO_OUT, View.SERVER)
        events = [SampledGaussian(step.rate, s.z, step.steps * s.participations)]
        epsilon, _ = bound(events, s.delta, accountant="rdp", adjacency=Adjacency.ZERO_OUT)
        return Claim(epsilon, s.delta, scope, "Adap DP-FL, Renyi accountant, reconstructed", "summed over all steps")

    def clip_norm(self, s: Setting) -> float | None:
        """Single gradients are clipped, updates are not."""
        return None

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """What the noise follows."""
        return reads_public_split(s)


@dataclass(frozen=True)
class Following(Policy):
    """Clip of a client from its own release (aggregate view: one clip for all), noise of all from the public loss."""

    method: AdapDPFL

    def plan(self, s: Setting, seen: Released, state: State) -> Plan:
        first = _first(s)
        server = state if sum_noise(s) else seen.server
        left = _most(s) - int(server.get("lowered", 0))
        step = replace(first, clip=state.get("clip", first.clip), noise_multiplier=s.z * self.method.decay**-left)
        return LocalDpSgd(step=no_cheaper(step, first, s))

    def observe(self, s: Setting, state: State, left: Upload) -> State:
        """The next clip; in the aggregate view the public loss as well."""
        new = {**state, "clip": self._clip(s, left)}
        return _lowered(new, left.public_loss) if sum_noise(s) else new

    def observe_all(self, s: Setting, state: State, uploads: Sequence[Upload]) -> State:
        """Server view: the public loss, once a round."""
        return _lowered(state, uploads[0].public_loss) if uploads else state

    def _clip(self, s: Setting, left: Upload) -> float:
        """A multiple of the norm of a step's gradient, read off the update of K steps at rate eta.

        ||u / (eta K)||^2 is on average ||g||^2 + P / (K n), where P is the power of the noise in a step and n the clients in the
        mean; the norm of a noised gradient is sqrt(||g||^2 + P) (published).
        """
        m, step = self.method, step_of(left.plan)
        assert step is not None
        first = _first(s).clip
        noise = s.layout.dimension * (step.noise_multiplier * step.clip / step.expected) ** 2
        clients = s.cohort if sum_noise(s) else 1
        seen = (float(left.vector.norm()) / (s.local.optimizer.lr * step.steps)) ** 2
        clean = max(seen - noise / (step.steps * clients), 0.0)
        if m.variant == "published":
            return min(max(m.factor * math.sqrt(clean + noise), 1e-6 * first), 1e6 * first)
        return min(max(m.headroom * math.sqrt(clean), m.clip_range[0] * first), m.clip_range[1] * first)


def _first(s: Setting) -> DpSgd:
    step = s.dp_sgd()
    assert step is not None
    return step


def _most(s: Setting) -> int:
    """Times that the noise can be lowered before the last round: the first after rounds 0 to 3."""
    return max(0, s.rounds - 1 - FALLS)


def _lowered(state: State, loss: float | None) -> State:
    """Lower the noise after the third fall of the public loss in a row, and after each further one."""
    if loss is None:
        return state
    falls = int(state.get("falls", 0)) + 1 if loss < state.get("loss", -math.inf) else 0
    lowered = int(state.get("lowered", 0)) + (falls >= FALLS)
    return {**state, "loss": loss, "falls": falls, "lowered": lowered}


def no_cheaper(step: DpSgd, priced: DpSgd, s: Setting) -> DpSgd:
    """`step` with at least the noise that its price is that of `priced`: the share of the grid in it depends on the clip."""

    def multiplier(of: DpSgd) -> float:
        return of.noise_multiplier * of.clip / step_sensitivity(of, s.layout.dimension, s.scope.adjacency)

    wanted = multiplier(priced)
    while 0 < multiplier(step) < wanted:
        step = replace(step, noise_multiplier=step.noise_multiplier * (wanted / multiplier(step)) * (1 + 1e-12))
    return step
