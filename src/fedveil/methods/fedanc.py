"""FedANC: an LSTM on each client sets the amount of noise and the share of coordinates that get it.

Published: the noise goes to the largest coordinates of each raw gradient, the others stay bare, and the local model that mixes
both is uploaded, so nothing can be proven. Proven: support, noise and share are fixed before the round from what was released;
the update is restricted, clipped and noised once. Sparsity then lowers the noise at unchanged cost.
"""

from __future__ import annotations

from typing import ClassVar

from fedveil.accounting.types import Adjacency, Claim, Scope, Unit, View
from fedveil.errors import ConfigError
from fedveil.methods.adaptive import paper_epsilon
from fedveil.methods.base import CoverageMean, Release, Setting, Unproven, reads_public_split, sum_noise, what_is_not_zero
from fedveil.methods.fedanc_options import FedANCOptions
from fedveil.methods.fedanc_parts import Budgeted, SparseNoise
from fedveil.methods.lstm_controller import BETA
from fedveil.papers.fedanc.fedanc_claim import claimed_epsilon
from fedveil.training.local import Client, Plain


class FedANC(FedANCOptions):
    __doc__ = FedANCOptions.__doc__
    reason: ClassVar[str] = (
        "the coordinates that get noise are the largest of each raw gradient, and the others move the model bare (FedANC)"
    )

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: the controller steers towards the configured epsilon."""
        if self.gamma_min >= self.gamma_max:
            raise ConfigError(f"method.gamma_min = {self.gamma_min:g} must be below method.gamma_max = {self.gamma_max:g}")
        if (self.beta is None) != (self.gamma is None) or (self.beta is not None and self.variant == "proven"):
            raise ConfigError("method.beta and method.gamma replace the controller of the published variant: give both, or none")
        return super().calibrate(s)

    def check_published(self, s: Setting) -> None:
        if sum_noise(s):
            raise ConfigError(
                "the published variant of fedanc sends each client's mask to the server: set privacy.view = 'server'"
            )
        self._target(s)

    def release(self, s: Setting) -> Release:
        """Proven: support, noise and share from what was released. Published: the upload leaves as training made it."""
        return Budgeted(self) if self.variant == "proven" else Unproven(("gradients", "losses"), self.unproven, what_is_not_zero)

    def client(self, s: Setting) -> Client:
        """Proven: plain training. Published: noise on part of each gradient."""
        return Plain() if self.variant == "proven" else SparseNoise(self, self._target(s), s.delta)

    def server(self, s: Setting) -> CoverageMean:
        """Eq. 13: per coordinate, the weighted mean over the clients that sent it; the others keep the global value."""
        return CoverageMean()

    def claim(self, s: Setting) -> Claim | None:
        """Theorem 2 for one step, with constants or the outputs that pre-training aims at."""
        if self.variant == "proven":
            return None
        beta, gamma = self.constant or (sum(BETA) / 2, (self.gamma_min + self.gamma_max) / 2)
        scope = Scope(Unit.RECORD, Adjacency.REPLACE_ONE, View.SERVER)
        steered = "" if self.constant else f"; the controller is steered towards {self._target(s):g}"
        note = f"one step at beta = {beta:g}, gamma = {gamma:g}{steered}"
        return Claim(claimed_epsilon(beta, gamma, s.layout.dimension, s.delta), s.delta, scope, "FedANC, Theorem 2", note)

    def _target(self, s: Setting) -> float:
        """What the published controller is steered towards; 0 where there is none."""
        if self.constant is None:
            return paper_epsilon(s, self.name)
        if s.epsilon is not None:
            raise ConfigError("method.beta and method.gamma are constant, so nothing steers them: remove privacy.epsilon")
        return 0.0

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """What the controller reads."""
        return reads_public_split(s) if self.variant == "proven" else ()
