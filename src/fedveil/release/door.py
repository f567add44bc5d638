"""The door, the only way to release client data: check, restrict, clip, put on the grid, noise, seal; charge, release.

Under a plan that promises anything, releases are integers: clipped coordinates truncated to a public grid, plus rounded Gaussian
noise that is drawn independently of them (see `fedveil.mechanism.grid` and `fedveil.mechanism.sampler`). Sums of clients are
integer sums. An invalid update (not finite, too large, of wrong shape, or missing because training failed) is released as zero,
with noise like any other, so that a refusal reveals nothing. Plans that promise nothing release floats, and refuse such updates.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from fedveil.accounting.types import Event, Scope, Unbounded
from fedveil.errors import ConfigError, UpdateRefused
from fedveil.ledger.ledger import Entry
from fedveil.mechanism.cost import event_of, on_grid, per_layer, plan_digest
from fedveil.mechanism.grid import Clipping, from_grid
from fedveil.mechanism.plan import COUNTS, LocalDpSgd, Plan, Raw, Upload, copied, reason_of
from fedveil.release.noise import DrawnNoise
from fedveil.release.release_layout import Charger, ReleaseLayout, row_of
from fedveil.release.sealed import (
    AGGREGATE,
    Contribution,
    SealedUpload,
    float_clipped,
    float_noised,
    free_statistics,
    mean_statistics,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.mechanism.mechanisms import NoiseMemory
    from fedveil.release.noise import Randomness
    from fedveil.training.params import Layout

    Integers = NDArray[np.int64]


@dataclass(frozen=True)
class CompiledPlan:
    """Compiled plan: everything that follows from a plan alone, before any data are read.

    source: the plan as its policy made it. plan: the same, as the door executes and charges it.
    reason: why nothing can be proven about it, or empty. reads: the private quantities that it depends on.
    exact: whether releases are integers. clippings: how the update and each extra are clipped, if so.
    rows: by round, the ledger's row of the first client that released under the plan; rows of others differ only in the client.
    """

    source: Plan
    plan: Plan
    reason: str
    reads: tuple[str, ...]
    exact: bool
    clippings: Sequence[tuple[slice, Clipping]]
    rows: dict[int, Entry] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Plan, plan: Plan, parts: ReleaseLayout, reason: str, reads: tuple[str, ...] = ()) -> CompiledPlan:
        """Compile a plan for releases of this layout."""
        exact = on_grid(plan, reason, parts.model)
        return cls(source, plan, reason, reads, exact, clippings(plan, parts) if exact else ())


def clippings(plan: Plan, parts: ReleaseLayout) -> list[tuple[slice, Clipping]]:
    """Return how update and extras become integers: slices of the flat vector [D], each with its groups and clips."""
    d = parts.model.dimension
    grid = [(part, k + plan.mechanism.shift) for part, k in parts.grid(plan)]
    clips = [clip for _, _, clip in parts.groups(plan)]
    layers = sum(part.stop <= d for part, _ in grid)
    slices = [(slice(0, d), Clipping.of(grid[:layers], plan.clip, clips[:layers], d))]
    for (part, k), clip in zip(grid[layers:], clips[layers:], strict=True):
        n = part.stop - part.start
        slices.append((part, Clipping.of([(slice(0, n), k)], clip, [math.inf], n)))
    return slices


def checked(update: object, extras: Mapping[str, Tensor], parts: ReleaseLayout, max_norm: float) -> Tensor:
    """Return the flat vector [D] of a training result.

    Raises:
        UpdateRefused: it may not be released, or cannot even be read.
    """
    try:
        return _checked(update, extras, parts, max_norm)
    except UpdateRefused:
        raise
    except Exception as error:
        raise UpdateRefused(f"the result of training cannot be read as a tensor: {type(error).__name__}") from error


def _checked(update: object, extras: Mapping[str, Tensor], parts: ReleaseLayout, max_norm: float) -> Tensor:
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
    if tuple(update.shape) != (parts.model.dimension,):
        raise UpdateRefused(f"the update must have shape ({parts.model.dimension},), got {tuple(update.shape)}")
    vector = parts.flat(torch.detach(update), extras)  # a new object of the door's, without attached attributes
    learned, others = parts.parted(vector)
    norms = {
        name: float(torch.linalg.vector_norm(part, dtype=torch.float64)) for name, part in ((None, learned), *others.items())
    }
    if not all(map(math.isfinite, norms.values())):
        kind = "NaN" if bool(vector.isnan().any()) else "infinite values"
        raise UpdateRefused(f"the update contains {kind} (a smaller learning rate or a batch_clip may help)")
    norms.pop(COUNTS, None)  # they count examples, and have a bound of their own
    norm = math.hypot(*norms.values())
    if norm > max_norm:
        raise UpdateRefused(f"the update has norm {norm:.4g}, above training.max_update_norm = {max_norm:g}")
    return vector


@dataclass(frozen=True)
class Door:
    """The only way for releases to leave a run.

    Args:
        layout: of the model's flat vector. scope: of the guarantee. run: name written into each ledger row.
        ledger: charged for each release. randomness: source of noise.
        rate: Poisson sampling rate q of clients in the aggregate view, or None if sampling is not Poisson.
        max_norm: updates above this L2 norm are refused.
        colluders: clients whose noise shares the adversary knows and can subtract; see `known`.
        extras: shape of each extra of the method's releases. memory: secret state of correlated noise.
        bits: of the grid, if they differ from those of each plan's mechanism (see `ReleaseLayout`).
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
    bits: int | None = None

    @cached_property
    def parts(self) -> ReleaseLayout:
        """Return the release layout: update and extras."""
        return ReleaseLayout(self.layout, self.extras, self.bits)

    @property
    def known_noise_terms(self) -> int:
        """Return how many noise terms of a sum the adversary knows: those of all colluders, or of the one client that it is."""
        return max(self.colluders, 1)

    def for_extra_vector(self, layout: Layout) -> Self:
        """Return a door for an extra vector of all clients under independent noise: not sampled, no extras, no memory."""
        return replace(self, layout=layout, rate=None, extras={}, memory=None)

    def admits(self, plan: Plan | Raw, client: int, round: int) -> bool:
        """Return whether the client's budget has room for an upload under this plan, without reading data."""
        if isinstance(plan, Raw):
            return self.ledger.admits(client, Unbounded(plan.reason))
        return self.ledger.admits(client, self._cost(plan, reason_of(plan), round))

    def _cost(self, plan: Plan, reason: str, round: int) -> Event:
        """Return the cost of an upload under this plan; `reason`: why nothing can be proven about it, or empty."""
        return Unbounded(reason) if reason else event_of(plan, self.layout, self.scope, rate=self.rate, round=round)

    def compile(self, plan: Plan) -> CompiledPlan:
        """Compile a plan once, for all clients that share it; the plan is copied, so that its maker cannot change it."""
        self._check_extras(plan)
        return CompiledPlan.of(plan, copied(plan), self.parts, reason_of(plan))

    def problem(self, update: object, extras: Mapping[str, Tensor]) -> str:
        """Return why a client's update and extras cannot be released as they are, for its own log; empty if they can."""
        try:
            checked(update, extras, self.parts, self.max_norm)
        except UpdateRefused as refused:
            return str(refused)
        return ""

    def upload(self, update: Tensor | None, plan: Plan | Raw, client: int, round: int, **more: Any) -> Upload:
        """Seal one client's update [d] and release it by itself; see `seal_upload` and `release_uploads`."""
        return self.release_uploads([self.seal_upload(update, plan, client, round, **more)])[0]

    def seal_upload(
        self,
        update: Tensor | None,
        plan: Plan | Raw | CompiledPlan,
        client: int,
        round: int,
        *,
        extras: Mapping[str, Tensor] | None = None,
        weight: float = 1.0,
        buffers: Tensor | None = None,
    ) -> SealedUpload:
        """Prepare one client's update [d] for the server, with its own noise and ledger row; only `release_uploads` releases it.

        Args:
            update: None if no valid one exists; it is then released as zero if the plan promises anything.
            plan: or its compiled form, if many clients share it.

        Raises:
            UpdateRefused: under a plan that promises nothing, an update that may not be released.
        """
        terms, vector, refusal = self._prepare(update, plan, extras or {})
        executed, statistics = terms.plan, free_statistics(buffers, terms.plan, terms.reason)
        released: Tensor
        if terms.exact:
            noise = self._noise(executed, client, round)
            released = torch.from_numpy(executed.mechanism.execute(self.gridded(vector, terms), noise, round, None))
        else:
            released = self._float_noised(float_clipped(vector, executed, self.parts), executed, client, round)
        return replace(self._sealed(released, terms, client, round, weight=weight, buffers=statistics), refusal=refusal)

    def sealed(
        self,
        released: Tensor,
        plan: Plan,
        client: int,
        round: int,
        *,
        reason: str,
        **more: Any,
    ) -> SealedUpload:
        """Return a release under a plan, int64 [D] on its grid or float32 [D], as an upload with its ledger row.

        Args:
            reason: why nothing can be proven about it, or empty. more: weight and buffers of the upload.
        """
        return self._sealed(released, CompiledPlan.of(plan, plan, self.parts, reason), client, round, **more)

    def _sealed(self, released: Tensor, terms: CompiledPlan, client: int, round: int, **more: Any) -> SealedUpload:
        plan = terms.plan
        if round in terms.rows:
            entry = terms.rows[round].of_client(client)
        else:
            cost = self._cost(plan, terms.reason, round)
            entry = terms.rows[round] = self._entry(plan, cost, client, round, 1, terms.reads, exact=terms.exact)
        stds = torch.tensor(per_layer(plan.noise_std, self.layout))
        update, others = self.parts.parted(released)
        upload = Upload(client, round, update, stds, terms.source, plan.support, extras=others, **more)
        return SealedUpload(self.decoded(upload, released, plan) if terms.exact else upload, entry)

    def release_uploads(self, sealed: Sequence[SealedUpload]) -> list[Upload]:
        """Release the uploads of a round together: each client's budget is checked, all rows are charged, all are returned.

        The rows are written in one transaction, so a crash leaves all of them charged, or none, and nothing released.

        Raises:
            BudgetExhausted: one of them would exceed its client's budget; nothing was charged and nothing released.
        """
        self.ledger.charge_all([one.entry for one in sealed])
        return [one.upload for one in sealed]

    def released_bits(self, upload: Upload) -> Tensor:
        """Return the exact bits that an upload releases: int64 [D] on the grid, or float32 [D] if nothing is promised."""
        floats = [upload.vector, *(part.reshape(-1) for part in upload.extras.values())]
        return torch.cat(floats) if upload.integers is None else upload.integers

    def decoded(self, upload: Upload, integers: Tensor, plan: Plan, denominator: float = 1.0) -> Upload:
        """Return the upload with vectors decoded from the released integers [D]; this is post-processing by the receiver."""
        vector = self._decoded(integers.numpy(), plan, upload.round)
        if plan.clamp is not None:
            vector[: self.layout.dimension].clamp_(-plan.clamp, plan.clamp)
        update, extras = self.parts.parted(vector if denominator == 1 else vector.div_(denominator))
        return replace(upload, integers=integers, vector=update, extras=extras)

    def mean_of(self, uploads: Sequence[Upload]) -> Upload:
        """Return the mean of uploads on the same grid, a function of their integer sum alone: post-processing."""
        first, n = uploads[0], len(uploads)
        total = self._added_up([torch.as_tensor(upload.integers) for upload in uploads], torch.int64)
        return self.decoded(replace(first, client=AGGREGATE, noise_std=first.noise_std / math.sqrt(n)), total, first.plan, n)

    def seal(
        self,
        update: Tensor | None,
        plan: Plan | Raw | CompiledPlan,
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
        terms, vector, refusal = self._prepare(update, plan, extras or {})
        executed, statistics = terms.plan, free_statistics(buffers, terms.plan, terms.reason)
        if terms.exact:
            if weight != 1:
                raise ConfigError(f"a sum with a guarantee needs a planned denominator, so all weigh 1; got the weight {weight}")
            if executed.place == "upload" and executed.clamp is not None:
                raise ConfigError("clamping noise in shares is not post-processing of the sum: leave clamp out, or noise the sum")
            integers = self.gridded(vector, terms)
            if executed.place == "upload":
                integers = executed.mechanism.execute(integers, self._noise(executed, client, round), round, None)
            sealed = torch.from_numpy(integers)
        else:
            sealed = float_clipped(vector, executed, self.parts).mul_(weight)
            if executed.place == "upload":
                sealed = self._float_noised(sealed, executed, client, round)
        source = terms.source if terms.reads else None
        return Contribution(client, terms.reads, terms.reason, weight, sealed, source, statistics, refusal)

    def release_sum(self, contributions: Sequence[Contribution], plan: Plan | Raw, round: int, denominator: float) -> Upload:
        """Release the noisy sum of a round divided by a public denominator; charged once for all clients.

        Args:
            plan: the common plan of the round, also if nobody contributed.
            denominator: planned total weight; must not depend on who failed unless the run promises nothing.
        """
        if not denominator > 0:
            raise ConfigError(f"the denominator of a mean must be > 0, got {denominator}")
        reads = contributions[0].reads if contributions else ()
        reason = contributions[0].reason if contributions else reason_of(plan)
        executed = plan if isinstance(plan, Plan) else (contributions[0].plan if contributions else None) or Plan()
        exact = on_grid(executed, reason, self.layout)
        kind = torch.int64 if exact else torch.float32
        if any(c.sealed.dtype != kind for c in contributions):
            raise ConfigError(
                "a client's contribution was made under another plan than the round's: all contributions to one sum need the "
                "plan of the round"
            )
        n = len(contributions)
        shares = n - self.known_noise_terms
        event = (
            Unbounded(reason)
            if reason
            else event_of(executed, self.layout, self.scope, rate=self.rate, noisy_uploads=shares, round=round)
        )
        total = self._added_up([c.sealed for c in contributions], kind)
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
        buffers = mean_statistics(contributions)
        if exact:
            upload = Upload(AGGREGATE, round, torch.empty(0), stds, executed, executed.support, 1.0, buffers)
            return self.decoded(upload, total, executed, denominator)
        update, extras = self.parts.parted(total / denominator)
        return Upload(AGGREGATE, round, update, stds, executed, executed.support, 1.0, buffers, extras=extras)

    def charge_skipped(self, contributions: Sequence[Contribution], plan: Plan, round: int) -> None:
        """Charge a round whose sum is not released, if noise is drawn inside training.

        Clients retain what the round taught them, such as personal models, and later releases depend on it. Other plans need no
        such charge: each of their releases is clipped and noised regardless of the past.
        """
        if isinstance(plan, LocalDpSgd):
            event = event_of(plan, self.layout, self.scope, rate=self.rate, round=round)
            self.ledger.charge_all([self._entry(plan, event, AGGREGATE, round, len(contributions), (), exact=False)])

    def charge_attempt(self, plan: Plan, members: int, round: int) -> None:
        """Charge a masked sum of clients with shares of the noise that is not used, although they have answered.

        Args:
            plan: of each client of the set. members: their number.
        """
        shares = members - self.known_noise_terms
        event = event_of(plan, self.layout, self.scope, rate=self.rate, noisy_uploads=shares, round=round)
        self.ledger.charge_all([self._entry(plan, event, AGGREGATE, round, members, (), exact=True)])

    # --- the steps ---

    def _added_up(self, vectors: Sequence[Tensor], kind: torch.dtype) -> Tensor:
        vectors = [vector for vector in vectors if len(vector)]
        if len(vectors) == 1 and kind == torch.int64:  # the only vector is the sum
            return vectors[0]
        total = torch.zeros(self.parts.dimension, dtype=kind)
        for vector in vectors:
            total += vector
        return total

    def _prepare(
        self, update: Tensor | None, plan: Plan | Raw | CompiledPlan, extras: Mapping[str, Tensor]
    ) -> tuple[CompiledPlan, Tensor, str]:
        """Return the compiled plan, the flat vector [D] to release, and the reason if it is zero."""
        if isinstance(plan, Raw):
            vector = checked(update, extras, self.parts, self.max_norm)
            made = plan.make(vector[: self.layout.dimension])
            self._check_extras(made)
            return CompiledPlan.of(made, made, self.parts, plan.reason, plan.reads), vector, ""
        self._check_extras(plan.plan if isinstance(plan, CompiledPlan) else plan)
        terms = plan if isinstance(plan, CompiledPlan) else CompiledPlan.of(plan, plan, self.parts, reason_of(plan))
        try:
            return terms, checked(update, extras, self.parts, self.max_norm), ""
        except UpdateRefused as refused:
            if not (terms.exact or isinstance(terms.plan, LocalDpSgd)):
                raise
            return terms, torch.zeros(self.parts.dimension), str(refused)

    def _check_extras(self, plan: Plan) -> None:
        needed, got = sorted(self.extras), sorted(plan.extras)
        if needed != got:
            raise ConfigError(f"the plan must give clip and noise for the extras {needed}, got {got}")

    def gridded(self, vector: Tensor, terms: CompiledPlan) -> Integers:
        """Restrict, clip and truncate [D] to integers of the plan's grid: private, before any noise."""
        (update, whole), *others = terms.clippings
        support = terms.plan.support
        first = whole.integers(vector[update] if support is None else vector[update] * support)
        return np.concatenate([first, *(clipping.integers(vector[part]) for part, clipping in others)]) if others else first

    def _noise(self, plan: Plan, client: int, round: int) -> DrawnNoise:
        return DrawnNoise(self.randomness, self.parts, plan, (round, client))

    def _decoded(self, integers: Integers, plan: Plan, round: int) -> Tensor:
        estimate = plan.mechanism.decode(integers, round, self.memory)
        return torch.from_numpy(from_grid(estimate, self.parts.grid(plan)))

    def _float_noised(self, vector: Tensor, plan: Plan, client: int, round: int) -> Tensor:
        return float_noised(vector, plan, self.parts, self.randomness, (round, client))

    def _entry(
        self, plan: Plan, event: Event, client: int, round: int, participants: int, reads: tuple[str, ...], *, exact: bool
    ) -> Entry:
        """Return the ledger's row for a release. exact: whether it consists of integers."""
        return Entry(
            run=self.run,
            round=round,
            client=client,
            unit=self.scope.unit,
            adjacency=self.scope.adjacency,
            view=self.scope.view,
            event=event,
            participants=participants,
            reads=reads,
            **row_of(plan, self.parts, exact=exact),
        )
