"""FedGLP-ADP's policy and local objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from fedveil.mechanism.plan import Plan, Released, Upload
from fedveil.methods.adaptive import debiased_norms, layered_plan
from fedveil.methods.base import Policy, Setting, gaussian_plan, sum_noise
from fedveil.methods.fedglp_options import FedGLPOptions
from fedveil.tasks.task import Column
from fedveil.training.local import Local, Remembering, State
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from torch import Tensor


MASK_SHARE = Column("mask_share", "Personal coordinates", "coordinates", share=True)
BETA = Column("beta", "Most that a layer may keep personal", "coordinates", share=True, public=True)

# --- layers -------------------------------------------------------------------------------------------------------------


def owners(layout: Layout) -> list[str]:
    """For each tensor, the layer of the network that it belongs to: its name without the last part."""
    return [name.rpartition(".")[0] or name for name in layout.names]


def network_layers(layout: Layout) -> Layout:
    """The same vector cut into layers of the network: tensors of one module that lie side by side are one layer."""
    pairs = groupby(zip(owners(layout), layout.sizes, strict=True), key=lambda pair: pair[0])
    return Layout.of({owner: (sum(size for _, size in tensors),) for owner, tensors in pairs})


# --- clip weights (Algorithm 1) ----------------------------------------------------------------------------------------


def start_log_odds(layout: Layout, bound: float) -> Tensor:
    """h_l = logit of the layer's share of the parameters, within plus and minus `bound` [L]."""
    import torch

    share = torch.tensor([n / layout.dimension for n in layout.sizes], dtype=torch.float64)
    return torch.logit(share).clamp(-bound, bound)


def next_log_odds(log_odds: Tensor, norms: Tensor, before: Tensor | None, gamma: float, bound: float) -> Tensor:
    """h_l + gamma where the layer's norm grew since the last round, else h_l - gamma; unchanged after the first round."""
    if before is None:
        return log_odds
    direction = (norms > before).to(log_odds.dtype) * 2 - 1
    return (log_odds + gamma * direction).clamp(-bound, bound)


def clip_weights(log_odds: Tensor) -> Tensor:
    """tw_l = sigmoid(h_l) / sum_j sigmoid(h_j), float32 [L]."""
    import torch

    return torch.softmax(torch.nn.functional.logsigmoid(log_odds), 0).float()


@dataclass(frozen=True)
class ClipWeights(Policy):
    """Proven policy: C_l^2 = C^2 tw_l with weights, and in the server view masks, made from what was released."""

    method: FedGLPOptions
    beta: float
    columns = (BETA, Column("clip_weights", "Share of the squared clip", kind="layer", share=True, public=True))

    def start(self, s: Setting) -> State:
        """Log-odds of the layers' shares; nothing personal."""
        import torch

        layout = s.layout
        mask = torch.zeros(0 if sum_noise(s) else layout.dimension, dtype=torch.bool)
        return {"log_odds": start_log_odds(layout, self.method.max_log_odds), "mask": mask, "rounds": 0}

    def plan(self, s: Setting, seen: Released, state: State) -> Plan:
        """Clips from the weights, noise at the round's share of the budget, shared coordinates only."""
        support = None if sum_noise(s) else ~state["mask"]
        if s.example_clip is not None or self.method.clipping == "flat":
            return replace(gaussian_plan(s, self.method.clip), support=support)
        clips = self.method.clip * clip_weights(state["log_odds"]).sqrt()
        plan = layered_plan(s, clips, equal=self.method.allocation == "equal")
        return replace(plan, support=support)

    def observe(self, s: Setting, state: State, left: Upload) -> State:
        """Algorithm 1 on debiased norms; the coordinates that moved most become personal."""
        norms = debiased_norms(left, s.layout)
        h = next_log_odds(state["log_odds"], norms, state.get("norms"), self.method.gamma, self.method.max_log_odds)
        rounds, mask = state["rounds"] + 1, state["mask"]
        if len(mask):
            mask = grown(mask, left.vector.abs(), s.layout, share_after(self.method, s, self.beta, rounds))
        return {"log_odds": h, "norms": norms, "mask": mask, "rounds": rounds}

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """beta, and the weights of the next round."""
        return {"beta": self.beta, "clip_weights": clip_weights(state["log_odds"]).tolist()}


def share_after(method: FedGLPOptions, s: Setting, beta: float, rounds: int) -> float:
    """Personal share of each layer after that many rounds: p a round, never above beta."""
    return min(beta, (method.growth if method.growth is not None else beta / s.rounds) * rounds)


def grown(mask: Tensor, size: Tensor, layout: Layout, share: float) -> Tensor:
    """`mask` [d] with the largest of the other coordinates by `size` [d] added, until it holds `share` of each layer.

    A layer that already holds that share stays as it is; the number of coordinates is rounded down.
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
    """Per batch: a step of the personal weights, then, with these, a step of the shared ones (Algorithm 2, lines 6 and 7).

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
        """Personal part, then shared part; returns the cross-entropy that the last of them saw."""
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
        """The shared update; published: clipped, noised, and the source of the next mask."""
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
        """The global model with this client's personal coordinates in it (Eq. 7), or what its last training gave."""
        if "personal" not in state:
            return model
        own: Tensor = state["personal"]
        return own if self.method.personal_model == "trained" else own.where(state["mask"], model)

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """Share of personal coordinates; published: beta and clips, which the door does not see, and bits sent."""
        row: dict[str, float | list[float]] = {"mask_share": float(state["mask"].float().mean())}
        if self.sigma is not None:
            row |= {"beta": self.beta, "layer_clip": state["clips"].tolist(), "clip": self.method.clip}
            row |= {"uplink_bits": 32 * state["sent"] + self.setting.layout.dimension}
        return row

    def _pull(self, local: Local, mask: Tensor) -> Tensor:
        """Gradient of lambda1/2 ||v - v^t||_2 (Eq. 9)."""
        moved: Tensor = (local.model.vector - local.scratch["first"]) * mask
        return moved.mul_(self.method.lambda1 / 2 / moved.norm().clamp_min(1e-30))

    def _pull_to_clip(self, local: Local, shared: Tensor) -> Tensor:
        """Gradient of lambda2/2 | ||u - u^t||_2 - C | (Eq. 10)."""
        moved: Tensor = (local.model.vector - local.scratch["first"]) * shared
        norm = moved.norm()
        return moved.mul_((norm - self.method.clip).sign() * self.method.lambda2 / 2 / norm.clamp_min(1e-30))

    def _layers(self, layout: Layout) -> Layout:
        """The layers that have a clip, noise and a personal share of their own."""
        return network_layers(layout) if self.sigma is not None and self.method.layers != "tensors" else layout

    def _noised(self, local: Local, update: Tensor, sigma: float) -> Tensor:
        """Eqs. 13 to 16, with the weights that earlier rounds left; then Algorithm 1 on the raw norms."""
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
    """Numbers of layers of the network [L] for each tensor of a layer, for the history."""
    if len(layers) == len(layout):
        return per_layer
    found: Tensor = per_layer[[layers.names.index(owner) for owner in owners(layout)]]
    return found


def descend_part(local: Local, where: Tensor, part: str) -> None:
    """One optimiser step on the coordinates `where` [d] only; each part keeps its optimiser through the round."""
    local.model.grad.mul_(where)
    optimizers = local.scratch.setdefault("optimizers", {})
    local.optimizer = optimizers.get(part)
    local.descend()
    optimizers[part] = local.optimizer
