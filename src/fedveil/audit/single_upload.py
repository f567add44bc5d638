"""Audit of a single upload: its structure, two statistical tests, and a recomputation of the noise.

A few releases per world are compared bit by bit. A feature is a coordinate, the pattern of what was sent, a dtype, a shape or a
side channel. If a feature is constant in both worlds with different values, or has a point mass in one world at a value that the
other never takes, it distinguishes the worlds with certainty: no epsilon exists at any delta < 1. Random masks and coarse noise
look constant over few releases. So while anything looks like a leak, releases are added until a chance constant anywhere has
probability below 1e-6; every leak is then confirmed on fresh releases.

The scores use the KNOWN means and noise of the mechanism, since the auditor has both inputs: a variance estimated from a few
pilot uploads has no power in 1000 dimensions. Thresholds come from pilot releases that are not tested.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtr, chdtri

from fedveil.accounting.types import Audit, at_least
from fedveil.audit.subject import AuditedMechanism, Output, Subject, check_level, epsilon_ceiling, epsilon_of_mu
from fedveil.audit.two_world import Rates, audit_dp, audit_gdp, audit_sampled, choose_cut, choose_threshold, midpoint, rates
from fedveil.errors import ConfigError

Bits = NDArray[np.int64]
Mask = NDArray[np.bool_]
FALSE_CONSTANT = 1e-6


def signature(upload: Output) -> Hashable:
    """Return the non-numeric parts of an upload: dtype, shape, whether a mask is sent; names, shapes and dtypes of the extras."""
    extras = tuple(sorted((name, np.shape(value), str(np.asarray(value).dtype)) for name, value in upload.extras.items()))
    return str(upload.vector.dtype), upload.vector.shape, upload.sent is not None, extras


def features(upload: Output) -> Bits:
    """Return all numbers that an adversary can read off an upload, as 64-bit patterns.

    Order: vector [d]; mask of what was sent [d or 0]; extras by name; number of zeros; entries sent; norm (to 4 units of the
    dtype's precision, so that a vector normalised to a fixed norm is detected).
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
    """Observations of one world: its first release, and per feature the counts of that value and of the other world's value."""

    first: Bits
    other: Bits
    same: NDArray[np.int64]
    met: NDArray[np.int64]
    n: int = 0

    def add(self, values: Bits) -> None:
        self.n += 1
        self.same += values == self.first
        self.met += values == self.other

    @property
    def constant(self) -> NDArray[np.bool_]:
        return np.asarray(self.same == self.n)

    def chance(self) -> float:
        """Bound the chance that a random feature still looks constant: features with ties x (their largest tie rate)^n."""
        ties = self.same[(self.same > 1) & (self.same < self.n)]
        return float(ties.size * (ties.max() / self.n) ** self.n) if ties.size else 0.0


@dataclass(frozen=True)
class Structural:
    """Result of the structural audit.

    leak: whether a leak was detected and confirmed. deterministic: coordinates constant in both worlds, equal or not.
    different: features constant in both worlds with different values. point_mass: features constant in one world only, at a value
    that the other never took. kind: the signatures of the worlds, if they differ. releases: per world, before confirmation;
    confirmed: error counts of the test "the leaking features take their value" on fresh releases. chance: bound on a chance
    constant.
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
        """Return the epsilon (delta = 0) that the confirming counts alone show at 95 % confidence."""
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
    """Test an upload for parts without noise.

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
    for record, uploads in zip(worlds, drawn, strict=True):
        for upload in uploads:
            record.add(features(upload))
    while any(map(np.any, _suspects(*worlds))) and max(one.chance() for one in worlds) >= FALSE_CONSTANT and worlds[0].n < most:
        more = min(worlds[0].n, most - worlds[0].n)
        for world, record in enumerate(worlds):
            for _ in range(more):
                record.add(features(mechanism(world, rng)))
    return _compare(mechanism, worlds[0], worlds[1], drawn[0][0].vector.size, confirm, rng)


def _suspects(a: _World, b: _World) -> tuple[Mask, Mask, Mask]:
    """Return the features constant in both worlds with different values, and in one only, at a value the other never took.

    More releases never add a suspect, so without suspects no more are needed.
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
    """Return which leaking features never err on fresh releases, and the errors of the first, which is fixed beforehand."""
    both, only_a, only_b = leaks
    alive = np.asarray(both | only_a | only_b)
    chosen = int(np.flatnonzero(both if both.any() else alive)[0])
    errors = [0, 0]
    for world in (0, 1):
        for _ in range(n):
            values = features(mechanism(world, rng))
            says_a = np.where(only_b, values != b.first, values == a.first)
            wrong = says_a if world else ~says_a
            errors[world] += int(wrong[chosen])
            alive = alive & ~wrong
    return alive, Rates(errors[0], n, errors[1], n)


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LayerNoise:
    """Noise of one layer: the declared std (rms over its coordinates), the measured one, and one-sided p-values.

    p_low is small if the noise is less than declared (a privacy fault), p_high if it is more (a waste). `upper` is an upper
    confidence bound on measured / declared.
    """

    layer: str
    declared: float
    measured: float
    p_low: float
    p_high: float
    upper: float


def layer_noise(subject: Subject, uploads: Sequence[Floats] | Floats, alpha: float = 0.05, *, world: int = 0) -> list[LayerNoise]:
    """Compare the noise in uploads of one world with the std that the accountant was given, layer by layer.

    Args:
        subject: has the noiseless upload, the declared std per coordinate and the layers.
        uploads: [n, d] released vectors of `world`.
        alpha: error probability over all layers together (Bonferroni).
        world: 0 or 1.

    Layers without declared noise are omitted (the structural audit covers them).
    """
    noise = np.asarray(uploads, dtype=np.float64) - subject.mean[world]
    if noise.ndim != 2 or noise.shape[0] < 1:
        raise ConfigError(f"uploads must be [n, d] with n >= 1, got shape {noise.shape}")
    declared = subject.noise_std[world]
    layers = {name: part for name, part in subject.named_layers.items() if np.any(declared[part] > 0)}
    return [_one(name, noise[:, part], declared[part], check_level(alpha) / len(layers)) for name, part in layers.items()]


def _one(name: str, noise: Floats, declared: Floats, alpha: float) -> LayerNoise:
    noisy = declared > 0
    z = noise[:, noisy] / declared[noisy]
    total, degrees = float(np.sum(z * z)), z.size
    rms = float(np.sqrt(np.mean(declared[noisy] ** 2)))
    low = float(chdtr(degrees, total))
    upper = float(np.sqrt(total / chdtri(degrees, 1 - alpha)))
    return LayerNoise(name, rms, rms * float(np.sqrt(total / degrees)), low, 1 - low, upper)


def audit_noise(subject: Subject, uploads: Sequence[Floats] | Floats, delta: float, alpha: float = 0.05) -> Audit:
    """Return a lower bound on epsilon from the measured noise: mu >= gap of the worlds / (declared std x `upper`), squares added.

    This assumes independent Gaussian noise of the declared shape inside each layer. It uses all coordinates of all uploads, and
    so is far sharper than a threshold test. Where the assumption may fail, read it as a check of the implementation.
    """
    by_layer = {row.layer: row for row in layer_noise(subject, uploads, alpha)}
    gap, declared = subject.mean[1] - subject.mean[0], subject.noise_std[0]
    total = 0.0
    for name, row in by_layer.items():
        part = subject.named_layers[name]
        noisy = declared[part] > 0
        total += float(np.sum((gap[part][noisy] / (declared[part][noisy] * row.upper)) ** 2))
    worst = min(by_layer.values(), key=lambda row: row.measured / row.declared)
    ratio = worst.measured / worst.declared
    note = f"assumes independent Gaussian noise; smallest ratio to the declared std: {ratio:.4g} ({worst.layer})"
    n = int(np.asarray(uploads).shape[0])
    return Audit(
        epsilon_of_mu(float(np.sqrt(total)), delta),
        delta,
        subject.scope,
        "recomputed noise, chi-squared",
        1 - alpha,
        n,
        note=note,
    )


_FLOOR = 1e-9  # std given to a noiseless coordinate, relative to the largest std
_ENTRIES = 4_000_000  # numbers held at once


@dataclass(frozen=True)
class SingleUpload:
    """All results for one upload.

    structure: result of the structural audit. headline: the bound to report, chosen beforehand by the kind of mechanism and not
    by its value. tests: all tests, each at its own confidence.
    """

    structure: Structural
    headline: Audit
    tests: tuple[Audit, ...]


def log_likelihood_ratio(subject: Subject, uploads: Floats) -> Floats:
    """Return each upload's log density in world 1 minus that in world 0, for independent Gaussian noise of the known std.

    Args:
        subject: known means and stds.
        uploads: [n, d].

    Coordinates without noise get a tiny std, so that they decide the score. Subjects with other noise are still tested soundly:
    any score is allowed, only the power suffers. If the unit is in the release by chance, the mixtures' ratio rises with this
    one, for opposite means and for zero against one, so thresholds on either are the same tests.
    """
    top = max(float(np.max(std)) for std in subject.noise_std)
    floor = _FLOOR * top if top > 0 else _FLOOR
    std_0, std_1 = (np.maximum(std, floor) for std in subject.noise_std)
    if np.array_equal(std_0, std_1):
        weight = (subject.mean[1] - subject.mean[0]) / std_0**2
        return np.asarray((uploads - (subject.mean[0] + subject.mean[1]) / 2) @ weight)
    z_0, z_1 = (uploads - subject.mean[0]) / std_0, (uploads - subject.mean[1]) / std_1
    return np.asarray(0.5 * (np.sum(z_0**2, axis=1) - np.sum(z_1**2, axis=1)) + np.sum(np.log(std_0 / std_1)))


def largest_deviation(subject: Subject, uploads: Floats) -> Floats:
    """Return max over coordinates of |upload - mean of world 0|: detects noise of bounded support, which a neighbour can leave.

    Args:
        subject: known means.
        uploads: [n, d].
    """
    return np.asarray(np.max(np.abs(uploads - subject.mean[0]), axis=1))


def releases(subject: Subject, world: int, n: int, rng: np.random.Generator) -> Floats:
    """Return the vectors of n fresh uploads of one world, [n, d] in float64."""
    out = np.empty((n, subject.d))
    for row in out:
        vector = subject.mechanism(world, rng).vector
        if vector.size != subject.d:
            raise ConfigError(f"{subject.name}: an upload has {vector.size} coordinates, the subject {subject.d}")
        row[:] = vector.reshape(-1)
    return out


def _rows(subject: Subject) -> int:
    """Return how many uploads to process at once."""
    return max(1, _ENTRIES // subject.d)


def _scores(subject: Subject, world: int, n: int, rng: np.random.Generator) -> Floats:
    """Return [2, n]: log-likelihood ratio and largest deviation of n fresh uploads, computed in blocks."""
    blocks = []
    for start in range(0, n, _rows(subject)):
        uploads = releases(subject, world, min(_rows(subject), n - start), rng)
        blocks.append([log_likelihood_ratio(subject, uploads), largest_deviation(subject, uploads)])
    return np.concatenate(blocks, axis=1)


def single_upload(
    subject: Subject,
    rng: np.random.Generator,
    *,
    n: int = 1000,
    pilot: int = 500,
    delta: float = 1e-5,
    alpha: float = 0.05,
) -> SingleUpload:
    """Audit one upload of a mechanism between two neighbouring inputs.

    Args:
        subject: the mechanism, its scope and what is known about it.
        rng: source of all randomness.
        n: tested releases per world, and releases that confirm a structural leak.
        pilot: separate releases per world that choose the thresholds.
        delta: in (0, 1).
        alpha: error probability of each test.

    The headline is inf for a confirmed structural leak; else the Gaussian DP test if the subject's curve is Gaussian, or
    that of a sampled Gaussian; else the largest-deviation (bounded) or the likelihood-ratio test with Clopper-Pearson.
    """
    check_level(alpha)
    if n < 1 or pilot < 1:
        raise ConfigError(f"n and pilot must be >= 1, got {n} and {pilot}")
    structure = structural(subject.present or subject.mechanism, rng, confirm=n)
    pilots = [_scores(subject, world, pilot, rng) for world in (0, 1)]
    fresh = [_scores(subject, world, n, rng) for world in (0, 1)]

    scope = subject.scope
    ceiling = f"ceiling {epsilon_ceiling(n, alpha, delta):.2f}"
    tests = []
    for row, test in enumerate(("likelihood ratio", "largest deviation")[: 1 + subject.bounded]):
        threshold = choose_threshold(pilots[0][row], pilots[1][row], n, delta, alpha)
        counts = rates(fresh[0][row], fresh[1][row], threshold)
        tests.append(audit_dp(counts, delta, scope, alpha, note=ceiling, test=f"one upload, {test}"))
    if subject.gaussian:
        counts = rates(fresh[0][0], fresh[1][0], midpoint(pilots[0][0], pilots[1][0]))
        tests.append(audit_gdp(counts, delta, scope, alpha, test="one upload, likelihood ratio"))
    if subject.sampled is not None:
        cut = choose_cut([pilots[0][0], pilots[1][0]], subject.sampled, n, delta, scope.adjacency, alpha)
        counts = rates(fresh[0][0], fresh[1][0], cut)
        tests.append(audit_sampled(counts, subject.sampled, delta, scope, alpha, test="one upload, likelihood ratio"))
    headline = tests[-1]
    if subject.gaussian:
        tests.append(audit_noise(subject, releases(subject, 0, min(n, _rows(subject)), rng), delta, alpha))
    if structure.leak and delta < subject.rate:
        assert structure.confirmed is not None
        note = f"{structure}; confirmed in {n} + {n} releases, which alone show {at_least(structure.floor, 3)} at 95 % confidence"
        headline = Audit(float("inf"), delta, scope, "one upload, structural", 1 - FALSE_CONSTANT, 2 * n, note=note)
    return SingleUpload(structure, headline, tuple(tests))
