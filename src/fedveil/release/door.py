"""The door itself. In the order of the code: check, restrict, clip, noise, charge (if the budget allows), hand over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from fedveil.accounting.types import Event, Scope, Unbounded
from fedveil.errors import ConfigError, UpdateRefused
from fedveil.ledger.ledger import Entry
from fedveil.release.cost import active_layers, event_of, per_layer
from fedveil.release.plan import Plan, Raw, Upload, same_plan

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.release.noise import Randomness
    from fedveil.training.params import Layout

_ROUNDING = 1 - 1e-6
"""A clipped float32 vector is scaled this much further, so that its exact norm stays at or below the clip."""

AGGREGATE = -1
"""The client number of a release that is a whole round's sum."""


class Charger(Protocol):
    """The part of a ledger that the door needs."""

    def charge(self, entry: Entry) -> int:
        """Write and sync one release if the budget allows it; returns its number, raises BudgetExhausted otherwise."""
        ...


@dataclass(frozen=True)
class Contribution:
    """One client's clipped vector on its way into a sum. Sealed: nothing but `Door.release_sum` reads it."""

    client: int
    plan: Plan
    reads: tuple[str, ...]
    reason: str
    weight: float
    sealed: Tensor
    buffers: Tensor | None = None


@dataclass(frozen=True)
class Door:
    """The one way out of a run.

    Args:
        layout: of the flat vector. scope: what is promised to whom. run: name written into each ledger row.
        ledger: where each release is charged. randomness: where noise comes from.
        rate: Poisson sampling rate q of clients in the aggregate view, or None when sampling is not Poisson.
        max_norm: updates above this L2 norm are refused rather than clipped.
        colluders: clients whose noise shares the adversary knows and can subtract.
    """

    layout: Layout
    scope: Scope
    run: str
    ledger: Charger
    randomness: Randomness
    rate: float | None = None
    max_norm: float = 1e6
    colluders: int = 0

    def upload(
        self, update: Tensor, plan: Plan | Raw, client: int, round: int, weight: float = 1.0, buffers: Tensor | None = None
    ) -> Upload:
        """Release one client's update [d] to the server: its own noise, its own row in the ledger.

        Raises:
            UpdateRefused: NaN, infinite, mis-shaped, mis-typed or oversized update; nothing was released.
            BudgetExhausted: the release would exceed the budget; nothing was released.
        """
        self._check(update, client, round)
        plan, reads, reason = _settle(plan, update)
        statistics = _statistics(buffers, plan, reason, client, round)
        vector = clipped(update, plan, self.layout)
        event = Unbounded(reason) if reason else event_of(plan, self.layout, self.scope, rate=self.rate)
        noisy = self._noised(vector, plan, client, round)
        self._charge(plan, event, client, round, 1, reads)
        stds = vector.new_tensor(per_layer(plan.noise_std, self.layout))
        return Upload(client, round, noisy, stds, plan, plan.support, weight, statistics)

    def seal(
        self, update: Tensor, plan: Plan | Raw, client: int, round: int, weight: float = 1.0, buffers: Tensor | None = None
    ) -> Contribution:
        """Prepare one client's update [d] for a sum that only `release_sum` opens (secure aggregation, trusted server).

        Args:
            weight: public factor in (0, 1] on the clipped vector.

        Raises:
            UpdateRefused: as in `upload`.
        """
        if not 0 < weight <= 1:
            raise ConfigError(f"the weight of a contribution must lie in (0, 1] so that the clip still bounds it, got {weight}")
        self._check(update, client, round)
        plan, reads, reason = _settle(plan, update)
        statistics = _statistics(buffers, plan, reason, client, round)
        vector = clipped(update, plan, self.layout).mul_(weight)
        if plan.place == "upload":
            vector = self._noised(vector, plan, client, round)
        return Contribution(client, plan, reads, reason, weight, vector, statistics)

    def release_sum(self, contributions: Sequence[Contribution], plan: Plan | Raw, round: int, denominator: float) -> Upload:
        """Release the noisy sum of a round divided by a public denominator; charged once for all clients.

        Contributions are added in the order given. A client that failed simply contributes nothing (zero-out).

        Args:
            plan: the common plan of the round, also when nobody contributed.
            denominator: planned total weight; must not depend on who failed unless the run promises nothing.
        """
        if not denominator > 0:
            raise ConfigError(f"the denominator of a mean must be > 0, got {denominator}")
        reads = contributions[0].reads if contributions else ()
        reason = contributions[0].reason if contributions else ""
        executed = plan if isinstance(plan, Plan) else (contributions[0].plan if contributions else Plan())
        if isinstance(plan, Plan) and not all(c.plan is plan or same_plan(c.plan, plan) for c in contributions):
            raise ConfigError("all contributions to one sum must carry the plan of the round; a client used another")
        total = torch.zeros(self.layout.dimension)
        for contribution in contributions:
            total += contribution.sealed
        n = len(contributions)
        event = (
            Unbounded(reason)
            if reason
            else event_of(executed, self.layout, self.scope, rate=self.rate, noisy_uploads=n - self.colluders)
        )
        if executed.place == "sum":
            total = self._noised(total, executed, AGGREGATE, round)
        self._charge(executed, event, AGGREGATE, round, n, reads)
        stds = total.new_tensor(per_layer(executed.noise_std, self.layout)) / denominator
        if executed.place == "upload":
            stds = stds * math.sqrt(n)
        return Upload(AGGREGATE, round, total / denominator, stds, executed, executed.support, 1.0, _mean_buffers(contributions))

    # --- the steps ---

    def _check(self, update: Tensor, client: int, round: int) -> None:
        where = f"client {client} in round {round}"
        if not isinstance(update, torch.Tensor) or not update.is_floating_point() or update.dtype != torch.float32:
            given = getattr(update, "dtype", type(update).__name__)
            raise UpdateRefused(f"{where}: the update must be a float32 tensor, got {given}")
        if update.layout != torch.strided or update.requires_grad:
            given = "one that requires a gradient" if update.requires_grad else str(update.layout)
            raise UpdateRefused(f"{where}: the update must be a plain dense tensor, got {given}")
        if tuple(update.shape) != (self.layout.dimension,):
            raise UpdateRefused(f"{where}: the update must have shape ({self.layout.dimension},), got {tuple(update.shape)}")
        norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
        if not math.isfinite(norm):
            kind = "NaN" if bool(update.isnan().any()) else "infinite values"
            raise UpdateRefused(
                f"{where}: the update contains {kind}; it was left out (a smaller learning rate or a batch_clip may help)"
            )
        if norm > self.max_norm:
            raise UpdateRefused(
                f"{where}: the update has norm {norm:.4g}, above the {self.max_norm:g} that the door allows (max_update_norm)"
            )

    def _noised(self, vector: Tensor, plan: Plan, client: int, round: int) -> Tensor:
        stds = per_layer(plan.noise_std, self.layout)
        if any(stds):
            noise = self.randomness.normal(self.layout.dimension, round, client)
            if isinstance(plan.noise_std, int | float):
                noise.mul_(plan.noise_std)
            else:
                noise.mul_(self.layout.expand(plan.noise_std.to(torch.float32)))
            if plan.support is not None:
                noise.mul_(plan.support)
            vector = vector + noise
        return vector if plan.clamp is None else vector.clamp(-plan.clamp, plan.clamp)

    def _charge(self, plan: Plan, event: Event, client: int, round: int, participants: int, reads: tuple[str, ...]) -> None:
        d = self.layout.dimension
        clip, std = _as_charged(plan, self.layout)
        self.ledger.charge(
            Entry(
                run=self.run,
                round=round,
                client=client,
                unit=self.scope.unit,
                adjacency=self.scope.adjacency,
                view=self.scope.view,
                event=event,
                clip=tuple(map(float, clip)),
                noise_std=tuple(map(float, std)),
                coordinates=d if plan.support is None else int(plan.support.sum()),
                dimension=d,
                participants=participants,
                reads=reads,
                note="" if plan.dp_sgd is None else "DP-SGD inside local training",
            )
        )


def clipped(update: Tensor, plan: Plan, layout: Layout) -> Tensor:
    """A copy of `update` [d] restricted to the plan's support, then clipped per layer, then as a whole.

    The exact L2 norm of the result is at most `plan.clip`, and of each layer at most `plan.layer_clip`.
    """
    vector = update.clone() if plan.support is None else update * plan.support
    if plan.layer_clip is not None:
        for part, bound in zip(layout.split(vector), plan.layer_clip.tolist(), strict=True):
            _clip_exactly_(part, bound)
    if math.isfinite(plan.clip):
        _clip_exactly_(vector, plan.clip)
    return vector


def _clip_exactly_(vector: Tensor, bound: float) -> None:
    norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    if norm > bound:
        vector.mul_(bound / norm * _ROUNDING)


def _as_charged(plan: Plan, layout: Layout) -> tuple[list[float], list[float]]:
    """Clip and noise std per layer for the ledger; layers of which nothing is sent have clip 0."""
    if plan.dp_sgd is not None:
        step = plan.dp_sgd
        return [step.clip] * len(layout), [step.noise_multiplier * step.clip] * len(layout)
    sent = set(active_layers(plan, layout))
    clips = per_layer(plan.clip if plan.layer_clip is None else plan.layer_clip.clamp_max(plan.clip), layout)
    return [c if i in sent else 0.0 for i, c in enumerate(clips)], per_layer(plan.noise_std, layout)


def _settle(plan: Plan | Raw, update: Tensor) -> tuple[Plan, tuple[str, ...], str]:
    """The plan to execute, what it read, and why nothing can be proven from it (empty when something can)."""
    if isinstance(plan, Raw):
        return plan.make(update), plan.reads, plan.reason
    return plan, (), plan.unproven


def _statistics(buffers: Tensor | None, plan: Plan, reason: str, client: int, round: int) -> Tensor | None:
    """The batch statistics that travel with a release, if any may; refused like an update when they are not finite."""
    if buffers is None or not _open(plan, reason):
        return None
    if not bool(buffers.isfinite().all()):
        raise UpdateRefused(
            f"client {client} in round {round}: its batch statistics contain NaN or infinite values; it was left out"
        )
    return buffers


def _open(plan: Plan, reason: str) -> bool:
    """Whether this release promises nothing, so that batch statistics may travel with it."""
    return bool(reason) or (math.isinf(plan.clip) and plan.layer_clip is None and plan.dp_sgd is None)


def _mean_buffers(contributions: Sequence[Contribution]) -> Tensor | None:
    given = [(c.weight, c.buffers) for c in contributions if c.buffers is not None and c.buffers.numel()]
    if not given:
        return None
    total = sum(w for w, _ in given)
    return torch.stack([b * (w / total) for w, b in given]).sum(0)


__all__ = ["AGGREGATE", "Charger", "Contribution", "Door", "clipped"]
