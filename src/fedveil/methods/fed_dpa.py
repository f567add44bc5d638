"""FedDPA (Yang, Huang and Ye 2023; the program DynamicPFL): personal coordinates by Fisher information, updates kept at the clip.

As its program has it, everything is uploaded under dense noise: nothing of the masks shows, and what fails is only the noise,
sized for records that are never clipped by themselves. As its text has it, only shared coordinates are sent and noised: then the
mask decides what is noised, and nothing can be proven. The proven variant sends zeros for personal coordinates under dense noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.types import Claim, Event, View
from fedveil.methods.adaptive import refuse_dp_sgd
from fedveil.methods.base import (
    Fixed,
    MethodConfig,
    Release,
    Setting,
    Unproven,
    Variant,
    Weighting,
    calibrated,
    gaussian_plan,
    gaussian_releases,
    what_is_not_zero,
)
from fedveil.methods.fedglp_parts import MASK_SHARE, descend_part
from fedveil.methods.fisher_split import Split, check_split, fisher_split, pull, pull_to
from fedveil.methods.summed_noise import published_noise, sigma_of, summed_claim
from fedveil.papers.fedglp_adp.baseline_claims import record_steps
from fedveil.papers.fedglp_adp.opacus_accountant import opacus_epsilon, opacus_noise_multiplier
from fedveil.training.local import Client, Local, Remembering, State

if TYPE_CHECKING:
    from torch import Tensor

_REASON = "which coordinates are sent and noised follows the Fisher information of raw data (FedDPA, as its text has it)"


class FedDPA(MethodConfig):
    """Dynamic Fisher personalisation with an adaptive constraint on what is shared.

    Args:
        variant: published or proven.
        source: published; `repo` uploads everything under dense noise, as the authors' program does, `paper` shared coordinates.
        clip: C, L2 bound on an update.
        threshold: tau, scaled Fisher information from which a coordinate is personal.
        lambda1, lambda2: weights of the pull of personal coordinates to where they were, and of the update's length to C.
        accountant: published; what the noise is computed for: `records`, one DP-SGD run over all records (the program), or
            `rounds`, the T releases of a client (the text). None is that of the source.
        sigma: published; noise std of the sum / clip, instead of privacy.epsilon and an accountant.
    """

    name: Literal["fed-dpa"] = "fed-dpa"
    reconstructed: ClassVar[str] = "source = 'paper', whose text was not at hand; the authors' program was read"
    variant: Variant = "proven"
    source: Literal["repo", "paper"] = "repo"
    clip: float = Field(0.5, gt=0, allow_inf_nan=False)
    threshold: float = Field(0.4, gt=0, lt=1)
    lambda1: float = Field(0.1, ge=0, allow_inf_nan=False)
    lambda2: float = Field(0.05, ge=0, allow_inf_nan=False)
    accountant: Literal["records", "rounds"] | None = None
    sigma: float | None = Field(None, ge=0, allow_inf_nan=False)

    @property
    def weighting(self) -> Weighting:
        """The published mean weighs by sizes; the proven one cannot gain by a sum if it does."""
        return "examples" if self.variant == "published" else "uniform"

    @property
    def hides_mask(self) -> bool:
        """Whether every upload has noise on every coordinate."""
        return self.variant == "proven" or self.source == "repo"

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: the accountant's sigma for the sum."""
        check_split(s, self.name)
        if self.variant == "published":
            rate, steps = self._counted(s)
            formula = partial(opacus_noise_multiplier, steps=steps, delta=s.delta, rate=rate)
            return published_noise(s, self.name, self.sigma, formula)
        refuse_dp_sgd(s, self.name)
        return calibrated(self, s)

    def release(self, s: Setting) -> Release:
        """Clip and dense noise in every round; as the text has it, the upload leaves as training made it."""
        return (
            Fixed(gaussian_plan(s, self.clip))
            if self.hides_mask
            else Unproven(("Fisher information",), _REASON, what_is_not_zero)
        )

    def client(self, s: Setting) -> Client:
        return TwoPasses(self, s)

    def releases(self, s: Setting, view: View) -> list[Event]:
        """(f / z)^2 a round for each upload; nothing where the mask decides what is noised."""
        return gaussian_releases(s, view) if self.hides_mask else super().releases(s, view)

    def claim(self, s: Setting) -> Claim | None:
        """User level for the sum, by either accountant."""
        if self.variant == "proven":
            return None
        rate, steps = self._counted(s)
        counted = f"FedDPA, Renyi accountant ({steps:.4g} releases at rate {rate:.3g})"
        return summed_claim(s, partial(opacus_epsilon, steps=steps, delta=s.delta, rate=rate), counted)

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        return ("each client's number of examples is public",) if self.variant == "published" else ()

    def _counted(self, s: Setting) -> tuple[float, float]:
        """(sampling rate, steps) of the accountant; local steps that are fixed count as the epochs that they come to."""
        if (self.accountant or ("records" if self.source == "repo" else "rounds")) == "rounds":
            return s.rate, float(s.rounds)
        batch, records = s.local.batch_size, s.known_records
        epochs = s.local.epochs if s.local.steps is None else s.local.steps * batch / records
        return record_steps(batch, s.clients * records, s.rounds, epochs, s.rate)


@dataclass(frozen=True)
class TwoPasses(Remembering):
    """E epochs of the personal coordinates, then E epochs of the shared ones."""

    method: FedDPA
    setting: Setting
    columns = (MASK_SHARE,)

    def begin(self, local: Local) -> None:
        """The split, and the first pass: CE + lambda1/2 sum_l ||w_l - anchor_l||."""
        split = fisher_split(local, self.setting, self.method.threshold, skip_zeros=self.method.source == "repo")
        local.scratch["split"] = split
        anchor = local.start if self.method.source == "repo" else split.first
        assert local.data is not None
        for step, (x, y) in enumerate(local.gradient.batches(local, *local.data)):
            local.step = step
            local.gradient(local, x, y)
            local.model.grad.add_(pull(local.model.vector - anchor, local.model.layout), alpha=self.method.lambda1 / 2)
            descend_part(local, split.trains_personal, "personal")

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """CE + lambda2/2 | sum_l ||w_l - w_global,l|| - C |, in the text over shared coordinates alone."""
        split: Split = local.scratch["split"]
        loss = local.gradient(local, x, y)
        moved = local.model.vector - local.start
        if self.method.source == "paper":
            moved = moved * ~split.personal
        local.model.grad.add_(pull_to(moved, local.model.layout, self.method.clip), alpha=self.method.lambda2 / 2)
        descend_part(local, split.trains_shared, "shared")
        return loss

    def finish(self, local: Local) -> Tensor:
        """The update; without personal coordinates but for the program, noised here where the door cannot know which to noise."""
        split: Split = local.scratch["split"]
        local.state.update(personal=local.model.vector.clone(), share=float(split.personal.float().mean()))
        update = local.model.vector - local.start
        if self.method.variant == "published" and self.method.source == "repo":
            return update
        update = update * ~split.personal
        return update if self.method.hides_mask else self._noised(local, update, ~split.personal)

    def personal(self, model: Tensor, state: State) -> Tensor:
        """The client's model as its last training left it, as the program measures it."""
        own: Tensor = state.get("personal", model)
        return own

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        return {"mask_share": state["share"]} if "share" in state else {}

    def _noised(self, local: Local, update: Tensor, shared: Tensor) -> Tensor:
        """Clip and noise sigma C / sqrt(n) on shared coordinates."""
        from fedveil.training.local import clip_

        clip_(update, self.method.clip)
        std = sigma_of(self.setting) * self.method.clip / math.sqrt(self.setting.cohort) * shared
        local.noised(local.model.layout.norms(std).square())
        return update + local.noise(len(update)) * std
