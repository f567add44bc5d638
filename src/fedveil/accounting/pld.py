"""Privacy loss distributions: numerically tight composition, always an upper bound.

A pair of output distributions (P, Q) is represented by the law under P of the loss ln(P/Q), placed on a grid of losses by
connecting the dots: the mass of an interval between two grid losses moves to its two ends so that its mass under P and under Q
stays the same. The resulting pair dominates the original one at every epsilon (Doroshenko et al. 2022, Algorithm 1), so its
composition (a convolution by FFT) gives an upper bound. The mass at infinity includes all loss by truncation and rounding.

Three adjacencies (sensitivity = 1 in units where the noise std is z):
- zero-out: both directions of ((1-q) N(0) + q N(1), N(0)), composed separately; the worse one counts.
- replace-one: sensitivity 1 = 2C. Opposite contributions are the worst at every epsilon (docs/privacy.md, "Poisson sampling and
  replace-one"), so ((1-q) N(0) + q N(1/2), (1-q) N(0) + q N(-1/2)) dominates.
- unknown: the remove curve in BOTH directions, which covers the other two.
The last two are symmetric: P(-loss) = e^-loss P(loss). This also bounds them at negative epsilon, which composition needs; the
remove direction alone would not cover replacement.

A pair (P, Q) is determined by delta(epsilon) of (P, Q) and of (Q, P) at epsilon >= 0: the first curve has the positive losses
of P, the second its negative ones, because a loss l of (Q, P) with mass m under Q is a loss -l of (P, Q) with mass m e^-l under
P. Both curves have the same value at 0, so the rest of P's mass has loss 0. Each curve is placed on the grid by connecting the
dots, on a subset of the grid that thins out towards large losses: any subset gives an upper bound, and gaps of 1/400 of the loss
change its second moment by less than 2e-6 relatively.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import scipy
from numpy.typing import NDArray

from fedveil.accounting._numbers import numpy_defaults
from fedveil.accounting.gaussian import log_deltas_of
from fedveil.accounting.types import Adjacency, member
from fedveil.errors import ConfigError

_Array = NDArray[np.float64]
_STEPS_PER_STD = 30
_LONGEST_STEP = 2**17
_LONGEST_SUM = 2**18
_COARSEST = 50.0
LARGEST_LOSS = 500.0  # of one release; larger losses count as infinite


@dataclass(frozen=True)
class Pld:
    """Losses `step * (lower + i)` with probability `probs[i]` under P, and loss infinity with probability `infinity`."""

    step: float
    lower: int
    probs: _Array
    infinity: float


@dataclass(frozen=True)
class Sampled:
    """`count` Poisson-sampled Gaussian releases: rate in (0, 1], noise std / sensitivity."""

    rate: float
    noise_multiplier: float
    count: int


class Pair(Protocol):
    """`count` releases of another mechanism, with the loss distribution of its dominating pair."""

    @property
    def count(self) -> int:
        """Return the number of releases."""
        ...

    def spread(self, *, replace: bool) -> float:
        """Return the rough std of one release's loss; only the grid depends on it."""
        ...

    def highest(self, tail: float) -> float:
        """Return a loss above which one release contributes less than about `tail` to delta."""
        ...

    def losses(self, step: float, highest: float, direction: bool | None, *, replace: bool) -> Pld:
        """Return one release: data against zeroed (True), zeroed against data (False), or a symmetric pair for the adjacency."""
        ...


Release = Sampled | Pair


def interval_masses(points: _Array) -> _Array:
    """Return the standard normal mass between consecutive ascending points, relatively precise in both tails."""
    low, high = points[..., :-1], points[..., 1:]
    masses: _Array = np.where(
        low > 0, scipy.special.ndtr(-low) - scipy.special.ndtr(-high), scipy.special.ndtr(high) - scipy.special.ndtr(low)
    )
    return masses


def connect(losses: _Array, p: _Array, q: _Array) -> tuple[_Array, _Array]:
    """Return the masses that each interval [l_i, l_i+1] sends to its lower and upper end, preserving both P and Q."""
    gap = np.diff(losses)
    upper = np.clip((p - np.exp(losses[:-1]) * q) / -np.expm1(-gap), 0, p)
    return p - upper, upper


def _directed(rate: float, z: float, step: float, highest: float, *, remove: bool) -> Pld:
    """Return the remove or add direction of the pair ((1-q) N(0, z^2) + q N(1, z^2), N(0, z^2))."""
    last = math.ceil(highest / step)
    first = max(math.floor(math.log1p(-rate) / step), -last) if rate < 1 else -last
    ratios: _Array = np.arange(first, last + 1) * np.float64(step)  # ln of mixed / base density
    shares = np.maximum(np.expm1(ratios) + rate, 0.0) / rate
    points = 0.5 / z + z * np.log(shares, out=np.full_like(shares, -np.inf), where=shares > 0)
    base, shifted = interval_masses(points), interval_masses(points - 1 / z)
    mixed = (1 - rate) * base + rate * shifted
    base_ends = float(scipy.special.ndtr(points[0])), float(scipy.special.ndtr(-points[-1]))
    shifted_ends = float(scipy.special.ndtr(points[0] - 1 / z)), float(scipy.special.ndtr(1 / z - points[-1]))
    mixed_ends = [(1 - rate) * b + rate * s for b, s in zip(base_ends, shifted_ends, strict=True)]
    if remove:
        low, high = connect(ratios, mixed, base)
        probs = np.append(low, 0.0) + np.insert(high, 0, 0.0)
        probs[0] += mixed_ends[0]
        finite_end = min(mixed_ends[1], math.exp(ratios[-1]) * base_ends[1])
        probs[-1] += finite_end
        return Pld(step, first, probs, mixed_ends[1] - finite_end)
    losses = -ratios[::-1]
    low, high = connect(losses, base[::-1], mixed[::-1])
    probs = np.append(low, 0.0) + np.insert(high, 0, 0.0)
    probs[0] += base_ends[1]
    finite_end = min(base_ends[0], math.exp(losses[-1]) * mixed_ends[0])
    probs[-1] += finite_end
    return Pld(step, -last, probs, base_ends[0] - finite_end)


def replace_points(rate: float, z: float, losses: _Array) -> _Array:
    """Return the points at which the log density ratio of (1-q) N(0) + q N(1/2) to (1-q) N(0) + q N(-1/2) equals each loss >= 0.

    With v = e^(y / 2z^2) and c = e^(-1 / 8z^2): q c v^2 - (1-q) (e^l - 1) v - e^l q c = 0.
    """
    if rate == 1:
        return losses * z * z
    log_c = -0.125 / (z * z)
    with np.errstate(divide="ignore"):
        log_linear = math.log1p(-rate) + np.log(-np.expm1(-losses)) + losses
    log_root = 0.5 * np.logaddexp(2 * log_linear, losses + 2 * (math.log(2 * rate) + log_c))
    log_v = np.logaddexp(log_linear, log_root) - math.log(2 * rate) - log_c
    return np.asarray(2 * z * z * log_v, dtype=np.float64)


@numpy_defaults
def symmetric_curve(rate: float, z: float, epsilons: _Array, *, replace: bool) -> _Array:
    """Return delta at epsilon >= 0 of one sampled release, in both directions; without `replace` it bounds every adjacency.

    Replace-one: q (h delta_C(ln(a/h)) + (1-h) delta_2C(ln(b/(1-h)))), a = (1-q) (e^eps - 1) / q, b = e^eps, for the h at which
    both terms have the same worst event.

    Args:
        rate: Poisson sampling rate in (0, 1].
        z: noise std / sensitivity, where the sensitivity of replace-one is twice the clip.
        epsilons: array of values >= 0.
        replace: use the sharper curve, which holds only for replace-one.
    """
    if not replace:
        return np.asarray(rate * np.exp(log_deltas_of(1 / z, np.log1p(np.expm1(epsilons) / rate))), dtype=np.float64)
    ratio = replace_points(rate, z, epsilons) / (z * z)
    far = np.exp(epsilons - ratio)  # 1 - h
    near = -np.expm1(np.minimum(epsilons - ratio, 0.0))
    first = np.exp(log_deltas_of(0.5 / z, 0.5 * ratio - 0.125 / (z * z)))
    return np.asarray(rate * (near * first + far * np.exp(log_deltas_of(1 / z, ratio))), dtype=np.float64)


def _symmetric(rate: float, z: float, step: float, highest: float, *, replace: bool) -> Pld:
    """Return the pair of a symmetric curve: its positive losses, mirrored by P(-loss) = e^-loss P(loss), and the rest at 0."""
    losses: _Array = np.arange(math.ceil(highest / step) + 1) * np.float64(step)
    if replace:
        points, centres = replace_points(rate, z, losses) / z, (0.5 / z, -0.5 / z)
    else:
        points, centres = 0.5 / z + z * np.log1p(np.expm1(losses) / rate), (1 / z, 0.0)
    p, q = (rate * interval_masses(points - c) + (1 - rate) * interval_masses(points) for c in centres)
    tails = [float(rate * scipy.special.ndtr(c - points[-1]) + (1 - rate) * scipy.special.ndtr(-points[-1])) for c in centres]
    low, high = connect(losses, p, q)
    positive = np.append(low[1:], 0.0) + high
    finite_end = min(tails[0], math.exp(losses[-1]) * tails[1])
    positive[-1] += finite_end
    negative = positive * np.exp(-losses[1:])
    rest = 1.0 - (tails[0] - finite_end) - math.fsum(positive) - math.fsum(negative)
    probs = np.concatenate([negative[::-1], [max(rest, 0.0)], positive])
    return Pld(step, -(losses.size - 1), probs, tails[0] - finite_end)


def loss_spread(release: Release, *, replace: bool) -> float:
    """Return the rough std of one release's loss; only the grid depends on it."""
    if not isinstance(release, Sampled):
        return release.spread(replace=replace)
    z = release.noise_multiplier
    square = 4 * math.sinh(min(z**-2 / 4, 300.0)) if replace else math.expm1(min(z**-2, 300.0))
    return min(release.rate * math.sqrt(square), 1 / z)


def highest_loss(release: Release, tail: float) -> float:
    """Return a loss above which the release contributes less than `tail` to delta."""
    if not isinstance(release, Sampled):
        return min(max(release.highest(tail), 1e-12), LARGEST_LOSS)
    z, rate = release.noise_multiplier, release.rate
    inner = 0.5 / z**2 + math.sqrt(2 * max(math.log(rate / tail), 1.0)) / z
    outer = np.logaddexp(math.log1p(-rate), math.log(rate) + inner) if rate < 1 else inner
    return min(max(float(outer), 1e-12), LARGEST_LOSS)


def _grid(releases: Sequence[Release], tail: float, *, replace: bool) -> float:
    """Return the grid step: small against the spread of one release, but large enough to bound the array length."""
    typical = sum(r.count * loss_spread(r, replace=replace) ** 2 for r in releases) / sum(r.count for r in releases)
    finest = math.sqrt(typical) / _STEPS_PER_STD
    spreads = [loss_spread(r, replace=False) for r in releases]
    single = max(2 * highest_loss(r, tail / r.count) for r in releases) / _LONGEST_STEP
    std = math.sqrt(sum(r.count * s**2 for r, s in zip(releases, spreads, strict=True)))
    total = (16 * std + 3 * std**2) / _LONGEST_SUM
    return max(finest, single, total)


def _log_sum(logs: NDArray[np.floating]) -> float:
    """Return the log of the sum of exponentials; at least one log must be finite."""
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


@numpy_defaults
def loss_window(plds: Sequence[Pld], counts: Sequence[int], tail: float) -> tuple[int, int]:
    """Return the index range of the total loss outside which the composed mass is at most `tail`, by Chernoff bounds."""
    step = plds[0].step
    low, high = (sum(c * p.lower for c, p in zip(counts, plds, strict=True)) for _ in range(2))
    high += sum(c * (p.probs.size - 1) for c, p in zip(counts, plds, strict=True))
    losses = [step * (p.lower + np.arange(p.probs.size)) for p in plds]
    logs = [np.log(p.probs, out=np.full_like(p.probs, -np.inf), where=p.probs > 0) for p in plds]
    variance = sum(c * float(p.probs @ (l - p.probs @ l) ** 2) for c, p, l in zip(counts, plds, losses, strict=True))
    scale = math.sqrt(2 * math.log(2 / tail) / max(variance, step**2))
    for factor in (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.08, 0.04, 0.02, 1.5, 3.0):
        for sign in (1, -1):
            order = sign * scale * factor
            log_mgf = sum(c * _log_sum(order * l + log_p) for c, log_p, l in zip(counts, logs, losses, strict=True))
            bound = (log_mgf + math.log(2 / tail)) / order / step
            if sign > 0:
                high = min(high, math.ceil(bound))
            else:
                low = max(low, math.floor(bound))
    return low, max(high, low)


@numpy_defaults
def convolve(plds: Sequence[Pld], counts: Sequence[int], window: tuple[int, int], tail: float) -> Pld:
    """Compose `counts[j]` copies of each `plds[j]`; the mass outside the window is at most `tail` and counts as infinite."""
    low, high = window
    longest = max(p.probs.size for p in plds)
    size = scipy.fft.next_fast_len(max(high - low + 1, longest), real=True)
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    for pld, count in zip(plds, counts, strict=True):
        spectrum = spectrum * scipy.fft.rfft(pld.probs, size) ** count
    start = sum(c * p.lower for c, p in zip(counts, plds, strict=True))
    probs = np.maximum(np.roll(scipy.fft.irfft(spectrum, size), -((low - start) % size))[: high - low + 1], 0.0)
    finite = sum(c * math.log1p(-p.infinity) for c, p in zip(counts, plds, strict=True))
    return Pld(plds[0].step, low, probs, min(1.0, -math.expm1(finite) + tail + rounding(sum(counts))))


def rounding(count: int) -> float:
    """Return the allowance for floating-point error in the spectrum's `count`-th power, added to the mass at infinity."""
    return 1e-14 + 4e-15 * count


@numpy_defaults
def delta(pld: Pld, epsilon: float) -> float:
    """Return the hockey-stick divergence at `epsilon`: infinity + sum over losses > epsilon of p (1 - e^(epsilon - loss))."""
    start = max(math.floor(epsilon / pld.step) - pld.lower, 0)
    gaps = np.minimum(epsilon - pld.step * (pld.lower + np.arange(start, pld.probs.size)), 0.0)
    return min(1.0, pld.infinity - float(pld.probs[start:] @ np.expm1(gaps)))


@numpy_defaults
def epsilon(pld: Pld, target: float) -> float:
    """Return the smallest epsilon >= 0 with `delta` <= target, rounded up; inf if the mass at infinity exceeds the target."""
    if pld.infinity > target:
        return math.inf
    if delta(pld, 0.0) <= target:
        return 0.0
    low, high = 0, pld.lower + pld.probs.size  # in grid steps: delta(low) > target >= delta(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if delta(pld, middle * pld.step) <= target else (middle, high)
    above = pld.probs[high - pld.lower :]
    scaled = float(above @ np.exp(-pld.step * np.arange(above.size)))  # sum of p e^(loss_high - loss)
    surplus = pld.infinity + math.fsum(above) - target
    inside = math.log(surplus / scaled) if surplus > 0 and scaled > 0 else 0.0
    return (pld.step * high + min(max(inside, -pld.step), 0.0)) * (1 + 1e-12)


@numpy_defaults
def composed(
    releases: Sequence[Release], tail: float, adjacency: Adjacency | None = None, step: float | None = None
) -> tuple[Pld, ...]:
    """Return the composed loss distributions of sampled Gaussian releases; the worst of them is the guarantee.

    Args:
        releases: at least one; rate 1 is the plain Gaussian.
        tail: mass that each kind of truncation moves to infinity, in (0, 1e-3].
        adjacency: of the sensitivity in the noise multipliers; None covers both (see the module's docstring).
        step: of the grid of losses; None chooses it. A smaller step is sharper and slower.
    """
    if not releases or not 0 < tail <= 1e-3:
        raise ConfigError(f"composition needs at least one release and a tail in (0, 1e-3], got {len(releases)} and {tail}")
    adjacency = None if adjacency is None else member(Adjacency, "adjacency", adjacency)
    replace = adjacency is Adjacency.REPLACE_ONE
    directions = (True, False) if adjacency is Adjacency.ZERO_OUT else (None,)
    return tuple(_compose(releases, tail, direction, step, replace=replace) for direction in directions)


def _compose(releases: Sequence[Release], tail: float, direction: bool | None, step: float | None, *, replace: bool) -> Pld:
    """Compose one direction (remove, add, or None for the symmetric pair) on the finest grid whose arrays stay short."""
    counts = [r.count for r in releases]
    step = _grid(releases, tail, replace=replace) if step is None else step
    for _ in range(4):
        if step > _COARSEST:
            break
        parts = []
        for r in releases:
            highest = highest_loss(r, tail / r.count)
            if not isinstance(r, Sampled):
                parts.append(r.losses(step, highest, direction, replace=replace))
            elif direction is None:
                parts.append(_symmetric(r.rate, r.noise_multiplier, step, highest, replace=replace))
            else:
                parts.append(_directed(r.rate, r.noise_multiplier, step, highest, remove=direction))
        if max(part.infinity for part in parts) > 0.1:
            break
        low, high = loss_window(parts, counts, tail)
        if high - low <= 1.5 * _LONGEST_SUM:
            return convolve(parts, counts, (low, high), tail)
        step *= (high - low) / _LONGEST_SUM
    return Pld(step, 0, np.zeros(1), 1.0)


@numpy_defaults
def is_cheap(releases: Sequence[Release], tail: float) -> bool:
    """Return whether `composed` takes only a fraction of a second: few distinct releases on a grid of moderate length."""
    if len(releases) > 64:
        return False
    step = _grid(releases, tail, replace=False)
    elements = sum(2 * highest_loss(r, tail / r.count) / step for r in releases)
    return elements <= 4 * _LONGEST_STEP


_DENSE = 400  # every grid point up to this one, then gaps of 1 / _DENSE of the loss


@dataclass(frozen=True)
class HalfCurve:
    """Positive losses of a pair under its first distribution: mass `probs[i]` at `step * (i + 1)`, `infinity` at infinity."""

    probs: _Array
    infinity: float


@dataclass(frozen=True)
class Mixtures:
    """Pair of Gaussian mixtures in units of the noise std; each row is a pair that the adversary can tell from the others.

    points: where each row's log likelihood ratio reaches each loss [rows, losses], ascending. first, second: components
    (weights, centres) of the two mixtures, with one entry per row.
    """

    points: _Array
    first: Sequence[tuple[_Array, _Array]]
    second: Sequence[tuple[_Array, _Array]]


@lru_cache(maxsize=64)
def _indices(last: int) -> NDArray[np.int64]:
    indices = list(range(min(_DENSE, last) + 1))
    while indices[-1] < last:
        indices.append(min(indices[-1] + max(1, indices[-1] // _DENSE), last))
    return np.array(indices, dtype=np.int64)


def grid(step: float, highest: float) -> tuple[NDArray[np.int64], _Array]:
    """Return the multiples of `step` from 0 to `highest` at which a curve is evaluated, and their losses."""
    indices = _indices(max(1, math.ceil(highest / step)))
    return indices, np.asarray(indices * np.float64(step), dtype=np.float64)


def _masses(points: _Array, parts: Sequence[tuple[_Array, _Array]]) -> tuple[_Array, float]:
    """Return (mass between consecutive points, mass above the last point), summed over rows and parts."""
    inside, above = np.zeros(points.shape[1] - 1), 0.0
    for weights, centres in parts:
        shifted = points - centres[:, None]
        inside += weights @ interval_masses(shifted)
        above += float(weights @ scipy.special.ndtr(-shifted[:, -1]))
    return inside, above


def half_curve(indices: NDArray[np.int64], losses: _Array, pair: Mixtures) -> HalfCurve:
    """Return the positive losses of a pair of mixtures, by connecting the dots; mass above the last loss goes to infinity."""
    (p, p_above), (q, q_above) = _masses(pair.points, pair.first), _masses(pair.points, pair.second)
    low, high = connect(losses, p, q)
    dense = np.zeros(int(indices[-1]) + 1)
    dense[indices[:-1]] += low
    dense[indices[1:]] += high
    finite_end = min(p_above, math.exp(losses[-1]) * q_above)
    dense[-1] += finite_end
    return HalfCurve(dense[1:], p_above - finite_end)


def joined(step: float, forward: HalfCurve, backward: HalfCurve, lost: float = 0.0) -> Pld:
    """Return the loss distribution under P of a pair (P, Q).

    Args:
        step: of the grid.
        forward, backward: the positive losses of (P, Q) and of (Q, P).
        lost: probability of the omitted outcomes, which count as loss infinity.
    """
    size = max(forward.probs.size, backward.probs.size)
    negative, positive = np.zeros(size), np.zeros(size)
    positive[: forward.probs.size] = forward.probs
    n = backward.probs.size
    negative[:n] = backward.probs * np.exp(-step * np.arange(1, n + 1))
    rest = 1.0 - forward.infinity - math.fsum(positive) - math.fsum(negative)
    probs = np.concatenate([negative[::-1], [max(rest, 0.0)], positive])
    return Pld(step, -size, (1 - lost) * probs, lost + (1 - lost) * forward.infinity)


def second_moment(losses: _Array, pair: Mixtures) -> float:
    """Return a rough mean square of the positive losses of a pair, from a few losses."""
    inside, above = _masses(pair.points, pair.first)
    return float(inside @ (losses[:-1] * losses[1:])) + above * float(losses[-1]) ** 2
