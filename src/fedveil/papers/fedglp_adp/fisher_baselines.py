"""Baselines of FedGLP-ADP with personal coordinates by Fisher information: FedDPA and FedADDP.

FedDPA, by its program: everything is uploaded under dense noise, which hides the masks; only the size of the noise is wrong: it
is computed for single records, which are never clipped. By its text: only shared coordinates are sent and noised, so the mask
decides which coordinates have noise, and nothing can be proven. Proven: personal coordinates are sent as zeros under dense noise.

FedADDP, published: range and centre are raw values of the client, and the noise counts tensors where it should count coordinates.
Proven: range and centre are those of the released global model; updates in units of this range are clipped and noised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.types import Adjacency, Claim, Event, Scope, Unit, View
from fedveil.errors import ConfigError
from fedveil.methods.base import (
    Fixed,
    Mean,
    MethodConfig,
    Release,
    Setting,
    Summed,
    SumServer,
    Unproven,
    Variant,
    Weighting,
    calibrated,
    gaussian_plan,
    gaussian_releases,
    sum_noise,
    what_is_not_zero,
)
from fedveil.methods.shared import TwoVariants, refuse_dp_sgd
from fedveil.papers.fedglp_adp.claim import fedaddp_noise, opacus_epsilon, opacus_noise_multiplier, record_steps
from fedveil.papers.fedglp_adp.method import MASK_SHARE, descend_part
from fedveil.papers.fedglp_adp.sparse_baselines import published_noise, sigma_of, summed_claim
from fedveil.training.local import Client, Local, Remembering, State

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.gradients.gradient_blocks import Block
    from fedveil.training.params import Layout


_NUMBERS = 2**24
"""The most entries of per-example gradients in memory at once."""


@dataclass(frozen=True)
class Split:
    """The mask `personal` [d], the merged model `first` [d] from which training starts, and the coordinates of each loss."""

    personal: Tensor
    first: Tensor
    trains_personal: Tensor
    trains_shared: Tensor


def fisher_split(local: Local, s: Setting, threshold: float, *, skip_zeros: bool) -> Split:
    """Make a coordinate personal if the scaled Fisher information of the client's last model exceeds the threshold.

    Args:
        skip_zeros: do not train weights that are exactly zero, as in both programs, which find each part by its non-zeros.
    """
    import torch

    if not local.examples:
        nowhere = torch.zeros_like(local.start, dtype=torch.bool)
        return Split(nowhere, local.start, nowhere, nowhere)
    own: Tensor = local.state.get("personal", local.start)
    local.model.load(own)
    personal = scaled(fisher(local, s), local.model.layout) > threshold
    first = own.where(personal, local.start)
    local.model.load(first)
    trains = (personal, ~personal)
    if skip_zeros:
        trains = (trains[0] & (own != 0), trains[1] & (local.start != 0))
    return Split(personal, first, *trains)


def fisher(local: Local, s: Setting) -> Tensor:
    """Return the mean over the client's examples of the squared gradient [d] of the loss at the present model."""
    import torch

    from fedveil.gradients.per_example import per_example_gradients

    assert local.data is not None
    total, size = torch.zeros_like(local.start), max(2, min(64, _NUMBERS // local.model.layout.dimension))
    local.model.eval()
    try:
        for x, y in zip(*(torch.split(part, size) for part in local.data), strict=True):
            blocks, _ = per_example_gradients(local.model.module, x, y, s.task.losses_in_full, loop=local.spec.loop)
            total += torch.cat([_summed_squares(block) for block in blocks])
    finally:
        local.model.train()
    return total / local.examples


def _summed_squares(block: Block) -> Tensor:
    """Return the sum over the examples of their squared gradients [k], without forming outer products."""
    from fedveil.gradients.gradient_blocks import Products

    if isinstance(block, Products):
        return (block.left.square().T @ block.right.square()).flatten()
    return block.rows().square().sum(0)


def scaled(values: Tensor, layout: Layout) -> Tensor:
    """Scale the values [d] of each tensor to [0, 1]; a constant tensor becomes 0 (the programs divide 0 by 0)."""
    import torch

    low = torch.stack([part.min() for part in layout.split(values)])
    span = torch.stack([part.max() for part in layout.split(values)]) - low
    return (values - layout.expand(low)) / layout.expand(span.where(span > 0, torch.ones_like(span)))


def pull(moved: Tensor, layout: Layout) -> Tensor:
    """Return the gradient [d] of the sum of the layers' norms of `moved` [d]; 0 for a layer that has not moved."""
    return moved / layout.expand(layout.norms(moved).clamp_min(1e-30))


def pull_to(moved: Tensor, layout: Layout, length: float) -> Tensor:
    """Return the gradient [d] of | sum of the layers' norms of `moved` - length |."""
    return pull(moved, layout) * (layout.norms(moved).sum() - length).sign()


def check_split(s: Setting, name: str) -> None:
    """Refuse weight decay, which would move both parts in each step, and losses that are not means over examples.

    Raises:
        ConfigError: the message says what to change.
    """
    if not s.task.by_example:
        raise ConfigError(
            f"{name} chooses coordinates by the gradients of single examples, and the loss of task.name = {s.task.name!r} is not "
            f"a mean over examples: choose another method, or a loss that is one"
        )
    if s.local.optimizer.weight_decay:
        raise ConfigError(f"{name} steps two parts of a model in turn, weight decay moves both: set weight_decay = 0")


_REASON = "which coordinates are sent and noised follows the Fisher information of raw data (FedDPA, as its text has it)"


class FedDPA(MethodConfig):
    """Dynamic Fisher personalisation with an adaptive constraint on the shared part.

    Args:
        variant: published or proven.
        source: published; `repo` uploads everything under dense noise, as the authors' program; `paper` only shared coordinates.
        clip: C, L2 bound on an update.
        threshold: tau, scaled Fisher information from which a coordinate is personal.
        lambda1, lambda2: weights of the pull of personal coordinates to their earlier values, and of the update's length to C.
        accountant: published; the noise is computed for one DP-SGD run over all records (`records`, the program) or for the T
            releases of a client (`rounds`, the text). None stands for that of `source`.
        sigma: published; noise std of the sum / clip, instead of privacy.epsilon and an accountant.
    """

    name: Literal["fed-dpa"] = "fed-dpa"
    proven_difference: ClassVar[str] = (
        "personal coordinates are sent as zeros under dense noise, clients have equal weights, and the noise is calibrated "
        "for whole updates"
    )
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
        """Weight clients by size (published) or equally (proven), since a weighted sum gets no credit for its noise."""
        return "examples" if self.variant == "published" else "uniform"

    @property
    def hides_mask(self) -> bool:
        """Return whether every upload has noise on every coordinate."""
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
        """Clip and dense noise in every round; for `paper`, the upload as training made it."""
        return (
            Fixed(gaussian_plan(s, self.clip))
            if self.hides_mask
            else Unproven(("Fisher information",), _REASON, what_is_not_zero)
        )

    def client(self, s: Setting) -> Client:
        return TwoPasses(self, s)

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Return (f / z)^2 per round for each upload; nothing if the mask decides which coordinates are noised."""
        return gaussian_releases(s, view) if self.hides_mask else super().releases(s, view)

    def claim(self, s: Setting) -> Claim | None:
        """The claim at user level for the sum, by the chosen accountant."""
        if self.variant == "proven":
            return None
        rate, steps = self._counted(s)
        counted = f"FedDPA, Renyi accountant ({steps:.4g} releases at rate {rate:.3g})"
        return summed_claim(s, partial(opacus_epsilon, steps=steps, delta=s.delta, rate=rate), counted)

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        return ("each client's number of examples is public",) if self.variant == "published" else ()

    def _counted(self, s: Setting) -> tuple[float, float]:
        """Return (sampling rate, steps) for the accountant; a fixed number of local steps is converted to epochs."""
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
        """Return the update. For `paper` personal coordinates are left out and noise is added here, as the door has no mask."""
        split: Split = local.scratch["split"]
        local.state.update(personal=local.model.vector.clone(), share=float(split.personal.float().mean()))
        update = local.model.vector - local.start
        if self.method.variant == "published" and self.method.source == "repo":
            return update
        update = update * ~split.personal
        return update if self.method.hides_mask else self._noised(local, update, ~split.personal)

    def personal(self, model: Tensor, state: State) -> Tensor:
        """Return the client's model after its last training, which the program measures."""
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


class FedADDP(TwoVariants):
    """Fisher personalisation with a noise level for each coordinate.

    Args:
        variant: published or proven.
        beta: a coordinate may move by q = beta/2 |w|, and its noise is proportional to 2 q.
        threshold: tau, scaled Fisher information from which a coordinate is personal.
        lambda1, lambda2: weights of the pull of the personal step to the global model, and of the update's length to sum ||2q||.
        sigma: published; sigma_0, which replaces the paper's formula from privacy.epsilon.
        clip: proven; L2 bound on an update in units of the range (whose root mean square over all coordinates is 1).
        floor: proven; smallest |w| used, relative to the model's root mean square: otherwise a weight of zero could never move.
    """

    name: Literal["fed-addp"] = "fed-addp"
    proven_difference: ClassVar[str] = (
        "the range and centre of a coordinate are those of the released model, personal coordinates are sent as zeros, and "
        "the update is clipped"
    )
    reconstructed: ClassVar[str] = "nothing: the published form is the authors' program; the paper's text was not at hand"
    reason: ClassVar[str] = "range and centre of each coordinate, and with them its noise, are raw values of the client (FedADDP)"
    beta: float = Field(0.1, gt=0, allow_inf_nan=False)
    threshold: float = Field(0.4, gt=0, lt=1)
    lambda1: float = Field(0.1, ge=0, allow_inf_nan=False)
    lambda2: float = Field(0.05, ge=0, allow_inf_nan=False)
    sigma: float | None = Field(None, ge=0, allow_inf_nan=False)
    clip: float = Field(0.5, gt=0, allow_inf_nan=False)
    floor: float = Field(0.1, gt=0, le=1)

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: sigma_0, which the door does not use."""
        check_split(s, self.name)
        return super().calibrate(s)

    def check_published(self, s: Setting) -> None:
        if sum_noise(s):
            raise ConfigError("the published variant of fed-addp sends each client's noisy model: set privacy.view = 'server'")
        if s.noise_multiplier is not None or (self.sigma is not None) == (s.epsilon is not None):
            raise ConfigError("the published variant of fed-addp needs either privacy.epsilon or method.sigma, and nothing else")
        sigma_0(self, s)

    def release(self, s: Setting) -> Release:
        """Proven: clip and noise in units of the range. Published: the upload leaves as training made it."""
        if self.variant == "published":
            return Unproven(("weights", "gradients"), self.unproven, what_is_not_zero)
        return Fixed(gaussian_plan(s, self.clip))

    def client(self, s: Setting) -> Client:
        return RangedNoise(self, s, sigma_0(self, s) if self.variant == "published" else None)

    def server(self, s: Setting) -> SumServer:
        """The mean; proven: converted back from units of the range."""
        return InUnits(self.floor) if self.variant == "proven" else Mean()

    def claim(self, s: Setting) -> Claim | None:
        """The claim for each client's uploads; the program only has a formula from epsilon to sigma_0."""
        if self.variant == "proven" or s.epsilon is None:
            return None
        scope = Scope(Unit.CLIENT, Adjacency.REPLACE_ONE, View.SERVER)
        return Claim(s.epsilon, s.delta, scope, "FedADDP, get_sigma0", f"sigma_0 = {sigma_0(self, s):.4g}, tensors counted")


def sigma_0(method: FedADDP, s: Setting) -> float:
    """Return sigma_0 = noise std / (sqrt(M) 2 q), M the number of tensors."""
    return method.sigma if method.sigma is not None else fedaddp_noise(s.epsilon or 0.0, s.rounds, s.delta)


def magnitude(weights: Tensor, floor: float) -> Tensor:
    """Return |w|, at least `floor` times its root mean square (1 for a model of zeros)."""
    mean_square = weights.square().mean().sqrt()
    return weights.abs().clamp_min(floor * mean_square.where(mean_square > 0, mean_square + 1))


def unit(weights: Tensor, floor: float) -> Tensor:
    """Return the unit of each coordinate of a released update [d]: proportional to its range, with root mean square 1."""
    size = magnitude(weights, floor)
    return size / size.square().mean().sqrt()


@dataclass(frozen=True)
class InUnits(SumServer):
    """The mean of updates in units of the range of each coordinate of the model."""

    floor: float

    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        return state, total.vector * unit(total.start, self.floor)


@dataclass(frozen=True)
class RangedNoise(Remembering):
    """Per batch a step of the personal coordinates, then one of the shared; at the end a movement of at most q, and its noise.

    `sigma` is sigma_0 in the published variant, else None.
    """

    method: FedADDP
    setting: Setting
    sigma: float | None
    columns = (MASK_SHARE,)

    def begin(self, local: Local) -> None:
        """Compute the split; the update's length is pulled to that of the last round's ranges."""
        split = fisher_split(local, self.setting, self.method.threshold, skip_zeros=self.sigma is not None)
        local.scratch.update(split=split, last=split.first)
        if self.sigma is None:
            local.scratch["length"] = self._length(self.method.beta / 2 * magnitude(local.start, self.method.floor), local)
        else:
            local.scratch["length"] = local.state.get("length", 0.0)

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Take both steps; their gradients and the weights before them determine the range."""
        split: Split = local.scratch["split"]
        model, layout = local.model, local.model.layout
        before = model.vector.clone()
        local.gradient(local, x, y)
        model.grad.add_(pull(model.vector - local.start, layout), alpha=self.method.lambda1 / 2)
        gradient = model.grad * split.trains_personal
        descend_part(local, split.trains_personal, "personal")
        loss = local.gradient(local, x, y)
        model.grad.add_(pull_to(model.vector - local.start, layout, local.scratch["length"]), alpha=self.method.lambda2 / 2)
        gradient += model.grad * split.trains_shared
        descend_part(local, split.trains_shared, "shared")
        local.scratch["last"] = before - local.spec.learning_rate(local.round, local.step, local.steps) * gradient
        return loss

    def finish(self, local: Local) -> Tensor:
        """Return the update to release. The client's own model stays unchanged."""
        split: Split = local.scratch["split"]
        trained = local.model.vector.clone()
        local.state.update(personal=trained, share=float(split.personal.float().mean()))
        if self.sigma is not None:
            return self._published(local, split, trained, self.sigma)
        reach = self.method.beta / 2 * magnitude(local.start, self.method.floor)
        moved: Tensor = ((trained - local.start) * ~split.personal).clamp(-reach, reach)
        return moved / unit(local.start, self.method.floor)

    def personal(self, model: Tensor, state: State) -> Tensor:
        """Return the client's own model after its last training."""
        own: Tensor = state.get("personal", model)
        return own

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        return {"mask_share": state["share"]} if "share" in state else {}

    def _published(self, local: Local, split: Split, trained: Tensor, sigma: float) -> Tensor:
        """Clamp w_0 - q <= w <= w_0 + q and add noise of std sqrt(M) sigma_0 2q, relative to the global model."""
        layout = local.model.layout
        reach: Tensor = self.method.beta / 2 * local.scratch["last"].abs()
        std = math.sqrt(len(layout)) * sigma * 2 * reach
        local.state["length"] = self._length(reach, local)
        local.noised(layout.norms(std).square())
        within: Tensor = trained.clamp(split.first - reach, split.first + reach)
        return within + local.noise(layout.dimension) * std - local.start

    @staticmethod
    def _length(reach: Tensor, local: Local) -> float:
        """Return sum_l ||2 q_l||."""
        return float(local.model.layout.norms(2 * reach).sum())
