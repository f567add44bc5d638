"""FedGLP-ADP: personal coordinates chosen by their noisy movement, and clip weights that follow the trend of each layer.

Published: the clip weights follow raw norms, and the noise of one upload protects only a sum. Proven: the weights follow debiased
norms of releases. In the server view, masks come from the client's noisy uploads too. In the aggregate view there is one weight
vector and dense noise on the sum; masks stay private, since a contribution with some zeros still has norm at most C.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.types import Adjacency, Claim, Event, Scope, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Released, Upload
from fedveil.methods.base import (
    CoverageMean,
    MethodConfig,
    Policy,
    Release,
    Setting,
    Unproven,
    Variant,
    calibrated,
    gaussian_plan,
    gaussian_releases,
    sum_noise,
    what_is_not_zero,
)
from fedveil.methods.shared import debiased_norms, layered_plan
from fedveil.papers.fedglp_adp import claim as fedglp
from fedveil.tasks.task import Column
from fedveil.training.local import Client, Local, Remembering, State
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from torch import Tensor


class FedGLPOptions(MethodConfig):
    """Layer-wise personalisation, with clip weights that follow the trend of each layer.

    In the paper's letters, p is `growth`, T is `training.rounds`, n is `training.clients_per_round`.

    Args:
        variant: published or proven.
        clip: C, L2 bound on a whole update.
        lambda1: weight of the pull towards the round's first personal weights. Not stated in the paper; FedDPA's value.
        lambda2: weight of the pull of the shared update's norm towards C. Not stated in the paper; FedDPA's value.
        clipping: `layers`, weighted clips per layer and noise for each (ACNDP, Eqs. 13 to 16); `flat`, one clip C and noise
            sigma C / sqrt(n): DP-FedAvg + GLP, the middle row of the paper's Table 5.
        layers: the meaning of a layer l, of which there are L: a layer of the `network` (weight and bias together: 4 in a CNN of
            two convolutions and two full layers), as in the paper, or each of its `tensors` (8). None is `network` in the
            published variant; the proven one always uses tensors, as the door clips them.
        gamma: step of the log-odds of the clip weights; 0 keeps them at the layers' shares of the parameters.
        beta0: personal share of each layer at sigma = sigma0. slope: a of beta = beta0 exp(a (sigma - sigma0)); 0 fixes beta.
        sigma0: reference noise multiplier; None is that of epsilon = 6 in the same run.
        growth: p, share of a layer that becomes personal in each round; None is beta / T. Not stated in the paper.
        max_beta: larger values of beta are replaced by this. Not in the paper, whose beta can pass 1.
        max_log_odds: largest absolute log-odds, so that every clip stays positive. Not in the paper.
        personal_model: the model that a client uses and evaluates: its model after its last local training, or the newest global
            model with its personal coordinates. Not stated in the paper, whose figures fit the first only.
        accountant: published; sigma by the accountant that the paper used, or by its Theorem 1.
        allocation: proven; noise proportional to the clips as in the paper, or with the least total energy at the same cost.
    """

    proven_defaults: ClassVar[Mapping[str, Any]] = {"gamma": 0.05, "beta0": 0.1, "slope": 0.0, "personal_model": "combined"}
    name: Literal["fedglp-adp"] = "fedglp-adp"
    proven_difference: ClassVar[str] = (
        "the clip weights follow norms of releases, the noise is calibrated for what the adversary of the run sees, and "
        "personal shares are smaller by default"
    )
    variant: Variant = "proven"
    clip: float = Field(0.5, gt=0, allow_inf_nan=False)
    lambda1: float = Field(0.1, ge=0, allow_inf_nan=False)
    lambda2: float = Field(0.05, ge=0, allow_inf_nan=False)
    clipping: Literal["layers", "flat"] = "layers"
    layers: Literal["network", "tensors"] | None = None
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


MASK_SHARE = Column("mask_share", "Personal coordinates", "coordinates", share=True)
BETA = Column("beta", "Most that a layer may keep personal", "coordinates", share=True, public=True)

# --- layers -------------------------------------------------------------------------------------------------------------


def owners(layout: Layout) -> list[str]:
    """Return the layer of the network of each tensor: its name without the last part."""
    return [name.rpartition(".")[0] or name for name in layout.names]


def network_layers(layout: Layout) -> Layout:
    """Return a layout of the same vector by layers of the network: adjacent tensors of one module form a layer."""
    pairs = groupby(zip(owners(layout), layout.sizes, strict=True), key=lambda pair: pair[0])
    return Layout.of({owner: (sum(size for _, size in tensors),) for owner, tensors in pairs})


# --- clip weights (Algorithm 1) ----------------------------------------------------------------------------------------


def start_log_odds(layout: Layout, bound: float) -> Tensor:
    """Return h_l = logit of the layer's share of the parameters, within plus and minus `bound` [L]."""
    import torch

    share = torch.tensor([n / layout.dimension for n in layout.sizes], dtype=torch.float64)
    return torch.logit(share).clamp(-bound, bound)


def next_log_odds(log_odds: Tensor, norms: Tensor, before: Tensor | None, gamma: float, bound: float) -> Tensor:
    """Return h_l + gamma if the layer's norm grew since the last round, else h_l - gamma; unchanged after the first round."""
    if before is None:
        return log_odds
    direction = (norms > before).to(log_odds.dtype) * 2 - 1
    return (log_odds + gamma * direction).clamp(-bound, bound)


def clip_weights(log_odds: Tensor) -> Tensor:
    """Return tw_l = sigmoid(h_l) / sum_j sigmoid(h_j), float32 [L]."""
    import torch

    return torch.softmax(torch.nn.functional.logsigmoid(log_odds), 0).float()


@dataclass(frozen=True)
class ClipWeights(Policy):
    """Proven policy: C_l^2 = C^2 tw_l, with weights (and in the server view masks) computed from releases."""

    method: FedGLPOptions
    beta: float
    columns = (BETA, Column("clip_weights", "Share of the squared clip", kind="layer", share=True, public=True))

    def start(self, s: Setting) -> State:
        """Return log-odds of the layers' shares, without personal coordinates."""
        import torch

        layout = s.layout
        mask = torch.zeros(0 if sum_noise(s) else layout.dimension, dtype=torch.bool)
        return {"log_odds": start_log_odds(layout, self.method.max_log_odds), "mask": mask, "rounds": 0}

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        """Clips from the weights, noise at the round's share of the budget, shared coordinates only."""
        support = None if sum_noise(s) else ~state["mask"]
        if s.example_clip is not None or self.method.clipping == "flat":
            return replace(gaussian_plan(s, self.method.clip), support=support)
        clips = self.method.clip * clip_weights(state["log_odds"]).sqrt()
        plan = layered_plan(s, clips, equal=self.method.allocation == "equal")
        return replace(plan, support=support)

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        """Apply Algorithm 1 to debiased norms; the coordinates that moved most become personal."""
        norms = debiased_norms(upload, s.layout)
        h = next_log_odds(state["log_odds"], norms, state.get("norms"), self.method.gamma, self.method.max_log_odds)
        rounds, mask = state["rounds"] + 1, state["mask"]
        if len(mask):
            mask = grown(mask, upload.vector.abs(), s.layout, share_after(self.method, s, self.beta, rounds))
        return {"log_odds": h, "norms": norms, "mask": mask, "rounds": rounds}

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """Return beta and the weights of the next round."""
        return {"beta": self.beta, "clip_weights": clip_weights(state["log_odds"]).tolist()}


def share_after(method: FedGLPOptions, s: Setting, beta: float, rounds: int) -> float:
    """Return the personal share of each layer after that many rounds: p per round, at most beta."""
    return min(beta, (method.growth if method.growth is not None else beta / s.rounds) * rounds)


def grown(mask: Tensor, size: Tensor, layout: Layout, share: float) -> Tensor:
    """Return `mask` [d] with the largest other coordinates by `size` [d] added, until it covers `share` of each layer.

    A layer that already has that share is unchanged; the number of coordinates is rounded down.
    """
    new = mask.clone()
    for part, values, n in zip(layout.split(new), layout.split(size), layout.sizes, strict=True):
        missing = int(share * n + 1e-9) - int(part.sum())
        if missing > 0:
            part[values.masked_fill(part, -1.0).topk(missing).indices] = True
    return new


# --- local training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoLosses(Remembering):
    """Per batch: a step of the personal weights, then, with their new values, of the shared ones (Algorithm 2, lines 6 and 7).

    `sigma` is the paper's noise multiplier in the published variant, else None. With DP-SGD both parts follow one noisy
    gradient, since a second gradient would be a second release.
    """

    method: FedGLPOptions
    setting: Setting
    beta: float
    sigma: float | None = None
    columns = (
        BETA,
        MASK_SHARE,
        Column("uplink_bits", "Bits sent by a client", "bits", "lower"),
    )

    def begin(self, local: Local) -> None:
        """where(mask, personal, global)."""
        import torch

        mask = ~local.support if local.support is not None else local.state.get("mask", torch.zeros_like(local.start).bool())
        local.state["mask"] = mask
        own: Tensor = local.state.get("personal", local.start)
        local.model.load(own.where(mask, local.start))
        local.scratch.update(first=local.model.vector.clone(), shared=~mask, has_personal=bool(mask.any()))

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Step the personal part, then the shared part; return the cross-entropy before the last step."""
        mask, shared = local.state["mask"], local.scratch["shared"]
        if self.setting.example_clip is not None:
            loss = local.gradient(local, x, y)
            local.model.grad.add_(self._pull(local, mask)).add_(self._pull_to_clip(local, shared))
            local.descend()
            return loss
        if local.scratch["has_personal"]:
            local.gradient(local, x, y)
            local.model.grad.add_(self._pull(local, mask))
            descend_part(local, mask, "personal")
        loss = local.gradient(local, x, y)
        local.model.grad.add_(self._pull_to_clip(local, shared))
        descend_part(local, shared, "shared")
        return loss

    def finish(self, local: Local) -> Tensor:
        """Return the shared update; published: clipped, noised, and used for the next mask."""
        state, layout = local.state, local.model.layout
        update: Tensor = (local.model.vector - local.scratch["first"]) * local.scratch["shared"]
        state["personal"] = local.model.vector.clone()
        state["rounds"] = state.get("rounds", 0) + 1
        if self.sigma is not None:
            update = self._noised(local, update, self.sigma)
        if self.sigma is not None or sum_noise(self.setting):
            share = share_after(self.method, self.setting, self.beta, state["rounds"])
            state["mask"] = grown(state["mask"], update.abs(), self._layers(layout), share)
        return update

    def personal(self, model: Tensor, state: State) -> Tensor:
        """Return the global model with this client's personal coordinates (Eq. 7), or its model after its last training."""
        if "personal" not in state:
            return model
        own: Tensor = state["personal"]
        return own if self.method.personal_model == "trained" else own.where(state["mask"], model)

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """Return the share of personal coordinates; in the published variant also beta, the clips, and the bits sent."""
        row: dict[str, float | list[float]] = {"mask_share": float(state["mask"].float().mean())}
        if self.sigma is not None:
            row |= {"beta": self.beta, "layer_clip": state["clips"].tolist(), "clip": self.method.clip}
            row |= {"uplink_bits": 32 * state["sent"] + self.setting.layout.dimension}
        return row

    def _pull(self, local: Local, mask: Tensor) -> Tensor:
        """Return the gradient of lambda1/2 ||v - v^t||_2 (Eq. 9)."""
        moved: Tensor = (local.model.vector - local.scratch["first"]) * mask
        return moved.mul_(self.method.lambda1 / 2 / moved.norm().clamp_min(1e-30))

    def _pull_to_clip(self, local: Local, shared: Tensor) -> Tensor:
        """Return the gradient of lambda2/2 | ||u - u^t||_2 - C | (Eq. 10)."""
        moved: Tensor = (local.model.vector - local.scratch["first"]) * shared
        norm = moved.norm()
        return moved.mul_((norm - self.method.clip).sign() * self.method.lambda2 / 2 / norm.clamp_min(1e-30))

    def _layers(self, layout: Layout) -> Layout:
        """Return the layers, each with its own clip, noise and personal share."""
        return network_layers(layout) if self.sigma is not None and self.method.layers != "tensors" else layout

    def _noised(self, local: Local, update: Tensor, sigma: float) -> Tensor:
        """Apply Eqs. 13 to 16 with the present weights, then Algorithm 1 to the raw norms."""
        import torch

        from fedveil.release.sealed import clipped

        state, layout, bound = local.state, local.model.layout, self.method.max_log_odds
        layers = self._layers(layout)
        h = state.get("log_odds", start_log_odds(layers, bound).to(update.device))
        norms = layers.norms(update)
        clips = self.method.clip * clip_weights(h).sqrt()
        plan, releases = Plan(layer_clip=clips), len(layers)
        if self.method.clipping == "flat":
            clips = torch.full_like(clips, self.method.clip)
            plan, releases = Plan(clip=self.method.clip), 1
        shared: Tensor = local.scratch["shared"]
        stds = layers.expand(sigma * clips * math.sqrt(releases / self.setting.cohort)) * shared
        log_odds = next_log_odds(h, norms, state.get("norms"), self.method.gamma, bound)
        state.update(log_odds=log_odds, norms=norms, sent=float(shared.sum()), clips=_by_tensor(clips, layers, layout))
        local.noised(layout.norms(stds).square())
        noise: Tensor = local.noise(layout.dimension) * stds
        return clipped(update, plan, layers) + noise


def _by_tensor(per_layer: Tensor, layers: Layout, layout: Layout) -> Tensor:
    """Repeat values of network layers [L] for each tensor of the layer, for the history."""
    if len(layers) == len(layout):
        return per_layer
    found: Tensor = per_layer[[layers.names.index(owner) for owner in owners(layout)]]
    return found


def descend_part(local: Local, where: Tensor, part: str) -> None:
    """Take one optimiser step on the coordinates `where` [d] only; each part has an optimiser for the whole round."""
    local.model.grad.mul_(where)
    optimizers = local.scratch.setdefault("optimizers", {})
    local.optimizer = optimizers.get(part)
    local.descend()
    optimizers[part] = local.optimizer


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
        """Proven: clip weights from released norms. Published: the upload as training made it."""
        if self.variant == "published":
            return Unproven(("layer norms of earlier rounds",), _REASON, what_is_not_zero)
        return ClipWeights(self, personal_share(self, s))

    def client(self, s: Setting) -> Client:
        """Two losses on disjoint coordinates; published: clip, noise and masks as well."""
        noise = sigma(self, s) if self.variant == "published" else None
        return TwoLosses(self, s, personal_share(self, s), noise)

    def server(self, s: Setting) -> CoverageMean:
        """Eq. 12: per coordinate, the mean over the clients that share it; a sum is already divided by the planned n."""
        return CoverageMean()

    def releases(self, s: Setting, view: View) -> list[Event]:
        """sum_l (f C_l / sigma_l)^2 = (f / z)^2 per round, for all weights: the release itself asks for calibrated noise."""
        return gaussian_releases(s, view) if self.variant == "proven" else [Unbounded(_REASON)]

    def claim(self, s: Setting) -> Claim | None:
        """The claim at user level for the sum of all uploads (FedGLP-ADP, Theorem 1 and the accountant used with it)."""
        if self.variant == "proven" or sigma(self, s) == 0:
            return None
        opacus = self.accountant == "opacus"
        formula = fedglp.accountant_epsilon if opacus else fedglp.claimed_epsilon
        source = "FedGLP-ADP, its Renyi accountant" if opacus else "FedGLP-ADP, Theorem 1"
        scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
        note = f"sigma = {sigma(self, s):.4g}, of which each upload carries the share 1/sqrt({s.cohort})"
        return Claim(formula(sigma(self, s), s.rounds, s.delta), s.delta, scope, source, note)


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
