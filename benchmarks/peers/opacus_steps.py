"""DP-SGD steps of LeNet-5 at batch 32 by opacus, in opacus's own environment: STEPS of them for each line on standard input.

    python opacus_steps.py --mode ghost

`plain` is torch alone, for the ratio. One thread; glibc keeps freed memory, as on the other sides.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

sys.path.insert(0, str(Path(__file__).parents[1]))
from limit import LeNet5, keep_memory

BATCH, CLIP, NOISE_MULTIPLIER, STEPS = 32, 1.0, 1.0, 20
Step = Callable[[torch.Tensor, torch.Tensor], None]


def plain() -> Step:
    """An SGD step."""
    model = LeNet5(pool_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def hooks() -> Step:
    """Per-example gradients by hooks, kept for the whole model."""
    model = GradSampleModule(LeNet5(pool_first=True))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = DPOptimizer(sgd, noise_multiplier=NOISE_MULTIPLIER, max_grad_norm=CLIP, expected_batch_size=BATCH)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def ghost() -> Step:
    """Norms first, then a second backward pass of the reweighted loss."""
    model = GradSampleModuleFastGradientClipping(LeNet5(pool_first=True), max_grad_norm=CLIP, use_ghost_clipping=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = DPOptimizerFastGradientClipping(
        sgd, noise_multiplier=NOISE_MULTIPLIER, max_grad_norm=CLIP, expected_batch_size=BATCH
    )
    loss = DPLossFastGradientClipping(model, optimizer, torch.nn.CrossEntropyLoss())

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


MODES = {"plain": plain, "hooks": hooks, "ghost": ghost}


def main() -> None:
    """Answer each line with the seconds of STEPS steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=list(MODES), default="ghost")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))
    step = MODES[options.mode]()
    step(x, y)
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(STEPS):
            step(x, y)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
