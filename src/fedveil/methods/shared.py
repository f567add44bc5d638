"""Parts shared by several methods: two variants, and per-layer quantities estimated from noisy releases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator

from fedveil.accounting.types import Event, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.mechanism.cost import plan_mu
from fedveil.mechanism.plan import Plan
from fedveil.methods.base import MethodConfig, Setting, Variant, Weighting, calibrated, gaussian_releases, sum_noise

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.mechanism.plan import Upload
    from fedveil.training.params import Layout


def _ordered(value: tuple[float, float]) -> tuple[float, float]:
    if not 0 < value[0] <= value[1] < math.inf:
        raise ValueError(f"give [lowest, highest] with 0 < lowest <= highest, not {list(value)}")
    return value


ClipRange = Annotated[tuple[float, float], AfterValidator(_ordered)]
"""Range of a clip, as multiples of its initial value."""


def first_clips(clip: float, layout: Layout) -> Tensor:
    """Return the initial clip of each layer [L], proportional to the root of its size, of total norm `clip`."""
    import torch

    sizes = torch.tensor([float(n) for n in layout.sizes])
    return clip * (sizes / sizes.sum()).sqrt()


def debiased_norms(upload: Upload, layout: Layout) -> Tensor:
    """Return the norm of each layer [L] of a release, with the known energy of the noise subtracted; never negative.

    E ||u + noise||^2 = ||u||^2 + (coordinates sent) sigma^2, layer by layer.
    """
    if upload.support is None:
        counts = upload.vector.new_tensor([float(n) for n in layout.sizes])
    else:
        counts = layout.norms(upload.support.to(upload.vector.dtype)).square()
    return (layout.norms(upload.vector).square() - counts * upload.noise_std.square()).clamp_min(0).sqrt()


def layered_plan(s: Setting, layer_clip: Tensor, *, equal: bool = False, clamp: float | None = None) -> Plan:
    """Return a plan with per-layer clips C_l and noise stds sigma_l such that the round costs mu = f / z for any clips.

    sum_l (C_l / sigma_l)^2 = 1 / z^2 is met by sigma_l = z C_l sqrt(L) (`equal`), and with the least total noise
    sum_l n_l sigma_l^2 by sigma_l^2 = z^2 (C_l / sqrt(n_l)) sum_j C_j sqrt(n_j) (Lagrange; never worse, by
    Cauchy-Schwarz). The stds are float64, because noise rounded to float32 could cost more.
    """
    exact = layer_clip.double()
    if equal:
        std = s.z * exact * len(exact) ** 0.5
    else:
        roots = exact.new_tensor([float(n) for n in s.layout.sizes]).sqrt()
        std = s.z * (exact / roots * (exact * roots).sum()).sqrt()
    return Plan(layer_clip=layer_clip, noise_std=std, place="sum" if sum_noise(s) else "upload", clamp=clamp)


def noise_at_share(s: Setting, plan: Plan) -> Plan:
    """Return the plan with its noise stds scaled in float64, in proportion, so that the round costs mu = f / z exactly."""
    import torch

    unscaled = plan_mu(plan, s.layout, 1)
    if isinstance(unscaled, str):
        raise ConfigError(f"these proportions of noise protect nothing: {unscaled}")
    return replace(plan, noise_std=torch.as_tensor(plan.noise_std, dtype=torch.float64) * (s.z * unscaled))


def refuse_dp_sgd(s: Setting, method: str) -> None:
    """Refuse DP-SGD in local training, which would replace the method's noise."""
    if s.example_clip is not None:
        raise ConfigError(f"{method} adds its own noise to whole updates: set training.local = 'sgd'")


def paper_epsilon(s: Setting, method: str) -> float:
    """Return the epsilon from which a published variant computes its noise; raise ConfigError if it is missing."""
    if s.epsilon is None:
        raise ConfigError(
            f"the published variant of {method} computes its noise from the paper's epsilon: give privacy.epsilon, "
            "not privacy.noise_multiplier"
        )
    return s.epsilon


class TwoVariants(MethodConfig):
    """Base of a method with a proven and a published variant; the proven one clips to `clip` and costs f / z per round.

    Args:
        reason: why nothing can be proven about the published variant.
        published_weighting: weighting of the published variant; the proven one is uniform, so sizes stay private and the
            sensitivity is the clip.
    """

    reason: ClassVar[str]
    published_weighting: ClassVar[Weighting] = "examples"
    variant: Variant = "proven"

    @property
    def weighting(self) -> Weighting:
        return self.published_weighting if self.variant == "published" else "uniform"

    @property
    def unproven(self) -> str:
        """Return `reason`; a method overrides this if the reason depends on its options."""
        return self.reason

    def calibrate(self, s: Setting) -> Setting:
        """Calibrate the noise to the configured epsilon (proven), or check the paper's formula (published)."""
        refuse_dp_sgd(s, self.name)
        if self.variant == "proven":
            return calibrated(self, s)
        self.check_published(s)
        return s

    def check_published(self, s: Setting) -> None:
        """Refuse a setting without the input of the paper's noise formula."""
        paper_epsilon(s, self.name)

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Return f / z per round for the proven variant, independent of the policy's state."""
        return gaussian_releases(s, view) if self.variant == "proven" else [Unbounded(self.unproven)]

    def clip_norm(self, s: Setting) -> float | None:
        return super().clip_norm(s) if self.variant == "proven" else None
