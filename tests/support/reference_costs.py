"""Costs that tests compare the accountants with: prefix sums, trees, known participants, loss distributions on a given grid."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax
from scipy.stats import binom

from fedveil.accounting import fixed_size, pld, secret_samples
from fedveil.accounting.gaussian import delta_of
from fedveil.accounting.types import Adjacency, SecretSample, UserRecordsGaussian


def prefix_sum_error(coefficients: NDArray[np.float64] | list[float], rounds: int) -> float:
    """|| A C^-1 ||_F for prefix sums A and the first column of C."""
    column = np.zeros(rounds)
    column[: len(coefficients)] = coefficients[:rounds]
    matrix = np.array([[column[i - j] if i >= j else 0.0 for j in range(rounds)] for i in range(rounds)])
    return float(np.linalg.norm(np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(matrix)))


def epsilon_pld(event: SecretSample, delta: float, *, adjacency: Adjacency | None = None, step: float | None = None) -> float:
    """Epsilon by loss distributions, the worse of both directions."""
    if event.count == 0 or secret_samples.rate_of(event) == 0:
        return 0.0
    pairs = (secret_samples if isinstance(event, UserRecordsGaussian) else fixed_size).pairs_of(event)  # type: ignore[arg-type]
    return max(pld.epsilon(total, delta) for total in pld.composed([pairs], min(1e-3, 1e-5 * delta), adjacency, step))


def named_participants_delta(rate: float, noise_multiplier: float, count: int, epsilon: float) -> float:
    """The exact delta where everybody sees who takes part: the mean of Gaussian ones over a binomial number of rounds."""
    weights = binom.pmf(np.arange(count + 1), count, rate)
    return math.fsum(w * delta_of(math.sqrt(j) / noise_multiplier, epsilon) for j, w in enumerate(weights) if j)


def softmax_kl(first: list[float], second: list[float]) -> float:
    """KL divergence in nats between the softmax of two flat vectors."""
    p, q = log_softmax(first), log_softmax(second)
    return max(0.0, float(np.exp(p) @ (p - q)))


def tree_sensitivity_squared(rounds: int, separation: int = 1, participations: int = 1) -> int:
    """The exact largest sum over completed blocks of n^2, n the number of a client's rounds in the block; in clips squared.

    One participation: floor(log2 T) + 1. Otherwise the maximum over all patterns, by dynamic programming over blocks: for each
    size, the best value for a number of rounds and the gaps before the first and behind the last (from b - 1 on they are alike).

    Args:
        rounds: T >= 1, one tree without restarts. separation: b >= 1, rounds from one participation to the next, at least.
        participations: k >= 1, at most.
    """
    b = min(separation, rounds)
    k = min(participations, -(-rounds // b))
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


def _joined(left: NDArray[np.float64], right: NDArray[np.float64], left_size: int, right_size: int) -> NDArray[np.float64]:
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
