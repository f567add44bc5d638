"""What a release of `fv.Releaser` takes, beside numpy's normal noise; and what is left of an update at equal epsilon.

    python benchmarks/releaser.py --rounds 5

One round times a release, its charge included, and numpy's standard normals in float64 for as many numbers, in turns in one
process that has not imported torch, on one thread. The cosine is that between an update, whose norm is the clip, and the mean of
its releases by all clients in all rounds.
The hand-written Gaussian splits epsilon and delta evenly over the rounds: std = clip sqrt(2 ln(1.25 / delta)) / epsilon each.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import fedveil as fv

LENET5 = 61_706
SIZES = (LENET5, 8_000_000)
EPSILON, DELTA, ROUNDS, CLIENTS, CLIP = 8.0, 1e-5, 20, 12, 1.0


def releaser(folder: Path) -> fv.Releaser:
    """A releaser with a fresh ledger."""
    ledger = Path(tempfile.mkdtemp(dir=folder)) / "site.ledger"
    return fv.Releaser(clip=CLIP, epsilon=EPSILON, delta=DELTA, rounds=ROUNDS, clients=CLIENTS, ledger=ledger)


def update_of(n: int) -> dict[str, np.ndarray]:
    """An update in a random direction, of norm 1."""
    direction = np.random.default_rng(0).normal(size=n)
    return {"weight": (direction / np.linalg.norm(direction)).astype(np.float32)}


def times(n: int, rounds: int, folder: Path) -> tuple[float, float, float]:
    """Median milliseconds of a release and of numpy's noise, and the median of their ratios."""
    release, update, generator = releaser(folder), update_of(n), np.random.default_rng()
    release(update)
    pairs = []
    for _ in range(rounds):
        begin = time.perf_counter()
        release(update)
        between = time.perf_counter()
        generator.standard_normal(n)
        pairs.append((1000 * (between - begin), 1000 * (time.perf_counter() - between)))
    return (*(statistics.median(column) for column in zip(*pairs, strict=True)), statistics.median(a / b for a, b in pairs))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of the angle between two vectors."""
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        for n in SIZES:
            ours, numpys, ratio = times(n, min(rounds, ROUNDS - 1), Path(folder))
            print(f"{n:,} numbers: a release {ours:.1f} ms, numpy's noise {numpys:.1f} ms, ratio {ratio:.1f}")
        std = CLIP * math.sqrt(2 * math.log(1.25 / (DELTA / ROUNDS))) / (EPSILON / ROUNDS)
        update, generator = update_of(LENET5)["weight"].astype(np.float64), np.random.default_rng()
        ours, theirs = np.zeros(LENET5), np.zeros(LENET5)
        for _ in range(CLIENTS):
            release = releaser(Path(folder))
            for _ in range(ROUNDS):
                ours += release({"weight": update})["weight"]
                theirs += update + generator.normal(0, std, LENET5)
        print(f"epsilon {EPSILON:g}, delta {DELTA:g}; mean of {CLIENTS} clients and {ROUNDS} rounds, {LENET5:,} numbers:")
        print(f"  fv.Releaser: std {release.noise_std:.2f} x clip, cosine {cosine(update, ours):.4f}")
        print(f"  by hand: std {std:.2f} x clip, cosine {cosine(update, theirs):.4f}")
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
