"""The door of a replay: it records each release, measures private contributions, and returns the releases of the first run.

So everything after a release is the same in both worlds, unless it reads private data in another way. DP-SGD releases in each
step of local training; there the gradient source is recorded and replayed in the same way.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from scipy.stats import binom

from fedveil.attacks.replay_record import Diary, RecordedLedger, RecordedRandomness
from fedveil.errors import FedveilError
from fedveil.mechanism.cost import promises, step_exponent, step_sensitivity
from fedveil.mechanism.mechanisms import Independent
from fedveil.mechanism.plan import Extra, LocalDpSgd, Plan, Raw, Upload
from fedveil.release.door import CompiledPlan, Door
from fedveil.release.dpsgd import PerExampleGradient, counts_exponent
from fedveil.release.sealed import AGGREGATE, Contribution, SealedUpload

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.accounting.types import Adjacency
    from fedveil.release.noise import Randomness
    from fedveil.training.local import GradientSource, Local
    from fedveil.training.params import Layout


if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.mechanism.plan import Plan
    from fedveil.release.release_layout import ReleaseLayout

    Integers = NDArray[np.int64]

_CHANCE = 1e-6
"""Batch sizes with a smaller probability than this count as not drawn by Poisson sampling."""

_HALF = 27


@dataclass(frozen=True)
class Measured:
    """The exact integers of one contribution before its noise, and the bounds that its plan declares.

    Args:
        integers: [D]. parts: (name, start, stop, exponent of the grid step, bound on the L2 norm) of groups of coordinates.
        whole: bound on the first `dimension` coordinates together.
    """

    integers: Integers
    parts: tuple[tuple[str, int, int, int, float], ...]
    whole: float
    dimension: int

    def problem(self, factor: int = 1) -> str:
        """Return which norm exceeds `factor` times its bound; an empty string if none does."""
        total = Fraction(0)
        for name, start, stop, exponent, bound in self.parts:
            square = power(self.integers[start:stop]) * Fraction(4) ** exponent
            if stop <= self.dimension:
                total += square
            if problem := _above(name, square, factor * bound):
                return problem
        return _above("the whole", total, factor * self.whole)

    def less(self, other: Measured) -> Measured:
        """Return the difference of this and `other`."""
        return replace(self, integers=self.integers - other.integers)


def measured(integers: Integers, plan: Plan, parts: ReleaseLayout) -> Measured:
    """Return the integers of an update and its extras, with the bounds of the plan."""
    grid = [(group, k + plan.mechanism.shift) for group, k in parts.grid(plan)]
    names = [f"extra {name}" for name in parts.extras]
    layers = len(grid) - len(names)
    names = [*(parts.model.names if layers > 1 else ("update",)), *names]
    bounds = [clip for _, _, clip in parts.groups(plan)]
    groups = tuple((n, g.start, g.stop, k, clip) for n, (g, k), clip in zip(names, grid, bounds, strict=True))
    return Measured(integers, groups, plan.clip, parts.model.dimension)


def power(integers: Integers) -> int:
    """Return the exact sum of squares of integers [n]."""
    if integers.size and int(np.abs(integers).max()) >= 2 ** (2 * _HALF):
        return sum(int(v) ** 2 for v in integers)
    high, low = integers >> _HALF, integers & (2**_HALF - 1)
    sums = [_blockwise(a * b) for a, b in ((high, high), (high, low), (low, low))]
    return (sums[0] << 2 * _HALF) + (sums[1] << (_HALF + 1)) + sums[2]


def _planned_stds(plan: Plan, parts: ReleaseLayout) -> NDArray[np.float64]:
    """Return the planned noise std of each coordinate [D], in units of the release."""
    sizes = [group.stop - group.start for group, _, _ in parts.groups(plan)]
    stds = np.repeat(np.array([std for _, std, _ in parts.groups(plan)]), sizes)
    if plan.support is not None:
        stds[: parts.model.dimension] *= plan.support.numpy()
    return stds


def not_drawn_by_poisson(batches: Sequence[tuple[int, float, int]]) -> str:
    """Return why batches of (examples of the client, rate, examples in it) are not independent Poisson draws, or ''."""
    if not batches:
        return ""
    furthest = max(abs(size - n * rate) for n, rate, size in batches)
    spans = ((n, rate, n * rate - furthest - 1e-9, n * rate + furthest + 1e-9) for n, rate, _ in batches)
    chances = [binom.cdf(math.floor(hi), n, rate) - binom.cdf(math.ceil(lo) - 1, n, rate) for n, rate, lo, hi in spans]
    if math.prod(chances) >= _CHANCE:
        return ""
    sizes = sorted({size for _, _, size in batches})
    return f"{len(batches)} batches of {sizes[0]} to {sizes[-1]} examples: Poisson batches would differ more in size"


def _blockwise(products: Integers) -> int:
    blocks: Any = np.add.reduceat(products, np.arange(0, len(products), 256)) if len(products) else []
    return sum(map(int, blocks))


def _above(name: str, square: Fraction, bound: float) -> str:
    if math.isinf(bound) or square <= Fraction(bound) ** 2:
        return ""
    return f"{name} has norm {math.sqrt(square):.9g}, above the declared {bound:.9g}"


Releases = Mapping[tuple[int, ...], Any]
"""The releases of the first world: uploads by (round, client), noisy gradients by (round, client, step), counts by -1 - step."""

PLANS = "plans"
UPLOADS = "uploads and sums, but for their numbers"
WEIGHTS = "weights and denominators"
POST_PROCESSED = "updates made of noisy steps"
NOISE = "noise"
DRAWN = "noise as planned, drawn once and afresh"
CLIPPED = "contributions within their clips"
ADDED = "sums hold the contributions and their noise, nothing else"
SENSITIVITY = "contributions of the two worlds within the sensitivity"
BATCHES = "batches drawn as the accountant counts them"


@dataclass(frozen=True, kw_only=True)
class ReplayDoor(Door):
    """The door of one world. first: the releases of the first world; empty in the first world itself."""

    own: Door
    noise: RecordedRandomness
    diary: Diary
    first: Releases

    @classmethod
    def of(cls, door: Door, diary: Diary, first: Releases) -> ReplayDoor:
        """Return a recording copy of a door of any class."""
        noise = RecordedRandomness(door.randomness)
        own = replace(door, randomness=cast("Randomness", noise), ledger=RecordedLedger(door.ledger, diary))
        return cls(**{f.name: getattr(own, f.name) for f in fields(Door)}, own=own, noise=noise, diary=diary, first=first)

    def for_extra_vector(self, layout: Layout) -> Self:
        return replace(super().for_extra_vector(layout), own=self.own.for_extra_vector(layout))

    def seal_upload(
        self, update: Tensor | None, plan: Plan | Raw | CompiledPlan, client: int, round: int, **more: Any
    ) -> SealedUpload:
        """Record the release of the door; return it, or that of the first world."""
        plan = plan.source if isinstance(plan, CompiledPlan) else plan
        call = lambda: self.own.seal_upload(update, plan, client, round, **more)  # noqa: E731
        sealed: SealedUpload = self._released(call, plan, client, round)
        sent = sealed.upload
        self._note(UPLOADS, sent, {**vars(sent), "vector": _form(sent.vector), "integers": _form(sent.integers), "extras": None})
        self._note(WEIGHTS, sent, more.get("weight", 1.0))
        self._record_release(sent.vector if sent.integers is None else sent.integers, sent.plan, client, round, noisy=True)
        return replace(sealed, upload=self._replayed(sent))

    def release_uploads(self, sealed: Sequence[SealedUpload]) -> list[Upload]:
        return self.own.release_uploads(sealed)

    def seal(self, update: Tensor | None, plan: Plan | Raw | CompiledPlan, client: int, round: int, **more: Any) -> Contribution:
        plan = plan.source if isinstance(plan, CompiledPlan) else plan
        sealed: Contribution = self._released(lambda: self.own.seal(update, plan, client, round, **more), plan, client, round)
        self.diary.note("public", WEIGHTS, round, client, sealed.weight)
        executed = plan if isinstance(plan, Plan) else sealed.plan
        assert executed is not None
        self._record_release(sealed.sealed, executed, client, round, noisy=executed.place == "upload")
        return sealed

    def release_sum(self, contributions: Sequence[Contribution], plan: Plan | Raw, round: int, denominator: float) -> Upload:
        """Record the release of the door; return it, or that of the first world."""
        self.diary.note("public", WEIGHTS, round, AGGREGATE, ([c.client for c in contributions], denominator))
        call = lambda: self.own.release_sum(contributions, plan, round, denominator)  # noqa: E731
        sent: Upload = self._released(call, plan, AGGREGATE, round)
        self._note(UPLOADS, sent, {**vars(sent), "vector": _form(sent.vector), "integers": _form(sent.integers), "extras": None})
        if sent.integers is not None and isinstance(sent.plan.mechanism, Independent):
            noise = self._drawn(sent.plan, AGGREGATE, round, noisy=sent.plan.place == "sum")
            expected = noise + sum(c.sealed.numpy() for c in contributions if len(c.sealed))
            odd = int((sent.integers.numpy() != expected).sum())
            self.diary.verdict(ADDED, round, AGGREGATE, f"{odd} of {len(noise)} numbers are something else" if odd else "")
        return self._replayed(sent)

    # --- the steps ---

    def _released(self, release: Callable[[], Any], plan: Plan | Raw, client: int, round: int) -> Any:
        """Return the release of the door, and record publicly if it refuses."""
        self.noise.drawn.clear()
        self.diary.note("public", PLANS, round, client, plan if isinstance(plan, Plan) else (plan.reads, plan.reason))
        try:
            return release()
        except FedveilError as refused:
            self.diary.note("public", UPLOADS, round, client, f"nothing: {type(refused).__name__}")
            raise

    def _record_release(self, sent: Tensor, plan: Plan, client: int, round: int, *, noisy: bool) -> None:
        """Record the release of a client: exact integers before noise, or a float vector computed from noisy steps only."""
        if sent.dtype != torch.int64:
            self.diary.note("public", POST_PROCESSED, round, client, sent if isinstance(plan, LocalDpSgd) else None)
            return
        contribution = measured(sent.numpy() - self._drawn(plan, client, round, noisy=noisy), plan, self.parts)
        self.diary.verdict(CLIPPED, round, client, contribution.problem())
        self.diary.note("private", SENSITIVITY, round, client, contribution)

    def _drawn(self, plan: Plan, client: int, round: int, *, noisy: bool) -> NDArray[np.int64]:
        """Return the noise of this release [D] after checking it against the plan."""
        wanted = _planned_stds(plan, self.parts) if noisy else np.zeros(self.parts.dimension)
        steps = np.repeat([2.0**k for _, k in self.parts.grid(plan)], [g.stop - g.start for g, _ in self.parts.grid(plan)])
        problem = _unlike_plan(self.noise.drawn, wanted / steps) if promises(plan, self.layout) else ""
        self.diary.verdict(DRAWN, round, client, problem)
        _note_noise(self.diary, round, client, self.noise.drawn)
        return sum((noise for _, noise in self.noise.drawn), np.zeros(self.parts.dimension, dtype=np.int64))

    def _note(self, check: str, sent: Upload, value: Any) -> None:
        self.diary.note("public", check, sent.round, sent.client, value)

    def _replayed(self, sent: Upload) -> Upload:
        self.diary.note("release", "", sent.round, sent.client, ((sent.round, sent.client), sent))
        found: Upload = self.first.get((sent.round, sent.client), sent)
        return found


class _RecordedGradient:
    """The gradient source of DP-SGD; each noisy sum is recorded, or replaced by that of the first world."""

    def __init__(self, own: PerExampleGradient, adjacency: Adjacency, diary: Diary, first: Releases) -> None:
        self.noise, self.diary, self.first, self.adjacency = RecordedRandomness(own.randomness), diary, first, adjacency
        self.own = replace(own, randomness=cast("Randomness", self.noise))

    def __getattr__(self, name: str) -> Any:
        if name == "own":
            raise AttributeError(name)
        return getattr(self.own, name)

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        self._held = len(y)
        return self.own.batches(local, x, y)

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the source; the sum is exact in float64 and rounded afterwards."""
        (round, client), plan, model = self.own.key, self.own.plan, local.model
        self.noise.drawn.clear()
        size, grad = self.own.waiting, model.grad
        model.grad = torch.empty(len(grad), dtype=torch.float64)
        try:
            loss = self.own(local, x, y)
            wide = model.grad
        finally:
            model.grad = grad
        model.grad.copy_(wide)
        std = plan.noise_multiplier * plan.clip
        exponent = step_exponent(plan)
        wanted = np.full(len(grad), std * 2.0**-exponent)
        self.diary.verdict(DRAWN, round, client, _unlike_plan(self.noise.drawn, wanted))
        _note_noise(self.diary, round, client, self.noise.drawn)
        total = np.rint((wide * plan.expected).numpy() * 2.0**-exponent).astype(np.int64)
        total -= sum((noise for _, noise in self.noise.drawn), np.zeros_like(total))
        whole = ("the sum of a step", 0, len(grad), exponent, float("inf"))
        step = Measured(total, (whole,), step_sensitivity(plan, len(grad), self.adjacency), len(grad))
        self.diary.note("private", SENSITIVITY, round, client, step)
        self.diary.note("private", BATCHES, round, client, (self._held, plan.rate, size))
        key = (round, client, local.step)
        self.diary.note("release", "", round, client, (key, grad.clone()))
        if key in self.first:
            grad.copy_(self.first[key])
        return loss

    def count(self, cells: Tensor, extra: Extra, step: int) -> NDArray[np.int64]:
        """Return the counts of the source, or those of the first world."""
        (round, client), exponent = self.own.key, counts_exponent(extra)
        self.noise.drawn.clear()
        released = self.own.count(cells, extra, step)
        wanted = np.full(len(released), extra.noise_std * 2.0**-exponent)
        self.diary.verdict(DRAWN, round, client, _unlike_plan(self.noise.drawn, wanted))
        _note_noise(self.diary, round, client, self.noise.drawn)
        total = released - sum((noise for _, noise in self.noise.drawn), np.zeros_like(released))
        whole = ("the counts of a step", 0, len(total), exponent, float("inf"))
        counts = Measured(total, (whole,), self.adjacency.factor * extra.clip, len(total))
        self.diary.note("private", SENSITIVITY, round, client, counts)
        self.diary.note("private", BATCHES, round, client, (len(cells), self.own.plan.rate, self.own.joined))
        key = (round, client, -1 - step)
        self.diary.note("release", "", round, client, (key, released))
        return cast("NDArray[np.int64]", self.first.get(key, released))


def recorded_source(source: GradientSource, adjacency: Adjacency, diary: Diary, first: Releases) -> GradientSource:
    """Return the gradient source, recorded if its gradients are releases."""
    return _RecordedGradient(source, adjacency, diary, first) if isinstance(source, PerExampleGradient) else source


def _unlike_plan(drawn: Sequence[tuple[NDArray[np.float64], NDArray[np.int64]]], wanted: NDArray[np.float64]) -> str:
    """Return how the drawn noise differs from the planned std of each coordinate (in grid steps), or ''."""
    stds = [std for std, _ in drawn if std.any()]
    if len(stds) != int(bool(wanted.any())):
        return f"noise was drawn {len(stds)} times, and the plan asks for {int(bool(wanted.any()))}"
    if not stds:
        return ""
    (std,) = stds
    if len(std) != len(wanted):
        return f"noise was drawn for {len(std)} coordinates, and the plan sends {len(wanted)}"
    odd = np.flatnonzero(std != wanted)
    return f"noise on coordinate {odd[0]} has std {std[odd[0]]:g} grid steps, planned are {wanted[odd[0]]:g}" if len(odd) else ""


def _note_noise(diary: Diary, round: int, client: int, drawn: Sequence[tuple[NDArray[np.float64], NDArray[np.int64]]]) -> None:
    digests = [hashlib.sha256(noise.tobytes()).hexdigest() for std, noise in drawn if std.any()]
    diary.note("public", NOISE, round, client, digests)


def _form(value: Tensor | None) -> Any:
    return None if value is None else (str(value.dtype), tuple(value.shape))
