"""The door itself. In the order of the code: check, restrict, clip, put on the grid, noise, seal; charge, hand over.

What leaves under a plan that promises anything is integers: clipped coordinates truncated to a public grid, plus rounded Gaussian
noise that was drawn without looking at them (`grid`, `sampler`). Sums of clients are integer sums. An update that cannot be
released as it is (not finite, too large, mis-shaped, or none because training failed) is released as zero, noised like any other,
so that a refusal tells nothing. Plans that promise nothing let floats out, and refuse such updates instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from fedveil.accounting.types import Event, Scope, Unbounded
from fedveil.errors import ConfigError, UpdateRefused
from fedveil.ledger.ledger import Entry
from fedveil.release.cost import active_layers, event_of, per_layer, promises
from fedveil.release.grid import from_grid, to_grid
from fedveil.release.plan import Plan, Raw, Upload
from fedveil.release.release_layout import ReleaseLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.release.noise import Randomness
    from fedveil.release.noise_memory import NoiseMemory
    from fedveil.training.params import Layout

    Integers = NDArray[np.int64]

_ROUNDING = 1 - 1e-6
"""A clipped float32 vector that promises nothing is scaled this much further, so that its norm stays at or below the clip."""

LEAST_SHARE = 4
"""Grid steps of a share's noise std from which a sum of rounded shares costs what one Gaussian does (docs/exact-release.md)."""
AGGREGATE = -1
"""The client number of a release that is a whole round's sum."""


class Charger(Protocol):
    """The part of a ledger that the door needs."""

    def charge_all(self, entries: Sequence[Entry]) -> None:
        """Write and sync releases that are handed over together, in one transaction, if the budget allows each of them.

        Raises BudgetExhausted, with nothing written, otherwise.
        """
        ...

    def charge_once(self, entry: Entry, *, digest: str) -> None:
        """Charge what may leave once in its round: SHA-256 tells which bits, and the same bits again cost nothing."""
        ...

    def admits(self, client: int, event: Event) -> bool:
        """Whether the client's budget has room for a release of this cost."""
        ...


@dataclass(frozen=True)
class Contribution:
    """One client's clipped vector on its way into a sum. Sealed: nothing but `Door.release_sum` reads it.

    `sealed`: int64 [D] on the plan's grid, or float32 [D] under a plan that promises nothing.
    """

    client: int
    reads: tuple[str, ...]
    reason: str
    weight: float
    sealed: Tensor
    plan: Plan | None = None
    buffers: Tensor | None = None


@dataclass(frozen=True)
class SealedUpload:
    """One client's noisy upload before it leaves, and the ledger row that it leaves by.

    Sealed: `Door.release_uploads` hands it over, and until then only the client's own policy reads it.
    """

    upload: Upload
    entry: Entry

    @property
    def weight(self) -> float:
        """Public weight in the mean."""
        return self.upload.weight


@dataclass(frozen=True)
class Door:
    """The one way out of a run.

    Args:
        layout: of the model's flat vector. scope: what is promised to whom. run: name written into each ledger row.
        ledger: where each release is charged. randomness: where noise comes from.
        rate: Poisson sampling rate q of clients in the aggregate view, or None when sampling is not Poisson.
        max_norm: updates above this L2 norm do not leave.
        colluders: clients whose noise shares the adversary knows and can subtract.
        extras: shape of each extra of the method's releases. memory: secret state of correlated noise.
    """

    layout: Layout
    scope: Scope
    run: str
    ledger: Charger
    randomness: Randomness
    rate: float | None = None
    max_norm: float = 1e6
    colluders: int = 0
    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    memory: NoiseMemory | None = None

    @cached_property
    def parts(self) -> ReleaseLayout:
        """The release layout: update and extras."""
        return ReleaseLayout(self.layout, self.extras)

    def admits(self, plan: Plan | Raw, client: int, round: int) -> bool:
        """Whether the client's budget has room for an upload under this plan; without a look at its data."""
        if isinstance(plan, Raw):
            return self.ledger.admits(client, Unbounded(plan.reason))
        return self.ledger.admits(client, self._cost(plan, plan.unproven, round))

    def _cost(self, plan: Plan, reason: str, round: int) -> Event:
        """What an upload under this plan costs; `reason`: why nothing can be proven of it, or empty."""
        return Unbounded(reason) if reason else event_of(plan, self.layout, self.scope, rate=self.rate, round=round)

    def problem(self, update: object, extras: Mapping[str, Tensor]) -> str:
        """Why a client's update and extras cannot leave as they are, for its own log; empty where they can."""
        try:
            self._check(update, extras)
        except UpdateRefused as refused:
            return str(refused)
        return ""

    def upload(self, update: Tensor | None, plan: Plan | Raw, client: int, round: int, **more: Any) -> Upload:
        """Seal one client's update [d] and release it on its own; see `seal_upload` and `release_uploads`."""
        return self.release_uploads([self.seal_upload(update, plan, client, round, **more)])[0]

    def seal_upload(
        self,
        update: Tensor | None,
        plan: Plan | Raw,
        client: int,
        round: int,
        *,
        extras: Mapping[str, Tensor] | None = None,
        weight: float = 1.0,
        buffers: Tensor | None = None,
    ) -> SealedUpload:
        """Prepare one client's update [d] for the server, with its own noise and its own row; only `release_uploads` lets it out.

        Args:
            update: None where there is none that could leave; it is then released as zero if the plan promises anything.

        Raises:
            UpdateRefused: under a plan that promises nothing, an update that cannot leave.
        """
        plan, reads, reason, vector = self._settled(update, plan, extras or {})
        statistics = _statistics(buffers, plan, reason)
        released: Tensor
        if on_grid(plan, reason, self.layout):
            noisy = plan.mechanism.execute(self.gridded(vector, plan), self._noise(plan, client, round), round, None)
            released = torch.from_numpy(noisy)
        else:
            released = self._float_noised(self._clipped(vector, plan), plan, client, round)
        return self.sealed(released, plan, client, round, reason=reason, reads=reads, weight=weight, buffers=statistics)

    def sealed(
        self,
        released: Tensor,
        plan: Plan,
        client: int,
        round: int,
        *,
        reason: str,
        reads: tuple[str, ...] = (),
        **more: Any,
    ) -> SealedUpload:
        """What leaves under a plan, int64 [D] on its grid or float32 [D], as an upload and the ledger row that it leaves by.

        Args:
            reason: why nothing can be proven of it, or empty. more: weight and buffers of the upload.
        """
        integers = on_grid(plan, reason, self.layout)
        entry = self._entry(plan, self._cost(plan, reason, round), client, round, 1, reads, exact=integers)
        stds = torch.tensor(per_layer(plan.noise_std, self.layout))
        update, others = self.parts.parted(released)
        upload = Upload(client, round, update, stds, plan, plan.support, extras=others, **more)
        return SealedUpload(self.opened(upload, released, plan) if integers else upload, entry)

    def release_uploads(self, sealed: Sequence[SealedUpload]) -> list[Upload]:
        """Release the uploads of a round together: each client's budget is checked, all rows are charged, all are handed over.

        The rows are written in one transaction, so a crash leaves all of them charged, or none, and nothing released.

        Raises:
            BudgetExhausted: one of them would exceed its client's budget; nothing was charged and nothing released.
        """
        self.ledger.charge_all([one.entry for one in sealed])
        return [one.upload for one in sealed]

    def leaving(self, upload: Upload) -> Tensor:
        """What left with an upload, to the bit: int64 [D] on the grid, or float32 [D] under a plan that promises nothing."""
        floats = [upload.vector, *(part.reshape(-1) for part in upload.extras.values())]
        return torch.cat(floats) if upload.integers is None else upload.integers

    def opened(self, upload: Upload, integers: Tensor, plan: Plan, denominator: float = 1.0) -> Upload:
        """The upload with its vectors read off the released integers [D]: post-processing, for whoever receives them."""
        vector = self._decoded(integers.numpy(), plan, upload.round)
        if plan.clamp is not None:
            vector[: self.layout.dimension].clamp_(-plan.clamp, plan.clamp)
        update, extras = self.parts.parted(vector if denominator == 1 else vector / denominator)
        return replace(upload, integers=integers, vector=update, extras=extras)

    def seal(
        self,
        update: Tensor | None,
        plan: Plan | Raw,
        client: int,
        round: int,
        *,
        extras: Mapping[str, Tensor] | None = None,
        weight: float = 1.0,
        buffers: Tensor | None = None,
    ) -> Contribution:
        """Prepare one client's update [d] for a sum that only `release_sum` opens (secure aggregation, trusted server).

        Args:
            weight: public factor in (0, 1] on a vector that promises nothing; 1 for all others.

        Raises:
            UpdateRefused: as in `upload`.
        """
        if not 0 < weight <= 1:
            raise ConfigError(f"the weight of a contribution must lie in (0, 1] so that the clip still bounds it, got {weight}")
        plan, reads, reason, vector = self._settled(update, plan, extras or {})
        statistics = _statistics(buffers, plan, reason)
        if on_grid(plan, reason, self.layout):
            if weight != 1:
                raise ConfigError(f"a sum with a guarantee needs a planned denominator, so all weigh 1; got the weight {weight}")
            if plan.place == "upload" and plan.clamp is not None:
                raise ConfigError("clamping noise in shares is not post-processing of the sum: leave clamp out, or noise the sum")
            integers = self.gridded(vector, plan)
            if plan.place == "upload":
                integers = plan.mechanism.execute(integers, self._noise(plan, client, round), round, None)
            sealed = torch.from_numpy(integers)
        else:
            sealed = self._clipped(vector, plan).mul_(weight)
            if plan.place == "upload":
                sealed = self._float_noised(sealed, plan, client, round)
        return Contribution(client, reads, reason, weight, sealed, plan if reads else None, statistics)

    def release_sum(self, contributions: Sequence[Contribution], plan: Plan | Raw, round: int, denominator: float) -> Upload:
        """Release the noisy sum of a round divided by a public denominator; charged once for all clients.

        Args:
            plan: the common plan of the round, also when nobody contributed.
            denominator: planned total weight; must not depend on who failed unless the run promises nothing.
        """
        if not denominator > 0:
            raise ConfigError(f"the denominator of a mean must be > 0, got {denominator}")
        reads = contributions[0].reads if contributions else ()
        reason = contributions[0].reason if contributions else plan.unproven if isinstance(plan, Plan) else plan.reason
        executed = plan if isinstance(plan, Plan) else (contributions[0].plan if contributions else None) or Plan()
        exact = on_grid(executed, reason, self.layout)
        kind = torch.int64 if exact else torch.float32
        if any(c.sealed.dtype != kind for c in contributions):
            raise ConfigError("all contributions to one sum must carry the plan of the round; a client used another")
        n = len(contributions)
        shares = n - self.colluders
        event = (
            Unbounded(reason)
            if reason
            else event_of(executed, self.layout, self.scope, rate=self.rate, noisy_uploads=shares, round=round)
        )
        total = torch.zeros(self.parts.dimension, dtype=kind)
        for contribution in contributions:
            total += contribution.sealed
        if exact and executed.place == "sum":
            if executed.mechanism.stateful and self.memory is not None:
                self.memory.hold_to(plan_digest(executed, self.layout))
            noise = self._noise(executed, AGGREGATE, round)
            total = torch.from_numpy(executed.mechanism.execute(total.numpy(), noise, round, self.memory))
        elif executed.place == "sum":
            total = self._float_noised(total, executed, AGGREGATE, round)
        entry = self._entry(executed, event, AGGREGATE, round, n, reads, exact=exact)
        if exact and executed.mechanism.stateful:
            digest = hashlib.sha256(total.numpy().tobytes()).hexdigest()
            self.ledger.charge_once(entry, digest=digest)
        else:
            self.ledger.charge_all([entry])
        stds = torch.tensor(per_layer(executed.noise_std, self.layout)) / denominator
        if executed.place == "upload":
            stds = stds * math.sqrt(n)
        update, extras = self.parts.parted(total / denominator)
        buffers = _mean_buffers(contributions)
        upload = Upload(AGGREGATE, round, update, stds, executed, executed.support, 1.0, buffers, extras=extras)
        return self.opened(upload, total, executed, denominator) if exact else upload

    # --- the steps ---

    def _settled(
        self, update: Tensor | None, plan: Plan | Raw, extras: Mapping[str, Tensor]
    ) -> tuple[Plan, tuple[str, ...], str, Tensor]:
        """The plan to execute, what it read, why nothing can be proven from it, and the flat vector [D] to release."""
        if isinstance(plan, Raw):
            vector = self._check(update, extras)
            made = plan.make(vector[: self.layout.dimension])
            self._check_extras(made)
            return made, plan.reads, plan.reason, vector
        self._check_extras(plan)
        try:
            return plan, (), plan.unproven, self._check(update, extras)
        except UpdateRefused:
            if not (promises(plan, self.layout) or plan.dp_sgd is not None):
                raise
            return plan, (), plan.unproven, torch.zeros(self.parts.dimension)

    def _check_extras(self, plan: Plan) -> None:
        needed, got = sorted(self.extras), sorted(plan.extras)
        if needed != got:
            raise ConfigError(f"the plan must give clip and noise for the extras {needed}, got {got}")

    def _check(self, update: object, extras: Mapping[str, Tensor]) -> Tensor:
        """The flat vector [D] of what training gave, if it may leave; what cannot even be looked at may not."""
        try:
            return self._checked(update, extras)
        except UpdateRefused:
            raise
        except Exception as error:
            raise UpdateRefused(f"what training gave cannot be read: {type(error).__name__}") from error

    def _checked(self, update: object, extras: Mapping[str, Tensor]) -> Tensor:
        if update is None:
            raise UpdateRefused("training gave no update")
        if not isinstance(extras, Mapping):
            raise UpdateRefused(f"Local.extras must stay a dictionary, got {type(extras).__name__}")
        if type(update) is not torch.Tensor or update.dtype != torch.float32:
            kind = getattr(update, "dtype", type(update).__name__)
            raise UpdateRefused(f"the update must be a float32 tensor, got {kind} ({type(update).__name__})")
        if update.layout != torch.strided or update.requires_grad:
            kind = "one that requires a gradient" if update.requires_grad else str(update.layout)
            raise UpdateRefused(f"the update must be a plain dense tensor, got {kind}")
        if tuple(update.shape) != (self.layout.dimension,):
            raise UpdateRefused(f"the update must have shape ({self.layout.dimension},), got {tuple(update.shape)}")
        vector = self.parts.flat(torch.detach(update), extras)  # an object of the door's own, without what was attached to it
        norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        if not math.isfinite(norm):
            kind = "NaN" if bool(vector.isnan().any()) else "infinite values"
            raise UpdateRefused(f"the update contains {kind} (a smaller learning rate or a batch_clip may help)")
        if norm > self.max_norm:
            raise UpdateRefused(f"the update has norm {norm:.4g}, above training.max_update_norm = {self.max_norm:g}")
        return vector

    def gridded(self, vector: Tensor, plan: Plan) -> Integers:
        """Restrict, clip and truncate [D] to integers of the plan's grid: private, before any noise."""
        d = self.layout.dimension
        grid = [(part, k + plan.mechanism.shift) for part, k in self.parts.grid(plan)]
        clips = [clip for _, _, clip in self.parts.groups(plan)]
        layers = [i for i, (part, _) in enumerate(grid) if part.stop <= d]
        update = vector[:d] if plan.support is None else vector[:d] * plan.support
        whole = to_grid(update, [grid[i] for i in layers], plan.clip, [clips[i] for i in layers])
        others = [
            to_grid(vector[part], [(slice(0, part.stop - part.start), k)], clip)
            for (part, k), clip in zip(grid[len(layers) :], clips[len(layers) :], strict=True)
        ]
        return np.concatenate([whole, *others]) if others else whole

    def noise_steps(self, plan: Plan) -> list[float]:
        """The noise std of each part of a release in steps of its grid."""
        return [std * 2.0**-k for (_, std, _), (_, k) in zip(self.parts.groups(plan), self.parts.grid(plan), strict=True)]

    def _noise(self, plan: Plan, client: int, round: int) -> _Draw:
        return _Draw(self, plan, client, round)

    def _decoded(self, integers: Integers, plan: Plan, round: int) -> Tensor:
        estimate = plan.mechanism.decode(integers, round, self.memory)
        return from_grid(estimate, self.parts.grid(plan))

    def _clipped(self, vector: Tensor, plan: Plan) -> Tensor:
        """Under a plan that promises nothing: update and extras [D], clipped in floats."""
        update = clipped(vector[: self.layout.dimension], plan, self.layout)
        extras = [vector[place].clone() for place in self.parts.places.values()]
        for name, part in zip(self.extras, extras, strict=True):
            _clip_exactly_(part, plan.extras[name].clip)
        return torch.cat([update, *extras]) if extras else update

    def _float_noised(self, vector: Tensor, plan: Plan, client: int, round: int) -> Tensor:
        """Under a plan that promises nothing: float32 noise on a float32 vector [D]; clips it to `plan.clamp` in place."""
        d = self.layout.dimension
        if any(per_layer(plan.noise_std, self.layout)) or any(extra.noise_std for extra in plan.extras.values()):
            noise = self.randomness.normal(self.parts.dimension, round, client)
            if isinstance(plan.noise_std, int | float):
                noise[:d].mul_(plan.noise_std)
            else:
                noise[:d].mul_(self.layout.expand(plan.noise_std.to(torch.float32)))
            if plan.support is not None:
                noise[:d].mul_(plan.support)
            for name, place in self.parts.places.items():
                noise[place].mul_(plan.extras[name].noise_std)
            vector = vector + noise
        if plan.clamp is not None:
            vector[:d].clamp_(-plan.clamp, plan.clamp)
        return vector

    def _entry(
        self, plan: Plan, event: Event, client: int, round: int, participants: int, reads: tuple[str, ...], *, exact: bool
    ) -> Entry:
        """The row of a release in the ledger. exact: integers leave."""
        d = self.layout.dimension
        clip, std = _as_charged(plan, self.layout)
        extras = [plan.extras[name] for name in self.extras] if plan.extras else []
        noised = plan.dp_sgd is None and any((*std, *(extra.noise_std for extra in extras)))
        return Entry(
            run=self.run,
            round=round,
            client=client,
            unit=self.scope.unit,
            adjacency=self.scope.adjacency,
            view=self.scope.view,
            event=event,
            clip=(*clip, *(extra.clip for extra in extras)),
            noise_std=(*std, *(extra.noise_std for extra in extras)),
            coordinates=(d if plan.support is None else int(plan.support.sum())) + self.parts.dimension - d,
            dimension=self.parts.dimension,
            participants=participants,
            reads=reads,
            note="" if plan.dp_sgd is None else "DP-SGD inside local training",
            grid=self._exponents(plan) if exact else None,
            mechanism=type(plan.mechanism).__name__.lower() if noised else "none",
            extras=tuple(self.extras) if extras else (),
            whole_clip=plan.clip if plan.dp_sgd is None else plan.dp_sgd.clip,
        )

    def _exponents(self, plan: Plan) -> tuple[int, ...]:
        """The exponent of the grid of what leaves, for each layer and each extra."""
        exponents = [k for _, k in self.parts.grid(plan)]
        layers = len(exponents) - len(plan.extras)
        return (*(exponents[:layers] if layers > 1 else exponents[:1] * len(self.layout)), *exponents[layers:])


@dataclass(frozen=True)
class _Draw:
    """Fresh rounded Gaussian noise [D] of a plan, drawn without looking at any data; one key for each release."""

    door: Door
    plan: Plan
    client: int
    round: int

    def __call__(self) -> Integers:
        door, plan = self.door, self.plan
        n, name = door.parts.dimension, (self.round, self.client)
        steps = door.noise_steps(plan)
        if plan.place == "upload" and min((s for s in steps if s), default=LEAST_SHARE) < LEAST_SHARE:
            raise ConfigError(
                f"an upload's noise has a std of {min(s for s in steps if s):.3g} grid steps, and noise that is added up over "
                f"uploads needs at least {LEAST_SHARE}: give the mechanism at least 2 bits, or the plan more noise"
            )
        if len(set(steps)) == 1 and plan.support is None:
            return door.randomness.integers(steps[0], n, *name)
        sizes = [part.stop - part.start for part, _ in door.parts.grid(plan)]
        std = np.repeat(np.array(steps), sizes)
        if plan.support is not None:
            std[: door.layout.dimension] *= plan.support.numpy()
        return door.randomness.integers(std, n, *name)


def plan_digest(plan: Plan, layout: Layout) -> bytes:
    """SHA-256 of all that a plan's price follows from."""
    clips = None if plan.layer_clip is None else plan.layer_clip.tolist()
    sent = None if plan.support is None else plan.support.numpy().tobytes()
    said = plan.clip, per_layer(plan.noise_std, layout), clips, sent, sorted(plan.extras.items()), plan.mechanism
    return hashlib.sha256(repr(said).encode()).digest()


def clipped(update: Tensor, plan: Plan, layout: Layout) -> Tensor:
    """A copy of `update` [d] restricted to the plan's support, then clipped per layer, then as a whole, in floats.

    The exact L2 norm of the result is at most `plan.clip`, and of each layer at most `plan.layer_clip`. What leaves with a
    promise is clipped on the grid instead.
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


def on_grid(plan: Plan, reason: str, layout: Layout) -> bool:
    """Whether what leaves under this plan leaves as integers on the grid: whenever it promises anything at the door."""
    return not reason and promises(plan, layout)


def _as_charged(plan: Plan, layout: Layout) -> tuple[list[float], list[float]]:
    """Clip and noise std per layer for the ledger; layers of which nothing is sent have clip 0."""
    if plan.dp_sgd is not None:
        step = plan.dp_sgd
        return [step.clip] * len(layout), [step.noise_multiplier * step.clip] * len(layout)
    sent = set(active_layers(plan, layout))
    clips = per_layer(plan.clip if plan.layer_clip is None else plan.layer_clip.clamp_max(plan.clip), layout)
    return [c if i in sent else 0.0 for i, c in enumerate(clips)], per_layer(plan.noise_std, layout)


def _statistics(buffers: Tensor | None, plan: Plan, reason: str) -> Tensor | None:
    """The batch statistics that travel with a release, if any may; refused like an update when they are not finite."""
    if buffers is None or not lets_statistics_out(plan, reason):
        return None
    if not bool(buffers.isfinite().all()):
        raise UpdateRefused("the batch statistics contain NaN or infinite values")
    return buffers


def lets_statistics_out(plan: Plan, reason: str) -> bool:
    """Whether this release promises nothing, so that batch statistics may travel with it."""
    return bool(reason) or (math.isinf(plan.clip) and plan.layer_clip is None and plan.dp_sgd is None)


def _mean_buffers(contributions: Sequence[Contribution]) -> Tensor | None:
    buffers = [(c.weight, c.buffers) for c in contributions if c.buffers is not None and c.buffers.numel()]
    if not buffers:
        return None
    total = sum(w for w, _ in buffers)
    return torch.stack([b * (w / total) for w, b in buffers]).sum(0)


__all__ = [
    "AGGREGATE",
    "Charger",
    "Contribution",
    "Door",
    "SealedUpload",
    "clipped",
    "lets_statistics_out",
    "on_grid",
    "plan_digest",
]
