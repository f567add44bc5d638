"""The structural audit of one upload: which parts of it carry no noise in one world or in both.

A few releases per world are compared bit by bit. A feature (a coordinate, the pattern of what was sent, dtype, shape, a side
channel) that is constant in both worlds with different values, or a point mass in one world where the other never takes that
value, tells the worlds apart with certainty: no epsilon exists at any delta < 1. Random masks and coarse noise look constant
over few releases, so while anything looks like a leak releases are added until a chance constant anywhere has probability below
1e-6; every leak is then confirmed on fresh releases.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting.formatting import at_least
from fedveil.audit.subject import AuditedMechanism, Output
from fedveil.audit.two_world import Rates
from fedveil.errors import ConfigError

Bits = NDArray[np.int64]
Mask = NDArray[np.bool_]
FALSE_CONSTANT = 1e-6


def signature(upload: Output) -> Hashable:
    """What leaves besides numbers: dtype, shape, whether a mask is sent, names, shapes and dtypes of the extras."""
    extras = tuple(sorted((name, np.shape(value), str(np.asarray(value).dtype)) for name, value in upload.extras.items()))
    return str(upload.vector.dtype), upload.vector.shape, upload.sent is not None, extras


def features(upload: Output) -> Bits:
    """All numbers an adversary can read off an upload, as 64-bit patterns.

    Order: vector [d]; mask of what was sent [d or 0]; extras by name; number of zeros; entries sent; norm (to 4 units of the
    dtype's precision, so that a vector normalised to a fixed norm shows).
    """
    vector = upload.vector.reshape(-1).astype(np.float64)
    sent = np.empty(0) if upload.sent is None else upload.sent.astype(np.float64)
    extras = [np.asarray(upload.extras[name], dtype=np.float64).reshape(-1) for name in sorted(upload.extras)]
    kind = upload.vector.dtype
    grain = 4 * (float(np.finfo(kind).eps) if np.issubdtype(kind, np.floating) else 1e-15)
    norm = float(np.linalg.norm(vector))
    coarse = round(np.log(norm) / grain) if norm > 0 and np.isfinite(norm) else norm
    tail = np.array([np.count_nonzero(vector == 0), sent.sum() if upload.sent is not None else vector.size, coarse])
    return np.concatenate([vector, sent, *extras, tail]).view(np.int64)


@dataclass
class _World:
    """What was seen of one world: its first release, which features kept that value, which ever took the other world's."""

    first: Bits
    other: Bits
    same: NDArray[np.int64]
    met: NDArray[np.int64]
    n: int = 0

    def add(self, seen: Bits) -> None:
        self.n += 1
        self.same += seen == self.first
        self.met += seen == self.other

    @property
    def constant(self) -> NDArray[np.bool_]:
        return np.asarray(self.same == self.n)

    def chance(self) -> float:
        """Bound on the chance that a random feature still looks constant: features with ties x (their largest tie rate)^n."""
        ties = self.same[(self.same > 1) & (self.same < self.n)]
        return float(ties.size * (ties.max() / self.n) ** self.n) if ties.size else 0.0


@dataclass(frozen=True)
class Structural:
    """The verdict of the structural audit.

    leak: whether a leak was found and confirmed. deterministic: coordinates constant in both worlds, equal or not.
    different: features constant in both worlds with different values. point_mass: features constant in one world only, at a value
    the other never took. kind: the signatures of the worlds, if they differ. releases: per world, to find; confirmed: error
    counts of the test "the leaking features take their value" on fresh releases. chance: bound on a chance constant.
    """

    leak: bool
    deterministic: int
    different: int
    point_mass: int
    kind: str
    releases: int
    confirmed: Rates | None
    chance: float

    @property
    def floor(self) -> float:
        """The epsilon (delta = 0) that the confirming counts alone show at 95 % confidence."""
        return self.confirmed.epsilon(0.0) if self.confirmed else 0.0

    def __str__(self) -> str:
        if not self.leak:
            return f"no structural leak in {self.releases} releases per world ({self.deterministic} constant coordinates)"
        parts = [f"{self.different} features constant with different values"] if self.different else []
        parts += [f"{self.point_mass} point masses in one world only"] if self.point_mass else []
        parts += [self.kind] if self.kind else []
        by_counts = f"by the counts alone epsilon >= {at_least(self.floor)}"
        return f"structural leak: {', '.join(parts)}; {self.deterministic} deterministic coordinates; {by_counts}"


def structural(
    mechanism: AuditedMechanism, rng: np.random.Generator, *, releases: int = 8, most: int = 4096, confirm: int = 1000
) -> Structural:
    """Look for parts of an upload that carry no noise.

    Args:
        mechanism: between two neighbouring worlds.
        rng: source of all randomness.
        releases: per world to start with, >= 2; doubled while something looks constant and may do so by a chance above 1e-6.
        most: releases per world at which doubling stops.
        confirm: fresh releases per world on which a leak is confirmed, >= 1.
    """
    if releases < 2 or most < releases or confirm < 1:
        raise ConfigError(f"need 2 <= releases <= most and confirm >= 1, got {releases}, {most}, {confirm}")
    drawn = [[mechanism(world, rng) for _ in range(releases)] for world in (0, 1)]
    kinds = [{signature(upload) for upload in uploads} for uploads in drawn]
    if kinds[0].isdisjoint(kinds[1]):
        counts = _confirm_kind(mechanism, kinds, confirm, rng)
        return Structural(
            counts.fp + counts.fn == 0,
            0,
            0,
            0,
            f"dtype, shape or names differ: {kinds[0]} against {kinds[1]}",
            releases,
            counts,
            0.0,
        )
    if len(kinds[0] | kinds[1]) > 1:
        return Structural(False, 0, 0, 0, "", releases, None, 0.0)
    first = [features(uploads[0]) for uploads in drawn]
    zero = np.zeros_like(first[0])
    worlds = [_World(first[w], first[1 - w], zero.copy(), zero.copy()) for w in (0, 1)]
    for seen, uploads in zip(worlds, drawn, strict=True):
        for upload in uploads:
            seen.add(features(upload))
    while any(map(np.any, _suspects(*worlds))) and max(seen.chance() for seen in worlds) >= FALSE_CONSTANT and worlds[0].n < most:
        more = min(worlds[0].n, most - worlds[0].n)
        for world, seen in enumerate(worlds):
            for _ in range(more):
                seen.add(features(mechanism(world, rng)))
    return _compare(mechanism, worlds[0], worlds[1], drawn[0][0].vector.size, confirm, rng)


def _suspects(a: _World, b: _World) -> tuple[Mask, Mask, Mask]:
    """Features constant in both worlds with different values, and in one only, at a value the other never took.

    More releases never add a suspect, so where there is none they are not needed.
    """
    both = a.constant & b.constant & (a.first != b.first)
    only_a = a.constant & ~b.constant & (b.met == 0)
    only_b = b.constant & ~a.constant & (a.met == 0)
    return both, only_a, only_b


def _compare(mechanism: AuditedMechanism, a: _World, b: _World, d: int, confirm: int, rng: np.random.Generator) -> Structural:
    both, only_a, only_b = _suspects(a, b)
    chance = max(a.chance(), b.chance())
    deterministic = int(np.sum((a.constant & b.constant)[:d]))
    if not (both.any() or only_a.any() or only_b.any()):
        return Structural(False, deterministic, 0, 0, "", a.n, None, chance)
    alive, counts = _confirm(mechanism, a, b, (both, only_a, only_b), confirm, rng)
    different, point_mass = int(np.sum(alive & both)), int(np.sum(alive & ~both))
    return Structural(counts.fp + counts.fn == 0, deterministic, different, point_mass, "", a.n, counts, chance)


def _confirm_kind(mechanism: AuditedMechanism, kinds: list[set[Hashable]], n: int, rng: np.random.Generator) -> Rates:
    errors = [sum(signature(mechanism(world, rng)) not in kinds[world] for _ in range(n)) for world in (0, 1)]
    return Rates(errors[0], n, errors[1], n)


def _confirm(
    mechanism: AuditedMechanism, a: _World, b: _World, leaks: tuple[Mask, Mask, Mask], n: int, rng: np.random.Generator
) -> tuple[Mask, Rates]:
    """Which leaking features never err on fresh releases, and the errors of the first of them, fixed beforehand."""
    both, only_a, only_b = leaks
    alive = np.asarray(both | only_a | only_b)
    chosen = int(np.flatnonzero(both if both.any() else alive)[0])
    errors = [0, 0]
    for world in (0, 1):
        for _ in range(n):
            seen = features(mechanism(world, rng))
            says_a = np.where(only_b, seen != b.first, seen == a.first)
            wrong = says_a if world else ~says_a
            errors[world] += int(wrong[chosen])
            alive = alive & ~wrong
    return alive, Rates(errors[0], n, errors[1], n)
