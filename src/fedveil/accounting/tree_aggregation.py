"""Tree aggregation: every completed dyadic block of rounds is released with noise; what one client moves, squared.

A block of 2^l rounds [i 2^l, (i+1) 2^l) is released once it is complete. A client that takes part in n rounds of a block moves
its sum by up to n clips, so it moves all blocks together by the root of the sum of n^2. Repeated participation within one tree
costs more than the sum of its rounds: within a block the contributions add up before they are squared.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting._check import at_least

_Table = NDArray[np.float64]


def tree_sensitivity_squared(rounds: int, separation: int = 1, participations: int = 1) -> int:
    """The exact largest sum over completed blocks of n^2, n the number of a client's rounds in the block; in clips squared.

    One participation: floor(log2 T) + 1. Otherwise the maximum over all patterns, by dynamic programming over blocks: for each
    size, the best value for a number of rounds and the gaps before the first and behind the last (from b - 1 on they are alike).

    Args:
        rounds: T >= 1, one tree without restarts. separation: b >= 1, rounds from one participation to the next, at least.
        participations: k >= 1, at most.
    """
    rounds, b = at_least("rounds", rounds, 1), at_least("separation", separation, 1)
    b = min(b, rounds)
    k = min(at_least("participations", participations, 1), -(-rounds // b))
    block = np.full((k + 1, b, b), -np.inf)
    block[1, 0, 0] = 1.0  # a single round
    blocks = [block]
    while len(blocks) < rounds.bit_length():
        size = 1 << (len(blocks) - 1)
        block = _joined(block, block, size, size)
        block[1:] += (np.arange(1, k + 1, dtype=np.float64) ** 2)[:, None, None]
        blocks.append(block)
    total, done = block, 1 << (len(blocks) - 1)  # then the other completed blocks of T rounds, from the left
    for level in range(len(blocks) - 2, -1, -1):
        if rounds >> level & 1:
            total = _joined(total, blocks[level], done, 1 << level)
            done += 1 << level
    return int(total.max())


def _joined(left: _Table, right: _Table, left_size: int, right_size: int) -> _Table:
    """Two neighbouring blocks as one, without what they pay as one: best value by (rounds, gap before, gap behind)."""
    k, b = left.shape[0] - 1, left.shape[1]
    out = np.full_like(left, -np.inf)
    for gap in range(b):
        ahead, behind = min(gap + left_size, b - 1), min(gap + right_size, b - 1)
        out[:, ahead, :] = np.maximum(out[:, ahead, :], right[:, gap, :])
        out[:, :, behind] = np.maximum(out[:, :, behind], left[:, :, gap])
    reach = np.maximum.accumulate(right[:, ::-1, :], axis=1)[:, ::-1, :]  # best with at least this gap before
    for first in range(1, k + 1):
        for second in range(1, k + 1 - first):
            for gap in range(b):
                both = left[first, :, gap][:, None] + reach[second, b - 1 - gap][None, :]
                np.maximum(out[first + second], both, out=out[first + second])
    return out
