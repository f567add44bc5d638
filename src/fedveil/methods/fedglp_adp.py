"""FedGLP-ADP: personal coordinates chosen by their noisy movement, per-layer clip weights that follow trends.

Published: the clip weights follow raw norms, and the noise of one upload protects only a sum. Proven: the weights follow
debiased norms of what was released. Server view: masks too, from the client's own noisy uploads. Aggregate view: one weight
vector, dense noise on the sum; masks are private, since a contribution with zeros in it still has norm at most C.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from fedveil.accounting.types import Adjacency, Claim, Event, Scope, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.methods.base import (
    CoverageMean,
    Release,
    Setting,
    Unproven,
    calibrated,
    gaussian_releases,
    sum_noise,
    what_is_not_zero,
)
from fedveil.methods.fedglp_options import FedGLPOptions
from fedveil.methods.fedglp_parts import ClipWeights, TwoLosses
from fedveil.papers.fedglp_adp import fedglp_claim as fedglp
from fedveil.training.local import Client

_REASON = "clip weights, and with them the noise, follow raw layer norms of earlier rounds (FedGLP-ADP, Algorithm 1)"


class FedGLPADP(FedGLPOptions):
    __doc__ = FedGLPOptions.__doc__

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: the paper's sigma, from epsilon or as given."""
        if s.local.optimizer.weight_decay:
            raise ConfigError("fedglp-adp steps two parts of a model in turn, weight decay moves both: set weight_decay = 0")
        if self.variant == "proven":
            if self.layers == "network":
                raise ConfigError("method.layers = 'network': the proven variant of fedglp-adp clips by tensors: leave it out")
            return calibrated(self, s)
        if sum_noise(s) or s.example_clip is not None:
            raise ConfigError(
                "the published variant of fedglp-adp sends each client's update and mask to the server, with noise of its own: "
                "set privacy.view = 'server' and training.local = 'sgd' (its claim is about the sum all the same)"
            )
        sigma(self, s)
        return s

    def release(self, s: Setting) -> Release:
        """Proven: clip weights from released norms. Published: the upload leaves as training made it."""
        if self.variant == "published":
            return Unproven(("layer norms of earlier rounds",), _REASON, what_is_not_zero)
        return ClipWeights(self, personal_share(self, s))

    def client(self, s: Setting) -> Client:
        """Two losses on disjoint coordinates; published: clip, noise and masks as well."""
        noise = sigma(self, s) if self.variant == "published" else None
        return TwoLosses(self, s, personal_share(self, s), noise)

    def server(self, s: Setting) -> CoverageMean:
        """Eq. 12: per coordinate, the mean over the clients that share it; a sum was divided by the planned n already."""
        return CoverageMean()

    def releases(self, s: Setting, view: View) -> list[Event]:
        """sum_l (f C_l / sigma_l)^2 = (f / z)^2 a round, whatever the weights: the release itself asks for calibrated noise."""
        return gaussian_releases(s, view) if self.variant == "proven" else [Unbounded(_REASON)]

    def claim(self, s: Setting) -> Claim | None:
        """User level, for the sum of all uploads (FedGLP-ADP, Theorem 1 and the accountant used with it)."""
        if self.variant == "proven" or sigma(self, s) == 0:
            return None
        formula = fedglp.accountant_epsilon if self.accountant == "opacus" else fedglp.claimed_epsilon
        scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
        note = f"sigma = {sigma(self, s):.4g}, of which each upload carries the share 1/sqrt({s.cohort})"
        return Claim(formula(sigma(self, s), s.rounds, s.delta), s.delta, scope, "FedGLP-ADP, Theorem 1", note)


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
    """beta = beta0 exp(a (sigma - sigma0)), at most `max_beta` (FedGLP-ADP, Eq. 11)."""
    if not method.beta0 or not method.slope:
        return min(method.beta0, method.max_beta)
    reference = method.sigma0
    if reference is None:
        reference = sigma(method, method.calibrate(replace(s, epsilon=6.0, noise_multiplier=None)))
    exponent = method.slope * (sigma(method, s) - reference)
    return min(method.beta0 * math.exp(min(exponent, 50.0)), method.max_beta)
