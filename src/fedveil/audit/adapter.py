"""Audit subjects for methods: a method's real policy and the real door, on the worst pair of neighbouring updates.

The layout is shrunk to a moderate dimension, which does not change the cost of a plan. A few rounds of synthetic releases come
first, so that adaptive clips and masks are active. Nothing is charged to a ledger file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.accounting.types import Adjacency, SampledGaussian, Scope, Unit, View
from fedveil.audit.subject import Floats, Output, Subject
from fedveil.federation.round import observed
from fedveil.mechanism.cost import active_layers, per_layer, plan_mu
from fedveil.mechanism.mechanisms import NoiseMemory
from fedveil.mechanism.plan import Plan, Raw, Released
from fedveil.mechanism.plan import Upload as Release
from fedveil.methods.run_cost import Planner
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.release.release_layout import NullLedger
from fedveil.release.sealed import clipped
from fedveil.training.local import BatchGradient, Local, clip_
from fedveil.training.params import FlatModel, Layout

if TYPE_CHECKING:
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting
    from fedveil.training.local import State


_MARGIN = 1e6
"""Far above any |<w, x>|: the cross-entropy of logits (<w, x> - margin, 0) at label 0 is margin - <w, x> in float32."""


class _Linear(nn.Module):
    def __init__(self, layout: Layout) -> None:
        super().__init__()
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n, 2] of examples [n, d] whose cross-entropy at label 0 has the gradient -x."""
        score = x @ torch.cat([p.reshape(-1) for p in self.parameters()]) - _MARGIN
        return torch.stack([score, torch.zeros_like(score)], dim=1)


def linear_model(layout: Layout) -> FlatModel:
    """Return a network with this layout; at label 0 the cross-entropy of example x [d] has the gradient -x."""
    return FlatModel(_Linear(layout), built_in=True)


@dataclass(frozen=True)
class LinearLoss:
    """Gradient source of linear losses: the mean of a batch's examples [n, d], clipped to V if the spec says so."""

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Write the mean gradient of the batch, and return the loss: its inner product with the model."""
        local.model.grad.copy_(x.mean(0))
        loss = local.model.grad @ local.model.vector
        if local.spec.batch_clip is not None:
            clip_(local.model.grad, local.spec.batch_clip)
        return loss

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return BatchGradient().batches(local, x, y)


_WARM = 2
"""Rounds of synthetic releases before a single upload is audited."""

_CROWD = 4
"""Number of other clients in a noisy sum whose noise is drawn one by one."""


def shrunk(layout: Layout, most: int) -> Layout:
    """Return the same layers by name, scaled to at most about `most` coordinates in total, and at least two each."""
    scale = min(1.0, most / layout.dimension)
    return Layout(layout.names, tuple((max(min(n, 2), round(n * scale)),) for n in layout.sizes))


@dataclass(frozen=True)
class Case:
    """A method in a setting of moderate dimension, ready to release.

    model: public global model [d].
    """

    method: Method
    setting: Setting
    policy: Planner
    model: Tensor

    @classmethod
    def of(cls, method: Method, setting: Setting, *, dimension: int = 400) -> Case:
        """Return the case of a calibrated setting, with its layout shrunk to about `dimension`."""
        small = replace(setting, layout=shrunk(setting.layout, dimension))
        model = 0.1 * torch.randn(small.layout.dimension, generator=torch.Generator().manual_seed(0))
        return cls(method, small, Planner.of(method.release(small), small), model)

    @property
    def summed(self) -> bool:
        """Return whether uploads are added before anyone sees them."""
        return self.setting.scope.view is not View.SERVER

    @property
    def scope(self) -> Scope:
        """Return the scope of an audit; a run in the final view is audited by its sums, so in the aggregate view."""
        return replace(self.setting.scope, view=View.AGGREGATE if self.summed else View.SERVER)

    @property
    def rate(self) -> float:
        """Return the chance that a client is in a sum, if Poisson sampling keeps it secret and the proof uses it; else 1."""
        s = self.setting
        return s.rate if self.summed and s.sampling == "poisson" and s.max_participations is None else 1.0

    def joins(self, rng: np.random.Generator) -> bool:
        """Draw whether the canary is in this sum."""
        return self.rate == 1.0 or rng.random() < self.rate

    def shares(self, plan: Plan) -> int:
        """Return the number of noise terms in a sum that the adversary does not know; 1 if noise is added once or not at all."""
        alone = plan.place == "sum" or not torch.as_tensor(plan.noise_std).any()
        return 1 if alone else self.setting.unknown_noises_in(self.setting.scope.view)

    def door(self, rng: np.random.Generator) -> Door:
        """Return a door whose releases draw fresh noise from `rng`."""
        randomness = Randomness(int(rng.integers(2**62)), seeded_noise=True)
        extras = self.method.extras(self.setting)
        return Door(
            self.setting.layout, self.setting.scope, "audit", NullLedger(), randomness, extras=extras, bits=self.setting.grid_bits
        )

    def released(self, round: int) -> Released:
        """Return the public values of a round; the global model moves a little, for policies that depend on it."""
        drift = [0.01 * torch.randn(len(self.model), generator=torch.Generator().manual_seed(t)) for t in range(round + 1)]
        now = self.model + sum(drift[1:], torch.zeros_like(self.model))
        return Released(round, now, None if round == 0 else now - drift[round], 0.5)

    def release(
        self,
        update: Tensor,
        plan: Plan | Raw,
        round: int,
        rng: np.random.Generator,
        *,
        denominator: float = 1.0,
        memory: NoiseMemory | None = None,
    ) -> Release:
        """Release one upload, or the noisy sum of the canary's update and zero updates divided by `denominator`, through the
        door.

        Extras are zero. The noise of more than `_CROWD` other clients is drawn at once.

        Args:
            memory: of noise that is correlated over a run's rounds; without it such a release is that of a first round.
        """
        stateful = isinstance(plan, Plan) and plan.mechanism.stateful
        door, t = replace(self.door(rng), memory=memory or NoiseMemory()), 0 if stateful and memory is None else round
        extras = {name: torch.zeros(shape) for name, shape in door.extras.items()}
        if not self.summed:
            return door.upload(update, plan, 0, t, extras=extras)
        others = self.shares(plan) - 1 if isinstance(plan, Plan) else 0
        zero = torch.zeros_like(update)
        alone = others if others <= _CROWD else 1
        parts = [door.seal(u, plan, i, t, extras=extras) for i, u in enumerate([update, *[zero] * alone])]
        if others > _CROWD:
            together = parts[1].sealed.double() * math.sqrt(others)
            parts[1] = replace(parts[1], sealed=together.round().to(parts[1].sealed.dtype))
        released = door.release_sum(parts, plan, t, denominator)
        return replace(released, noise_std=released.noise_std * math.sqrt((1 + others) / len(parts)))


# --- the worst pair ----------------------------------------------------------------------------------------------------


def worst_shift(plan: Plan, layout: Layout) -> Tensor:
    """Return the update [d] within the clips that is hardest to hide: with the largest norm in units of the noise.

    Without layer clips it lies entirely in the layer with the least noise. With both kinds of clip the layers are filled in the
    order of their noise (fractional knapsack). Without any clip its norm is 1.
    """
    active = active_layers(plan, layout)
    stds, remaining = per_layer(plan.noise_std, layout), plan.clip**2
    bounds = [math.inf] * len(layout) if plan.layer_clip is None else plan.layer_clip.tolist()
    out = torch.zeros(layout.dimension)
    parts = layout.split(out)
    where = parts if plan.support is None else layout.split(plan.support)
    for i in sorted(active, key=lambda i: stds[i]):
        norm2 = min(bounds[i] ** 2, remaining)
        if norm2 <= 0:
            break
        free = where[i].bool() if plan.support is not None else torch.ones_like(parts[i], dtype=torch.bool)
        norm2 = norm2 if math.isfinite(norm2) else 1.0
        parts[i][free] = math.sqrt(norm2 / int(free.sum()))
        remaining -= norm2
        if not math.isfinite(plan.clip) and plan.layer_clip is None:
            break
    return out


def worst_pair(plan: Plan, case: Case) -> tuple[Tensor, Tensor]:
    """Return two neighbouring updates: opposite ones, or zero and an update (client level, zero-out)."""
    shift = worst_shift(plan, case.setting.layout)
    scope = case.setting.scope
    one_sided = scope.unit is Unit.CLIENT and scope.adjacency is Adjacency.ZERO_OUT
    return (torch.zeros_like(shift) if one_sided else -shift), shift


def first_plan(case: Case) -> Plan | Raw:
    """Return the plan of the first release, which determines the audit that fits the method."""
    return case.policy.plan(case.released(0), case.policy.start())


# --- one release -------------------------------------------------------------------------------------------------------


def warmed(case: Case, rng: np.random.Generator, rounds: int = _WARM) -> State:
    """Return the policy's state after some rounds of synthetic updates, equal in both worlds."""
    state = case.policy.start()
    for t in range(min(rounds, case.setting.rounds - 1)):
        released = case.released(t)
        plan = case.policy.plan(released, state)
        update = torch.from_numpy(rng.standard_normal(len(case.model))).float() * 0.05 * (t + 1)
        state = case.policy.observe(state, observed(case.release(update, plan, t, rng), released))
    return state


def release_subject(case: Case, rng: np.random.Generator) -> Subject:
    """Return a subject for one release, on the worst pair, after `_WARM` synthetic rounds; plans must not read the data.

    If Poisson sampling is secret, the canary joins the sum by chance in both worlds, and the curve is not Gaussian.
    """
    t = min(_WARM, case.setting.rounds - 1)
    plan = case.policy.plan(case.released(t), warmed(case, rng))
    assert isinstance(plan, Plan)
    pair, absent = worst_pair(plan, case), torch.zeros_like(case.model)
    layout = case.setting.layout
    means = [clipped(u, plan, layout).double().numpy() for u in pair]
    std = _noise_of(case, plan)
    sent = None if plan.support is None or case.summed else plan.support.numpy()

    def present(world: int, rng: np.random.Generator, /) -> Output:
        return Output(case.release(pair[world], plan, t, rng).vector.numpy(), sent)

    def mechanism(world: int, rng: np.random.Generator, /) -> Output:
        return present(world, rng) if case.joins(rng) else Output(case.release(absent, plan, t, rng).vector.numpy(), sent)

    mu = _plain_mu(plan, layout)
    return Subject(
        case.method.name,
        mechanism,
        case.scope,
        (means[0], means[1]),
        (std, std),
        gaussian=case.rate == 1.0 and math.isfinite(mu),
        sampled=sampled(case, mu, 1),
        rate=case.rate,
        present=present,
    )


def _noise_of(case: Case, plan: Plan) -> Floats:
    """Return the noise std [d] that the adversary faces under this plan; 0 where nothing is sent."""
    stds = torch.tensor(per_layer(plan.noise_std, case.setting.layout), dtype=torch.float64)
    std = case.setting.layout.expand(stds)
    if plan.support is not None:
        std = std * plan.support
    if case.summed:
        std = std * math.sqrt(case.shares(plan))
    return np.asarray(std.numpy(), dtype=np.float64)


# --- a whole run -------------------------------------------------------------------------------------------------------


def run_score(case: Case, rounds: int) -> Callable[[int, np.random.Generator], float]:
    """Return a function (world, rng) -> log-likelihood ratio of `rounds` rounds with the canary, adapted to each round's plan.

    Policies see the releases of their own run. If Poisson sampling is secret, the canary joins by chance in both worlds, and the
    score is that of the mixture.
    """
    s, rate = case.setting, case.rate

    def run(world: int, rng: np.random.Generator, /) -> float:
        state, total, memory = case.policy.start(), 0.0, NoiseMemory()
        for t in range(rounds):
            released = case.released(t)
            plan = case.policy.plan(released, state)
            assert isinstance(plan, Plan)
            a, b = (clipped(u, plan, s.layout) for u in worst_pair(plan, case))
            update = (b if world else a) if case.joins(rng) else torch.zeros_like(a)
            release = case.release(update, plan, t, rng, memory=memory)
            state = case.policy.observe(state, observed(release, released))
            std = _noise_of(case, plan)
            total += _ratio(release.vector.double().numpy(), a.numpy(), b.numpy(), std, rate)
        return total

    return run


def _ratio(released: Floats, a: Floats, b: Floats, std: Floats, rate: float) -> float:
    """Return the log density with the canary's update b minus that with a, each present with probability `rate`."""
    noisy = std > 0
    x, a, b, s2 = released[noisy], a[noisy].astype(np.float64), b[noisy].astype(np.float64), std[noisy] ** 2
    to_a, to_b = (float((2 * x - m) @ (m / s2)) / 2 for m in (a, b))
    if rate == 1.0:
        return to_b - to_a
    absent = math.log1p(-rate)
    present = math.log(rate)
    return float(np.logaddexp(absent, present + to_b) - np.logaddexp(absent, present + to_a))


def gaussian_run(case: Case, rounds: int, rng: np.random.Generator, *, tries: int = 3) -> bool:
    """Return whether every run costs the same sum of mu^2, unsampled and unclamped, so that its trade-off curve is Gaussian."""
    s = case.setting
    if case.summed and s.sampling == "poisson":
        return False
    totals = [sum(mu**2 for mu in costs(case, rounds, rng)) for _ in range(tries)]
    return max(totals) <= min(totals) * (1 + 1e-3)


def sampled_run(case: Case, rounds: int, rng: np.random.Generator, *, tries: int = 3) -> SampledGaussian | None:
    """Return the cost of a run if every round of every run is the same unclamped, sampled Gaussian; else None."""
    if case.rate == 1.0:
        return None
    all_costs = np.array([costs(case, rounds, rng) for _ in range(tries)])
    return sampled(case, float(all_costs.max()), rounds) if all_costs.max() <= all_costs.min() * (1 + 1e-3) else None


def sampled(case: Case, mu: float, rounds: int) -> SampledGaussian | None:
    """Return the event of `rounds` sums that a client joins by secret chance, with mu = clip / noise std each; None if not so."""
    if case.rate == 1.0 or not math.isfinite(mu):
        return None
    return SampledGaussian(case.rate, 1 / (mu * case.setting.scope.update_factor), rounds)


def _plain_mu(plan: Plan | Raw, layout: Layout) -> float:
    """Return clip / noise std of a release with plain Gaussian noise, inf without noise; NaN for any other release."""
    if not isinstance(plan, Plan) or plan.clamp is not None or plan.mechanism.stateful:
        return math.nan
    mu = plan_mu(plan, layout, 1)
    return math.nan if isinstance(mu, str) else mu


def costs(case: Case, rounds: int, rng: np.random.Generator) -> list[float]:
    """Return mu of each round of one run with synthetic updates; NaN for a round that is not a plain Gaussian."""
    state, mus = case.policy.start(), []
    for t in range(rounds):
        released = case.released(t)
        plan = case.policy.plan(released, state)
        mus.append(_plain_mu(plan, case.setting.layout))
        update = torch.from_numpy(rng.standard_normal(len(case.model))).float()
        state = case.policy.observe(state, observed(case.release(update, plan, t, rng), released))
    return mus
