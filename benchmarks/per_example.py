"""DP-SGD steps at batch 32 beside plain SGD steps, LeNet-5: ours, torch.func's vmap, and opacus in its own environment, in turns.

    python benchmarks/peers/install.py opacus
    python benchmarks/per_example.py --rounds 15

One round is 20 steps: forward, backward, clip of each example, noise, optimiser. Writes benchmarks/results/per_example.json.
All sides train the limit program's network but the last two, which train ours (the same layers, max-pooling of our own).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedveil.engines.memory import keep_freed_memory
from fedveil.models import model_registry as registry
from fedveil.release import per_example
from fedveil.release.dpsgd import PerExampleGradient
from fedveil.release.noise import Randomness
from fedveil.release.plan import DpSgd
from fedveil.training.local import BatchGradient, GradientSource, Local, LocalSpec, OptimizerSpec
from fedveil.training.params import FlatModel
from limit import LeNet5
from peers.install import interpreter
from sides import HERE, Side, program, save, together, worked

BATCH, STEPS = 32, 20
REFERENCE = "plain"


def private(gradients: Callable[..., Any] = per_example.per_example_gradients) -> GradientSource:
    """Clip 1, noise multiplier 1, from a seed as opacus's default noise."""
    return PerExampleGradient(DpSgd(1.0, 1.0, 1.0, STEPS), Randomness(0, True), (0, 0), gradients)


@contextmanager
def steps(module: torch.nn.Module, source: GradientSource) -> Iterator[Side]:
    """STEPS steps in this process."""
    model = FlatModel(module)
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))
    spec = LocalSpec(batch_size=BATCH, optimizer=OptimizerSpec(lr=0.05))
    local = Local(model, model.vector.clone(), spec, source, torch.Generator(), examples=BATCH, steps=STEPS)

    def side() -> tuple[float, float]:
        before, start = worked([os.getpid()]), time.perf_counter()
        for step in range(STEPS):
            local.step = step
            source(local, x, y)
            local.descend()
        return time.perf_counter() - start, worked([os.getpid()]) - before

    yield side


def main() -> None:
    """Measure and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without-opacus", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()

    def theirs() -> LeNet5:
        return LeNet5(pool_first=True)

    def own() -> torch.nn.Module:
        return registry.build("lenet5", (1, 28, 28), 10, 1)

    sides = {
        REFERENCE: steps(theirs(), BatchGradient()),
        "fedveil": steps(theirs(), private()),
        "vmap of grad": steps(theirs(), private(per_example.transformed)),
        "plain, our pooling": steps(own(), BatchGradient()),
        "fedveil, our pooling": steps(own(), private()),
    }
    if not options.without_opacus:
        command = [interpreter("opacus"), HERE / "peers" / "opacus_steps.py", "--mode"]
        one = {"OMP_NUM_THREADS": "1"}
        sides |= {f"opacus {mode}": program([*command, mode], one) for mode in ("plain", "hooks", "ghost")}
    turns = together(sides, options.rounds)
    for side in sides:
        print(turns.line(side, REFERENCE))
    print(f"ours on our pooling: {turns.ratio('fedveil, our pooling', 'plain, our pooling'):.2f} of plain")
    save("per_example", turns.table(REFERENCE))


if __name__ == "__main__":
    main()
