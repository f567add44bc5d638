"""The grid: clipped vectors as integers, so that a release is an integer plus rounded Gaussian noise.

A release has groups of coordinates (layers, parts), each with a grid step h = 2^k derived from the public noise std alone.
`to_grid` clips a vector and truncates it towards zero to integers m, in units of h, so that no norm grows: |m h| <= |x|. The
noise is an integer K, the rounding of an ideal normal (`fedveil.mechanism.sampler`). Because m is an integer, m + round(G) =
round(m + G): the release is post-processing of the ideal Gaussian mechanism on m h, and its accounting holds to the bit.

The clips hold exactly, not up to rounding. Let d be the number of coordinates and g = d 2^-52 + 2^-40. A float64 sum S of d
squares, in any order, differs from the exact one by at most d 2^-53 (1 + 2^-20) of it (Higham 2002, section 4.2), so
S (1 + g) <= (C / h)^2 (1 - 2^-50) proves that the exact norm of m h is at most C. Vectors are scaled to norm C (1 - g) at most,
a margin for all intermediate errors: an honest vector always passes, and NaN never does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import ConfigError, UpdateRefused

if TYPE_CHECKING:
    from torch import Tensor

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]
Group = tuple[slice, int]
"""Consecutive coordinates and the exponent k of their grid step 2^k."""

DEFAULT_BITS = 24
MAX_BITS = 32
_MAX_EXPONENT = 200
"""Grid steps lie between 2^-200 and 2^200; no square of a permitted value overflows or underflows."""

_LARGEST = 2.0**53
"""Integers below this are exact in float64."""

_BLOCK = 2**16


def exponent_for(std: float, bits: int = DEFAULT_BITS) -> int:
    """Return the exponent k of the grid step h = 2^k for noise of this std: k = floor(log2 std) - bits.

    The std is then at least 2^bits and below 2^(bits + 1) grid steps. The result is exact: the exponent is read from the float.

    Args:
        std: of the noise on one release, > 0; public, never derived from private data.
        bits: in [0, 32]. Fewer bits make shorter integers and lose more of the norm; noise in shares needs at least 2.
    """
    if not 0 <= bits <= MAX_BITS:
        raise ConfigError(f"the grid's bits must lie between 0 and {MAX_BITS}, got {bits}")
    if not (std > 0 and math.isfinite(std)):
        raise ConfigError(f"a grid needs noise: the std must be finite and > 0, got {std}")
    exponent = math.frexp(std)[1] - 1 - bits
    if abs(exponent) > _MAX_EXPONENT:
        raise ConfigError(f"a noise std of {std:g} at {bits} bits needs the grid step 2^{exponent}; allowed are 2^-200 to 2^200")
    return exponent


def to_grid(vector: Tensor, groups: Sequence[Group], clip: float, group_clips: Sequence[float] | None = None) -> Integers:
    """Clip each group of `vector` [n], then the whole, then truncate to integers [n] in units of each group's grid step.

    The exact L2 norm of the vector that the integers represent is at most `clip`, and that of each group at most its clip.

    Args:
        vector: [n], float32, on the CPU; it is not changed.
        groups: consecutive slices that cover [0, n), each with its exponent.
        clip: C > 0, bound on the whole; inf for none.
        group_clips: bound of each group, > 0, inf for none; or None.

    Raises:
        ConfigError: invalid groups, or a clip of 2^53 grid steps or more.
        UpdateRefused: NaN or infinite values; without a clip, values of 2^53 grid steps or more.

    Source: module docstring.
    """
    clips = [math.inf] * len(groups) if group_clips is None else group_clips
    return Clipping.of(groups, clip, clips, len(vector)).integers(vector)


@dataclass(frozen=True)
class Clipping:
    """Operation of `to_grid` for many vectors: groups, clips and sizes are independent of the data and checked once."""

    groups: Sequence[Group]
    clip: float
    clips: Sequence[float]
    slack: float

    @classmethod
    def of(cls, groups: Sequence[Group], clip: float, clips: Sequence[float], n: int) -> Clipping:
        """Return the clipping of vectors [n]; arguments as in `to_grid`.

        Raises:
            ConfigError: invalid groups, or a clip of 2^53 grid steps or more.
        """
        _check(groups, clip, clips, n)
        if all(map(math.isinf, clips)):
            groups = _merged(groups)
            clips = [math.inf] * len(groups)
        return cls(groups, clip, clips, n * 2.0**-52 + 2.0**-40)

    def integers(self, vector: Tensor | Floats) -> Integers:
        """Clip one vector [n] and truncate it to integers [n].

        Raises:
            UpdateRefused: NaN or infinite values; without a clip, values of 2^53 grid steps or more.
        """
        x = vector if isinstance(vector, np.ndarray) else vector.detach().numpy()
        norms = [math.sqrt(_power(x[part])) for part, _ in self.groups]
        if not all(map(math.isfinite, norms)):
            raise UpdateRefused("the vector contains NaN or infinite values and cannot be clipped")
        factors = [_factor(norm, bound, self.slack) for norm, bound in zip(norms, self.clips, strict=True)]
        common = _factor(math.hypot(*(f * norm for f, norm in zip(factors, norms, strict=True))), self.clip, self.slack)
        integers = np.empty(len(x), dtype=np.int64)
        powers = [
            _truncate(x[part], factor * common * 2.0**-k, integers[part])
            for (part, k), factor in zip(self.groups, factors, strict=True)
        ]
        _check_norms(powers, self.groups, self.clip, self.clips, self.slack)
        return integers


def from_grid(integers: Integers | NDArray[np.float64], groups: Sequence[Group]) -> Floats:
    """Return the float32 vector [n] that released integers [n] represent; post-processing at the receiver."""
    vector = np.empty(len(integers), dtype=np.float32)
    for part, k in _merged(groups):
        np.multiply(integers[part], 2.0**k, out=vector[part], casting="unsafe")
    return vector


# --- the steps ---


def _check(groups: Sequence[Group], clip: float, clips: Sequence[float], n: int) -> None:
    """Refuse groups and clips that are invalid for any data."""
    ends = [part.stop for part, _ in groups]
    starts = [part.start for part, _ in groups]
    if starts != [0, *ends][: len(ends)] or [0, *ends][-1] != n or any(a > b for a, b in zip(starts, ends, strict=True)):
        raise ConfigError(f"the groups must be consecutive slices that cover all {n} coordinates, got {[p for p, _ in groups]}")
    if len(clips) != len(groups):
        raise ConfigError(f"group_clips needs one bound for each of the {len(groups)} groups, got {len(clips)}")
    for (_, k), bound in zip(groups, clips, strict=True):
        if not (clip > 0 and bound > 0):
            raise ConfigError(f"a clip must be > 0, got {min(clip, bound)}")
        if abs(k) > _MAX_EXPONENT:
            raise ConfigError(f"a grid step must lie between 2^-200 and 2^200, got 2^{k}")
        steps = min(clip, bound) * 2.0**-k
        if math.isfinite(steps) and steps >= _LARGEST:
            raise ConfigError(f"a clip of {steps:.3g} grid steps does not fit (below 2^53 is allowed); choose a coarser grid")


def _merged(groups: Sequence[Group]) -> list[Group]:
    """Merge neighbouring groups of the same exponent."""
    merged: list[Group] = []
    for part, k in groups:
        if merged and merged[-1][1] == k:
            merged[-1] = (slice(merged[-1][0].start, part.stop), k)
        else:
            merged.append((part, k))
    return merged


def _factor(norm: float, bound: float, slack: float) -> float:
    """Return the factor that scales a vector of this norm to within `bound`, robust to rounding."""
    allowed = bound * (1 - slack)
    return 1.0 if norm <= allowed else allowed / norm


def _power(x: NDArray[np.float32]) -> float:
    """Return the sum of squares in float64, in an order independent of threads and processor load."""
    total = 0.0
    for part in _blocks(len(x)):
        values = x[part].astype(np.float64)
        total += float(np.multiply(values, values, out=values).sum())
    return total


def _truncate(x: NDArray[np.float32], scale: float, out: Integers) -> float:
    """Truncate scale x towards zero into `out`; return the sum of squares of these integers."""
    total = 0.0
    for part in _blocks(len(x)):
        values = x[part].astype(np.float64)
        values *= scale
        np.trunc(values, out=values)
        power = float((values * values).sum())
        if not power < _LARGEST**2 and not np.abs(values).max() < _LARGEST:
            raise UpdateRefused("the vector has values of 2^53 grid steps or more; clip it or choose a coarser grid (fewer bits)")
        np.copyto(out[part], values, casting="unsafe")
        total += power
    return total


def _check_norms(powers: Sequence[float], groups: Sequence[Group], clip: float, clips: Sequence[float], slack: float) -> None:
    """Prove from the sums of squares that the exact norms are within the clips, in units of the finest grid step."""
    finest = min((k for _, k in groups), default=0)
    powers = [power * 4.0 ** (k - finest) for power, (_, k) in zip(powers, groups, strict=True)]
    for power, bound in [*zip(powers, clips, strict=True), (math.fsum(powers), clip)]:
        limit = bound * 2.0**-finest
        if not power * (1 + slack) <= limit * limit * (1 - 2.0**-50):
            raise UpdateRefused(f"the norm of the vector on the grid is not provably within the clip of {bound:g}")


def _blocks(n: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, n, _BLOCK))
