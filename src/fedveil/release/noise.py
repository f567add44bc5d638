"""Randomness: noise and client sampling from the operating system's entropy, all else from the seed.

Seeded noise is reproducible and therefore private to nobody; it exists for simulation and tests, and the statement says so.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

_SUMMANDS = 2
_BLOCK = 2**18


def _secure_normal(n: int) -> Tensor:
    """n standard normals [n] from a cryptographic source, drawn in blocks by as many threads as torch may use here."""
    blocks = [min(_BLOCK, n - start) for start in range(0, n, _BLOCK)]
    threads = min(torch.get_num_threads(), len(blocks))
    if threads < 2:
        return torch.cat([_secure_block(size) for size in blocks]) if blocks else torch.empty(0)
    with ThreadPoolExecutor(threads) as pool:
        return torch.cat(list(pool.map(_secure_block, blocks)))


def _secure_block(n: int) -> Tensor:
    """n standard normals, each the scaled sum of independent float64 Box-Muller draws.

    A single draw leaves floating-point traces by which noise can be told from signal (Mironov 2012; Holohan and Braghin 2021,
    who propose such sums).
    """
    total = np.zeros(n)
    half = (n + 1) // 2
    for _ in range(_SUMMANDS):
        bits = np.frombuffer(os.urandom(16 * half), dtype=np.uint64).reshape(2, half)
        u = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        radius, angle = np.sqrt(-2.0 * np.log(u[0])), 2.0 * np.pi * u[1]
        total += np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:n]
    return torch.from_numpy((total / np.sqrt(_SUMMANDS)).astype(np.float32))


@dataclass(frozen=True)
class Randomness:
    """The sources of randomness of one run.

    Args:
        seed: seeds everything that need not be secret (initial model, batch order).
        seeded_noise: take noise and client sampling from the seed as well. Simulation only.
    """

    seed: int
    seeded_noise: bool = False

    def derive(self, *key: object) -> int:
        """A 63-bit seed for (seed, key); distinct keys give independent streams."""
        digest = hashlib.blake2b(repr((self.seed, *key)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def generator(self, *key: object) -> torch.Generator:
        """A torch generator for what need not be secret."""
        return torch.Generator().manual_seed(self.derive(*key))

    def normal(self, n: int, *key: object) -> Tensor:
        """n standard normals [n], float32; from the seed only if `seeded_noise`."""
        if self.seeded_noise:
            return torch.randn(n, generator=self.generator("noise", *key))
        return _secure_normal(n)

    def secret(self, *key: object) -> np.random.Generator:
        """A numpy generator for client sampling, which amplification needs to be secret."""
        if self.seeded_noise:
            return np.random.default_rng(self.derive("sampling", *key))
        return np.random.default_rng(int.from_bytes(os.urandom(32), "little"))
