"""Gaussian noise as integers: the exact law of round(G), G ~ N(0, std^2), drawn fast and independently of the data.

Let U and V be uniform reals in (0, 1). By Box and Muller (1958) the pair std sqrt(-2 ln U) (cos 2 pi V, sin 2 pi V) is exactly
two independent normals; this module rounds it correctly. In the order of the code:

1. `rounded_normal` splits the coordinates into blocks. Coordinates 2j and 2j + 1 come from pair j.
2. `_round_block` reads the first 64 bits b of U and c of V of each pair from block j of AES-256 in counter mode, and computes the
   two values in float64. If a value is so close to a border between two integers that the missing bits or the rounding
   of float64 might matter, it leaves the value undecided.
3. `_decide` rounds these few (about 160 in 10^7 at std = 2^24) with further bits of the same U and V, from shake_256, in
   high precision, and adds bits until the value is clear of the border.

Every integer is therefore the correct rounding of the ideal value, independent of the library that computes the logarithm: the
same key gives the same integers everywhere. This rests on **Assumption A**: float64 log has a relative error <= 2^-47, sin and
cos an absolute error <= 2^-47 (the tests check the libraries used here; the largest measured error is below 2^-52).

**Error of step 2**, in units of std. With b in [2^46, 2^64 - 2^46): 2^-18 <= U <= 1 - 2^-18, so 2^-8.5 <= r <= 5.00 for
r = sqrt(-2 ln U). The float64 radius differs from r by at most r 2^-48 (log), 2^-53 / r (b to float64), 2^-64 / (U r) (missing
bits of U) and r 2^-52 (square root and products); cos and sin by 2^-47 (A), 2^-49.7 (rounding of the angle) and 2^-61 (missing
bits of V). Together |error| <= 2^-43.5, and the test allows 2^-42. The residue |t - k| is exact.

Participants are drawn from the same kind of stream, under separate keys: `poisson_sample`, `fixed_sample`.

The remaining total variation is bounded in `fedveil.accounting.finite_precision`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import ConfigError

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Words = NDArray[np.uint64]
_Undecided = tuple[Integers, Words]

MAX_STD = 2.0**33
"""Largest std in grid steps; above it too many coordinates are undecided in float64."""

_KEY_BYTES = 32

_PAIRS = 2**15
"""Pairs per block: small enough for the cache, and for torch to compute in the calling thread."""

_ZEROS = bytes(16 * _PAIRS)

_MARGIN = 2.0**-42
"""Allowed error of a float64 value, in units of std (proven: 2^-43.5)."""

_EDGE = np.uint64(2**46)
"""Words b this close to 0 or 2^64 give a radius for which the margin is not proven."""

_WITHIN = np.uint64(2**64 - 2**47)

_mpmath_lock = threading.Lock()


def rounded_normal(std: float | Floats, n: int, key: bytes, *, threads: int | None = None) -> Integers:
    """Draw n independent integers [n] with the law of round(G), G ~ N(0, std^2).

    A shorter draw with the same key is a prefix of a longer one. The result does not depend on `threads`.

    Args:
        std: standard deviation in grid steps, in [0, 2^33]; one number or one per coordinate [n]. A std of 0 gives 0.
        n: number of coordinates, >= 0.
        key: 32 bytes, secret unless noise is simulated; never used for two draws.
        threads: maximal number of threads; by default that of torch, or 1 if no code has imported torch.

    Raises:
        ConfigError: a std out of range, NaN or of the wrong shape; a key of the wrong length.

    Source: module docstring; Box & Muller 1958.
    """
    std = _checked(std, n, key)
    if threads is None:
        threads = 1 if (torch := _torch()) is None else torch.get_num_threads()
    integers = np.empty(n, dtype=np.int64)
    size = 2 * _PAIRS
    starts = range(0, n, size)

    def draw(start: int) -> _Undecided:
        part = slice(start, start + size)
        block = integers[part]
        words = _words(key, start // 2, (len(block) + 1) // 2)
        undecided = _round_block(words, std if isinstance(std, float) else std[part], block)
        return start + undecided, words[undecided // 2]

    for undecided, words in _draws(draw, starts, threads):
        for i, (b, c) in zip(undecided.tolist(), words.tolist(), strict=True):
            integers[i] = _decide(key, i, b, c, std if isinstance(std, float) else float(std[i]))
    return integers


def poisson_sample(rate: float, n: int, key: bytes) -> Integers:
    """Draw a Poisson sample of 0 to n - 1, ascending: each number joins with probability in (rate - 2^-64, rate], independently.

    Number i joins if the 64-bit word i of AES-256 in counter mode is below rate 2^64. A shorter draw with the same key is a
    prefix of a longer one.

    Args:
        rate: in [0, 1]. n: >= 0. key: as in `rounded_normal`.
    """
    if not 0 <= rate <= 1:
        raise ConfigError(f"the rate of a Poisson sample must lie in [0, 1], got {rate}")
    below = math.floor(math.ldexp(rate, 64))
    return np.arange(n) if below == 2**64 else np.flatnonzero(_stream(key, n) < np.uint64(below))


def fixed_sample(size: int, n: int, key: bytes) -> Integers:
    """Draw `size` of 0 to n - 1, ascending, uniformly over sets of that size: the numbers with the smallest 128-bit words.

    Args:
        size: from 0 to n; two words are equal with probability at most n^2 / 2^129. key: as in `rounded_normal`.
    """
    if not 0 <= size <= n:
        raise ConfigError(f"a sample of a fixed size holds from 0 to {n} of {n}, got {size}")
    high, low = _stream(key, 2 * n).reshape(-1, 2).T
    near = np.flatnonzero(high <= np.partition(high, size - 1)[size - 1]) if size else np.arange(0)
    return np.sort(near[np.lexsort((low[near], high[near]))[:size]])


def _stream(key: bytes, n: int) -> Words:
    """Return the first n 64-bit words of AES-256 in counter mode."""
    _checked(0.0, n, key)
    blocks = (_words(key, first, min(_PAIRS, (n + 1) // 2 - first)) for first in range(0, (n + 1) // 2, _PAIRS))
    return np.concatenate([np.empty(0, np.uint64), *(block.reshape(-1) for block in blocks)])[:n]


def _checked(std: float | Floats, n: int, key: bytes) -> float | Floats:
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"the key of a noise draw must have {_KEY_BYTES} bytes, got {len(key)}")
    if n < 0:
        raise ConfigError(f"the number of coordinates must be >= 0, got {n}")
    if isinstance(std, float) and 0 <= std <= MAX_STD:
        return std
    steps = np.asarray(std, dtype=np.float64)
    if steps.shape not in ((), (n,)):
        raise ConfigError(f"std must be one number or one per coordinate [{n}], got shape {list(steps.shape)}")
    allowed = (steps >= 0) & (steps <= MAX_STD)
    if not allowed.all():
        worst = steps[~allowed].flat[0]
        raise ConfigError(f"std must lie between 0 and 2^33 grid steps, got {worst:g}; choose a coarser grid (fewer bits)")
    return steps if steps.ndim else float(steps)


def _draws(draw: Callable[[int], _Undecided], starts: range, threads: int) -> Iterator[_Undecided]:
    """Yield `draw` of each start, in order, computed by at most `threads` threads."""
    if min(threads, len(starts)) < 2:
        yield from map(draw, starts)
        return
    with ThreadPoolExecutor(min(threads, len(starts))) as pool:
        yield from pool.map(draw, starts)


def _words(key: bytes, first: int, pairs: int) -> Words:
    """Return the 64-bit words (b, c) [pairs, 2] of the pairs from `first` on: pair j is block j of AES-256 in counter mode."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES(key), modes.CTR(first.to_bytes(16, "big"))).encryptor()
    words = np.empty(16 * (pairs + 1), np.uint8)  # one more pair, which the cipher requires
    stream.update_into(memoryview(_ZEROS)[: 16 * pairs], words.data)
    return words.view("<u8").reshape(-1, 2)[:pairs]


@np.errstate(divide="ignore", invalid="ignore")
def _round_block(words: Words, std: float | Floats, out: Integers) -> Integers:
    """Round the coordinates of one block into `out` [n]; return the indices of those that float64 cannot decide.

    Args:
        words: of the pairs [ceil(n / 2), 2]. std: one number or one per coordinate [n].
    """
    n = len(out)
    b, c = words[:, 0], words[:, 1]
    log = _log(_uniform(b))
    log *= -2.0
    radius = np.sqrt(log, out=log)
    radius[(b - _EDGE) >= _WITHIN] = np.nan
    angle = c.view(np.int64).astype(np.float64)
    angle *= math.pi * 2.0**-63
    cos, sin = _cos_sin(angle)
    pairs = np.empty((len(words), 2))
    np.multiply(radius, cos, out=pairs[:, 0])
    np.multiply(radius, sin, out=pairs[:, 1])
    values = pairs.reshape(-1)[:n]
    values *= std
    nearest = np.rint(values)
    values -= nearest
    gap = np.abs(values, out=values)
    largest = std if isinstance(std, float) else float(std.max())
    undecided = np.flatnonzero(~(gap <= 0.5 - _MARGIN * largest))
    nearest[undecided] = 0.0
    np.copyto(out, nearest, casting="unsafe")
    return undecided


def _uniform(b: Words) -> Floats:
    """Return b 2^-64, rounded once, from two exact halves: numpy's conversion of unsigned words branches on the top bit."""
    halves = b[:, np.newaxis].view("<u4")
    uniform = halves[:, 1] * 2.0**-32
    uniform += halves[:, 0] * 2.0**-64
    return uniform


def _log(x: Floats) -> Floats:
    """Return the natural logarithm, within Assumption A."""
    return np.log(x)


def _cos_sin(angle: Floats) -> tuple[Floats, Floats]:
    """Return cosine and sine, within Assumption A, by torch if it is imported: it is four times as fast as numpy."""
    if (torch := _torch()) is None:
        return np.cos(angle), np.sin(angle)
    angles = torch.from_numpy(angle)
    return angles.cos().numpy(), angles.sin().numpy()


def _torch() -> Any:
    """Return torch if the program has imported it, else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "from_numpy") else None


def _decide(key: bytes, coordinate: int, b: int, c: int, std: float) -> int:
    """Return the correct rounding of one coordinate, using as many further bits of U and V as needed.

    At p bits, u <= 2^p U < u + 1, and likewise v. The ideal value is then within std (2 / (u r) + 2 pi r 2^-p) of the value
    computed from u and v, and the arithmetic (with 64 more bits) adds less than std r 2^-p + 2^-p.
    """
    with _mpmath_lock:
        mp = _mpmath()
        for extra in (64 * 2**i for i in itertools.count()):
            p = 64 + extra
            more_b, more_c = _more_bits(key, coordinate // 2, extra)
            u, v = b << extra | more_b, c << extra | more_c
            if u == 0:
                continue
            mp.prec = p + 64
            radius = mp.sqrt(-2 * mp.log(mp.ldexp(u, -p)))
            turn = mp.ldexp(v, 1 - p)
            value = std * radius * (mp.cospi(turn) if coordinate % 2 == 0 else mp.sinpi(turn))
            nearest = mp.nint(value)
            error = std * (2 / (u * radius) + 8 * mp.ldexp(radius, -p)) + mp.ldexp(1, -p)
            if abs(value - nearest) + error < 0.5:
                return int(nearest)
    raise AssertionError("unreachable")


def _more_bits(key: bytes, pair: int, bits: int) -> tuple[int, int]:
    """Return the next `bits` bits of U and of V of a pair; fewer bits are a prefix of more."""
    U, V = (hashlib.shake_256(key + name + pair.to_bytes(16, "big")).digest(bits // 8) for name in (b"U", b"V"))
    return int.from_bytes(U, "big"), int.from_bytes(V, "big")


@functools.cache
def _mpmath() -> Any:
    """Return an mpmath context with a private precision. Its constants are shared in the process, hence the lock."""
    import mpmath

    return mpmath.MPContext()
