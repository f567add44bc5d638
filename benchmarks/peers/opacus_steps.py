"""DP-SGD steps at batch 32 by opacus, in opacus's own environment: STEPS of them for each line on standard input.

    python opacus_steps.py --mode ghost --network lenet5

`plain` is torch alone, for the ratio; the others use opacus's own LSTM and attention. One thread; glibc keeps freed memory, as
on the other sides.
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
from opacus.layers import DPLSTM, DPMultiheadAttention
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

sys.path.insert(0, str(Path(__file__).parents[1]))
from limit import LeNet5, keep_memory
from token_networks import STEPS as LENGTH
from token_networks import TOKENS, TokenLSTM, TokenTransformer

BATCH, CLIP, NOISE_MULTIPLIER, STEPS = 32, 1.0, 1.0, 20
Step = Callable[[torch.Tensor, torch.Tensor], None]
NETWORKS = {
    "lenet5": (lambda: LeNet5(pool_first=True),) * 2,
    "lstm": (TokenLSTM, lambda: TokenLSTM(DPLSTM)),
    "transformer": (TokenTransformer, lambda: TokenTransformer(DPMultiheadAttention)),
}
"""Each as torch's own, and as opacus can do it."""


def plain(network: str) -> Step:
    """An SGD step."""
    model = NETWORKS[network][0]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def hooks(network: str) -> Step:
    """Per-example gradients by hooks, kept for the whole model."""
    model = GradSampleModule(NETWORKS[network][1]())
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = DPOptimizer(sgd, noise_multiplier=NOISE_MULTIPLIER, max_grad_norm=CLIP, expected_batch_size=BATCH)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def ghost(network: str) -> Step:
    """Norms first, then a second backward pass of the reweighted loss."""
    model = GradSampleModuleFastGradientClipping(NETWORKS[network][1](), max_grad_norm=CLIP, use_ghost_clipping=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = DPOptimizerFastGradientClipping(
        sgd, noise_multiplier=NOISE_MULTIPLIER, max_grad_norm=CLIP, expected_batch_size=BATCH
    )
    loss = DPLossFastGradientClipping(model, optimizer, torch.nn.CrossEntropyLoss())

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        scores, labels, shape = model(x), y, None
        if scores.dim() == 3:
            scores, labels, shape = scores.mT.flatten(0, 1), y.flatten(), y.shape
        loss(scores, labels, shape=shape).backward()
        optimizer.step()

    return step


MODES = {"plain": plain, "hooks": hooks, "ghost": ghost}


def main() -> None:
    """Answer each line with the seconds of STEPS steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=list(MODES), default="ghost")
    parser.add_argument("--network", choices=list(NETWORKS), default="lenet5")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))
    if options.network != "lenet5":
        x, y = (torch.randint(0, TOKENS, (BATCH, LENGTH)) for _ in range(2))
    step = MODES[options.mode](options.network)
    step(x, y)
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(STEPS):
            step(x, y)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
