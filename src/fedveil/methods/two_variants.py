"""Methods in two variants: as published, of which nothing can be proven, and proven."""

from __future__ import annotations

from typing import ClassVar

from fedveil.accounting.types import Event, Unbounded, View
from fedveil.methods.adaptive import paper_epsilon, refuse_dp_sgd
from fedveil.methods.base import MethodConfig, Setting, Variant, Weighting, calibrated, gaussian_releases


class TwoVariants(MethodConfig):
    """Defaults of such a method: its proven variant clips to `clip` and releases at f / z a round.

    Args:
        reason: why nothing can be proven of the published variant.
        published_weighting: how its clients weigh; the proven ones weigh the same, so sizes stay private and the sensitivity is
            the clip.
    """

    reason: ClassVar[str]
    published_weighting: ClassVar[Weighting] = "examples"
    variant: Variant = "proven"

    @property
    def weighting(self) -> Weighting:
        return self.published_weighting if self.variant == "published" else "uniform"

    @property
    def unproven(self) -> str:
        """The reason, where it depends on the options."""
        return self.reason

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: noise from the paper's formula."""
        refuse_dp_sgd(s, self.name)
        if self.variant == "proven":
            return calibrated(self, s)
        self.check_published(s)
        return s

    def check_published(self, s: Setting) -> None:
        """Refuse a setting from which the paper's formula has no noise."""
        paper_epsilon(s, self.name)

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Proven: f / z a round, whatever the policy learns."""
        return gaussian_releases(s, view) if self.variant == "proven" else [Unbounded(self.unproven)]

    def clip_norm(self, s: Setting) -> float | None:
        return super().clip_norm(s) if self.variant == "proven" else None
