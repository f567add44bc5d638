"""Counts of an evaluation that leave beside each update: how many of a client's own test examples were right, and how many wrong.

Both counts of a client add up to at most a public number of examples, which therefore bounds their L2 norm. They leave in the
same release as the update, and the noise of everything else grows so that the release costs what it cost without them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError
from fedveil.mechanism.cost import plan_mu
from fedveil.mechanism.plan import Extra, LocalDpSgd, Plan, Raw, reason_of

if TYPE_CHECKING:
    from fedveil.training.params import Layout

COUNTS = "evaluation"
"""The name of this extra: [right, wrong]."""


@dataclass(frozen=True)
class EvaluationCounts:
    """What of each release goes to the counts.

    Args:
        share: of the release's mu^2, in (0, 1). examples: most examples of a client that count.
    """

    share: float
    examples: int

    def beside(self, plan: Plan | Raw, layout: Layout) -> Plan:
        """The plan with the counts beside its update, at the same mu.

        With noise s on an update and extras of mu m, s / sqrt(1 - share) leaves them sqrt(1 - share) m, and noise
        examples / (sqrt(share) m) leaves the counts sqrt(share) m.

        Raises:
            ConfigError: it promises nothing, or sends nothing: there is no noise that the counts could share.
        """
        mu = reason_of(plan) or ("" if isinstance(plan, Raw) else plan_mu(plan, layout, 1))
        if isinstance(plan, Raw) or isinstance(mu, str) or not mu or isinstance(plan, LocalDpSgd) or plan.mechanism.stateful:
            reason = mu if isinstance(mu, str) else "nothing is sent, or its noise is drawn elsewhere"
            raise ConfigError(f"privacy.evaluation: counts can leave only beside an update with noise of its own ({reason})")
        noisier = self._with_noise_times(plan, 1 / math.sqrt(1 - self.share))
        counts = Extra(float(self.examples), self.examples / (math.sqrt(self.share) * mu))
        return replace(noisier, extras={**noisier.extras, COUNTS: counts})

    def alone(self, plan: Plan) -> Plan:
        """The plan of the same price without counts, up to rounding: what `beside` was called with."""
        return self._with_noise_times(plan, math.sqrt(1 - self.share))

    @staticmethod
    def _with_noise_times(plan: Plan, factor: float) -> Plan:
        extras = {name: Extra(e.clip, e.noise_std * factor) for name, e in plan.extras.items() if name != COUNTS}
        return replace(plan, noise_std=plan.noise_std * factor, extras=extras)
