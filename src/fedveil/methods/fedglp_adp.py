"""FedGLP-ADP (paper 001): personal coordinates chosen by their noisy movement, per-layer clip weights that follow trends.

Published: the clip weights follow raw norms, and the noise of one upload protects only a sum. Proven: the weights follow
debiased norms of what was released. Server view: masks too, from the client's own noisy uploads. Aggregate view: one weight
vector, dense noise on the sum; masks are private, since a contribution with zeros in it still has norm at most C.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedveil.accounting.types import Adjacency, Claim, Event, Scope, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.methods.base import MethodConfig, Setting, Variant, Weighting, calibrated, gaussian_releases, sum_noise
from fedveil.methods.fedglp_parts import ClipWeights, TwoLosses
from fedveil.methods.sparse import NonZero, coverage_mean
from fedveil.papers.fedglp_adp import fedglp_claim as fedglp
from fedveil.release.plan import Policy, Upload
from fedveil.training.local import Objective

if TYPE_CHECKING:
    from torch import Tensor

_REASON = "clip weights, and with them the noise, follow raw layer norms of earlier rounds (paper 001, Algorithm 1)"


class FedGLPADP(MethodConfig):
    """Layer-wise personalisation with clip weights that follow each layer's trend (paper 001).

    In the paper's letters, p is `growth`, T is `training.rounds`, n is `training.clients_per_round`.

    Args:
        variant: published or proven.
        clip: C, L2 bound on a whole update.
        lambda1: weight of the pull towards the round's first personal weights. Not stated in the paper; FedDPA's value.
        lambda2: weight of the pull of the shared update's norm towards C. Not stated in the paper; FedDPA's value.
        clipping: `layers`, weighted clips per layer and noise for each (ACNDP, Eqs. 13 to 16); `flat`, one clip C and noise
            sigma C / sqrt(n): DP-FedAvg + GLP, the middle row of the paper's Table 5.
        gamma: step of the log-odds of the clip weights; 0 keeps them at the layers' shares of the parameters.
        beta0: personal share of each layer at sigma = sigma0. slope: a of beta = beta0 exp(a (sigma - sigma0)); 0 fixes beta.
        sigma0: reference noise multiplier; None is that of epsilon = 6 in the same run.
        growth: p, share of a layer that becomes personal in each round; None is beta / T. Not stated in the paper.
        max_beta: beta above this counts as this. Not in the paper, whose beta can pass 1.
        max_log_odds: log-odds stay within plus and minus this, so that every clip stays positive. Not in the paper.
        personal_model: what a client uses and is measured by: its model as its last local training left it, or the newest
            global model with its personal coordinates in it. Not stated in the paper, whose figures fit only the first.
        accountant: published; sigma by the accountant that the paper used, or by its Theorem 1.
        allocation: proven; noise proportional to the clips as in the paper, or with the least total energy at the same cost.
    """

    name: Literal["fedglp-adp"] = "fedglp-adp"
    variant: Variant = "proven"
    clip: float = Field(0.5, gt=0, allow_inf_nan=False)
    lambda1: float = Field(0.1, ge=0, allow_inf_nan=False)
    lambda2: float = Field(0.05, ge=0, allow_inf_nan=False)
    clipping: Literal["layers", "flat"] = "layers"
    gamma: float = Field(0.4, ge=0, allow_inf_nan=False)
    beta0: float = Field(0.3, ge=0, lt=1)
    slope: float = Field(0.2, ge=0, allow_inf_nan=False)
    sigma0: float | None = Field(None, ge=0, allow_inf_nan=False)
    growth: float | None = Field(None, gt=0, le=1)
    max_beta: float = Field(0.9, ge=0, lt=1)
    max_log_odds: float = Field(20.0, gt=0, le=80)
    personal_model: Literal["trained", "combined"] = "trained"
    accountant: Literal["opacus", "theorem1"] = "opacus"
    allocation: Literal["equal", "least"] = "least"

    @property
    def weighting(self) -> Weighting:
        """Clients weigh the same."""
        return "uniform"

    @property
    def coverage(self) -> bool:
        """Eq. 12."""
        return True

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: the paper's sigma, from epsilon or as given."""
        if self.variant == "proven":
            return calibrated(self, s)
        if sum_noise(s) or s.example_clip is not None:
            raise ConfigError(
                "the published variant of fedglp-adp sends each client's update and mask to the server, with noise of its own: "
                "set privacy.view = 'server' and training.local = 'sgd' (its claim is about the sum all the same)"
            )
        sigma(self, s)
        return s

    def policy(self, s: Setting) -> Policy:
        """Proven: clip weights from released norms. Published: the upload leaves as training made it."""
        if self.variant == "published":
            return NonZero(("layer norms of earlier rounds",), _REASON)
        return ClipWeights(self, s, personal_share(self, s))

    def objective(self, s: Setting) -> Objective:
        """Two losses on disjoint coordinates; published: clip, noise and masks as well."""
        if s.local.optimizer.weight_decay:
            raise ConfigError("fedglp-adp steps two parts of a model in turn, weight decay moves both: set weight_decay = 0")
        noise = sigma(self, s) if self.variant == "published" else None
        return TwoLosses(self, s, personal_share(self, s), noise)

    def aggregate(self, uploads: Sequence[Upload], model: Tensor) -> Tensor:
        """Eq. 12: per coordinate, the mean over the clients that share it; a sum was divided by the planned n already."""
        return coverage_mean(uploads)

    def releases(self, s: Setting, view: View) -> list[Event]:
        """sum_l (f C_l / sigma_l)^2 = (f / z)^2 a round, whatever the weights; nothing for the published variant."""
        return gaussian_releases(s, view) if self.variant == "proven" else [Unbounded(_REASON)]

    def claim(self, s: Setting) -> Claim | None:
        """User level, for the sum of all uploads (paper 001, Theorem 1 and the accountant used with it)."""
        if self.variant == "proven" or sigma(self, s) == 0:
            return None
        formula = fedglp.accountant_epsilon if self.accountant == "opacus" else fedglp.claimed_epsilon
        scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
        note = f"sigma = {sigma(self, s):.4g}, of which each upload carries the share 1/sqrt({s.cohort})"
        return Claim(formula(sigma(self, s), s.rounds, s.delta), s.delta, scope, "paper 001, Theorem 1", note)

    def clip_norm(self, s: Setting) -> float | None:
        """C."""
        return self.clip

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """DP-SGD counts records per client by their nominal number."""
        return ("each client's number of examples is public",) if s.example_clip is not None else ()


def sigma(method: FedGLPADP, s: Setting) -> float:
    """The paper's noise multiplier: noise std of the sum / C, when all n clients add their shares."""
    if method.variant == "proven":
        return s.z if sum_noise(s) or s.example_clip is not None else s.z * math.sqrt(s.cohort)
    if s.epsilon is None:
        return s.z
    formula = fedglp.accountant_noise_multiplier if method.accountant == "opacus" else fedglp.claimed_noise_multiplier
    return formula(s.epsilon, s.rounds, s.delta)


@lru_cache(maxsize=64)
def personal_share(method: FedGLPADP, s: Setting) -> float:
    """beta = beta0 exp(a (sigma - sigma0)), at most `max_beta` (paper 001, Eq. 11)."""
    if not method.beta0 or not method.slope:
        return min(method.beta0, method.max_beta)
    reference = method.sigma0
    if reference is None:
        reference = sigma(method, method.calibrate(replace(s, epsilon=6.0, noise_multiplier=None)))
    exponent = method.slope * (sigma(method, s) - reference)
    return min(method.beta0 * math.exp(min(exponent, 50.0)), method.max_beta)
