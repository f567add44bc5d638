"""What an exact release costs beside one in float32 arithmetic, and what its grid loses. Ratios, in one process, in turns.

    python benchmarks/release.py --rounds 15

Baseline: secret noise from two Box-Muller draws in float64, rounded to float32, scaled and added in float32 to the clipped
vector. Exact: `to_grid` (clip, truncation, check) and `rounded_normal`. Both on one thread unless --threads says otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from fedveil.accounting.finite_precision import total_variation
from fedveil.mechanism.grid import exponent_for, to_grid
from fedveil.mechanism.sampler import rounded_normal
from harness import arguments

LENET5 = 61_706
SIZES = {LENET5: 10, 11_000_000: 1}
"""Coordinates (LeNet-5, ResNet-18), and how often a side repeats its work in a round."""

CLIP, STD = 1.0, 1.86
BLOCK = 2**18


def float32_noise(n: int) -> torch.Tensor:
    """n standard normals, float32, as many threads as torch may use."""
    sizes = [min(BLOCK, n - start) for start in range(0, n, BLOCK)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return torch.cat(list((map if torch.get_num_threads() == 1 else pool.map)(float32_block, sizes)))


def float32_block(n: int) -> torch.Tensor:
    """Scaled sums of two Box-Muller draws."""
    total = np.zeros(n)
    half = (n + 1) // 2
    for _ in range(2):
        bits = np.frombuffer(os.urandom(16 * half), dtype=np.uint64).reshape(2, half)
        u = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        radius, angle = np.sqrt(-2.0 * np.log(u[0])), 2.0 * np.pi * u[1]
        total += np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:n]
    return torch.from_numpy((total / np.sqrt(2)).astype(np.float32))


def float32_release(vector: torch.Tensor) -> torch.Tensor:
    """Clip and noise in float32."""
    clipped = vector.clone()
    norm = float(torch.linalg.vector_norm(clipped, dtype=torch.float64))
    if norm > CLIP:
        clipped.mul_(CLIP / norm * (1 - 1e-6))
    return clipped + float32_noise(len(vector)).mul_(STD)


def exact_noise(n: int, std: float = STD) -> np.ndarray:
    """The noise as integers on its grid."""
    return rounded_normal(std * 2.0 ** -exponent_for(std), n, os.urandom(32))


def exact_release(vector: torch.Tensor) -> np.ndarray:
    """Clip, grid, check and noise."""
    integers = to_grid(vector, [(slice(0, len(vector)), exponent_for(STD))], CLIP)
    integers += exact_noise(len(vector))
    return integers


def in_turns(sides: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, tuple[float, float]]:
    """(seconds, seconds of cores at work) of each side, the fastest of all rounds each; sides take turns."""
    fastest = dict.fromkeys(sides, (float("inf"), float("inf")))
    for _ in range(rounds):
        for name, side in sides.items():
            start, before = time.perf_counter(), time.process_time()
            for _ in range(repeats):
                side()
            seconds, worked = (time.perf_counter() - start) / repeats, (time.process_time() - before) / repeats
            fastest[name] = min(fastest[name][0], seconds), min(fastest[name][1], worked)
    return fastest


def norm_lost(vector: torch.Tensor, std: float) -> float:
    """Share of the clipped vector's norm that truncation to the default grid takes away."""
    k = exponent_for(std)
    kept = np.linalg.norm(to_grid(vector, [(slice(0, len(vector)), k)], CLIP).astype(np.float64)) * 2.0**k
    return 1 - float(kept) / min(CLIP, float(torch.linalg.vector_norm(vector, dtype=torch.float64)))


def speed(rounds: int) -> None:
    """Prints the two ratios for each size."""
    print(f"{'coordinates':>12} {'what':<24} {'float32 s':>10} {'exact s':>10} {'ratio':>6} {'of work':>8}")
    for n, repeats in SIZES.items():
        vector = torch.randn(n)
        sides: dict[str, Callable[[], object]] = {
            "noise, float32": lambda n=n: float32_noise(n).mul_(STD),
            "noise, exact": lambda n=n: exact_noise(n),
            "release, float32": lambda vector=vector: float32_release(vector),
            "release, exact": lambda vector=vector: exact_release(vector),
        }
        seconds = in_turns(sides, rounds, repeats)
        for what, label in (("noise", "noise"), ("release", "clip, grid, check, noise")):
            (old, old_work), (new, new_work) = seconds[f"{what}, float32"], seconds[f"{what}, exact"]
            print(f"{n:>12,} {label:<24} {old:>10.4f} {new:>10.4f} {new / old:>6.2f} {new_work / old_work:>8.2f}")


def losses() -> None:
    """Prints what the default grid takes from the norm of a LeNet-5 update, clip 1."""
    generator = torch.Generator().manual_seed(0)
    even = torch.randn(LENET5, generator=generator)
    heavy = even.sign() * torch.rand(LENET5, generator=generator).log().abs() ** 2
    print(f"\n{'z':>5} {'norm lost, normal update':>26} {'heavy-tailed update':>22}")
    for z in (1.0, 15.0, 100.0, 127.9):
        print(f"{z:>5g} {norm_lost(even, z):>26.4%} {norm_lost(heavy, z):>22.4%}")
    n = max(SIZES)
    print(f"\ntotal variation of one draw of {n:,} coordinates: {total_variation(n):.1e}")


if __name__ == "__main__":
    asked = arguments(__doc__, rounds=15, threads=1)
    torch.set_num_threads(asked.threads)
    speed(asked.rounds)
    losses()
