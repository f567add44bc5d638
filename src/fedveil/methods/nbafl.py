"""NbAFL (Wei et al. 2020), "Full DP" of LaDP-FL: each client clips its weights, not its update, and adds Gaussian noise.

Published: the noise rests on a sensitivity 2 C / n_min that trained weights do not have. Proven: the same clipped weights with
the sensitivity that they do have, C under zero-out and 2 C under replace-one, composed exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Claim
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import UnprovenPlan
from fedveil.methods.adaptive import paper_epsilon
from fedveil.methods.base import Fixed, Mean, Release, Setting, Summed, SumServer, gaussian_plan
from fedveil.methods.classical_noise import classical_scope, full_dp_std, sequential_claim
from fedveil.methods.two_variants import TwoVariants
from fedveil.papers.ladp_fl.baseline_formulas import nbafl_broadcast_std, nbafl_upload_std
from fedveil.training.local import Client, Local, Plain, Proximal, State

if TYPE_CHECKING:
    from torch import Tensor

_REASONS = {
    "paper": "its sensitivity 2 C / n_min takes a minimiser of a mean for a mean of minimisers; trained weights have 2 C (NbAFL)",
    "repo": "weights are not clipped before they are noised, so their sensitivity has no bound (NbAFL as in FederatedScope)",
    "ladp-fl": "its sensitivity counts epochs where steps move the weights, and updates are not clipped (Full DP of LaDP-FL)",
}
_LARGEST_MU = 1e3


class NbAFL(TwoVariants):
    """Noise before aggregation: clipped weights and classical Gaussian noise, "Full DP" of LaDP-FL.

    Args:
        variant: published or proven.
        source: published; whose noise. `paper`: c L (2 C / n_min) / epsilon on weights clipped to C. `repo`: c T C / (n epsilon)
            on weights that are not clipped; the server clamps each coordinate of its model to C. `ladp-fl`: LaDP-FL's baseline,
            c 2 eta E G_c / epsilon in each round, with the gradients clipped (`training.batch_clip`) and the weights not.
        clip: C, bound on the norm of a client's weights (`repo`: on each coordinate). The paper takes the median of their norms,
            which would read raw data.
        exposures: L, uploads of a client that an eavesdropper sees; None for all T rounds, after which the server adds no noise.
        proximal: mu of the penalty mu/2 ||w_i - w||^2 of local training.
    """

    name: Literal["nbafl"] = "nbafl"
    reconstructed: ClassVar[str] = (
        "source = 'paper', from notes on Wei et al. 2020, and 'ladp-fl', from LaDP-FL's Theorems 1 and 2; 'repo' was read in "
        "FederatedScope's trainer_nbafl.py"
    )
    source: Literal["paper", "repo", "ladp-fl"] = "paper"
    clip: float = Field(5.0, gt=0, allow_inf_nan=False)
    exposures: int | None = Field(None, ge=1)
    proximal: float = Field(0.0, ge=0, allow_inf_nan=False)

    @property
    def unproven(self) -> str:
        return _REASONS[self.source]

    @property
    def sends_weights(self) -> bool:
        """Whether clients release weights, and not how these differ from the global model's."""
        return self.variant == "proven" or self.source != "ladp-fl"

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: noise from the formula."""
        if self.sends_weights and (s.sampling == "poisson" or (s.min_survivors or s.cohort) < s.cohort):
            raise ConfigError(
                "nbafl averages weights, so their number must be fixed: set training.sampling = 'fixed', and leave "
                "privacy.min_survivors out"
            )
        return super().calibrate(s)

    def check_published(self, s: Setting) -> None:
        if (self.exposures or 1) > s.rounds:
            raise ConfigError(
                f"method.exposures = {self.exposures} is more than the {s.rounds} rounds: at most all uploads are seen"
            )
        self.noise_std(s)

    def release(self, s: Setting) -> Release:
        """The same clip and noise in every round."""
        if self.variant == "proven":
            return Fixed(gaussian_plan(s, self.clip))
        clip = self.clip if self.source == "paper" else math.inf
        return Fixed(UnprovenPlan(clip=clip, noise_std=self.noise_std(s), reason=self.unproven))

    def client(self, s: Setting) -> Client:
        """Local training, with the proximal term; what leaves are weights."""
        penalty = Proximal(self.proximal) if self.proximal else None
        return Weights(penalty) if self.sends_weights else Plain(penalty)

    def server(self, s: Setting) -> SumServer:
        """From the global model to the mean of the weights."""
        if not self.sends_weights:
            return Mean()
        return ToWeights(self.clip if self.variant == "published" and self.source == "repo" else None)

    def claim(self, s: Setting) -> Claim | None:
        """Published: epsilon for L uploads of a record's client; as LaDP-FL's Full DP, epsilon a round."""
        if self.variant == "proven":
            return None
        epsilon = paper_epsilon(s, self.name)
        if self.source == "ladp-fl":
            return sequential_claim(s, s.rounds * epsilon, "LaDP-FL, Theorem 1")
        return Claim(epsilon, s.delta, classical_scope(), "NbAFL, Section III", self._sound(s))

    def _sound(self, s: Setting) -> str:
        """What the same noise gives with a sensitivity that holds."""
        mu = 2 * self.clip * math.sqrt(s.rounds) / self.noise_std(s)
        if self.source == "repo":
            return "weights are not clipped before the noise"
        size = f"{epsilon_of(mu, s.delta):.4g}" if mu <= _LARGEST_MU else f"above {_LARGEST_MU**2 / 2:.2g}"
        return f"with the sensitivity 2 C of trained weights the noise of all rounds gives epsilon = {size}"

    def clip_norm(self, s: Setting) -> float | None:
        """C, where the norm of the weights is clipped to it."""
        return self.clip if self.variant == "proven" or self.source == "paper" else None

    def noise_std(self, s: Setting) -> float:
        """Published: of each upload, with what the server adds before it broadcasts, so that the mean has the noise of both."""
        if self.source == "ladp-fl":
            return full_dp_std(s, self.name)
        epsilon, records = paper_epsilon(s, self.name), s.known_records
        exposures = s.rounds if self.exposures is None else self.exposures
        one = nbafl_upload_std(epsilon, s.delta, self.clip, records, 1)
        if self.source == "repo":
            own, added = s.rounds * one / 2, nbafl_broadcast_std(one, epsilon, s.cohort, s.rounds, s.clients, s.clients)
        else:
            own, added = exposures * one, nbafl_broadcast_std(one, epsilon, exposures, s.rounds, s.clients, s.cohort)
        return math.hypot(own, added * math.sqrt(s.cohort))


@dataclass(frozen=True)
class Weights(Plain):
    """Local training that releases the weights that it ended with."""

    def finish(self, local: Local) -> Tensor:
        """w_i; the door clips it."""
        return local.model.vector.clone()


@dataclass(frozen=True)
class ToWeights(SumServer):
    """From the global model to the mean of released weights, each of which is clamped to `bound` where there is one."""

    bound: float | None

    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        weights = total.vector if self.bound is None else total.vector.clamp(-self.bound, self.bound)
        return state, weights - total.start
