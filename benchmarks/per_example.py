"""DP-SGD steps at batch 32 beside plain SGD steps: ours, and opacus in its own environment, in turns.

Ours take Poisson batches, 20 of which the mean is 32, and fill up the last pass of each; all others take 32.

    python benchmarks/peers/install.py opacus
    python benchmarks/per_example.py --rounds 15

LeNet-5, an LSTM and a transformer that predict the next of 32 tokens; classes of one's own. One round is 20 steps: forward,
backward, clip of each example, noise, optimiser. Writes benchmarks/results/per_example.json. "Our pooling" is our
LeNet-5: the same layers, with a max-pooling of our own. Opacus's hooks and ghost clipping use its own LSTM and attention.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.nn.functional as F

from fedveil.executors.device import keep_freed_memory
from fedveil.gradients.per_example import per_example_gradients
from fedveil.mechanism.plan import DpSgd
from fedveil.models import model_registry as registry
from fedveil.release.dpsgd import PerExampleGradient
from fedveil.release.noise import Randomness
from fedveil.tasks.classification import Classification
from fedveil.training.local import BatchGradient, GradientSource, Local, LocalSpec, OptimizerSpec
from fedveil.training.params import FlatModel
from harness import HERE, arguments
from limit import LeNet5
from peers.install import interpreter
from sides import Side, Turns, program, save, timed, together
from token_networks import STEPS as LENGTH
from token_networks import TOKENS, TokenLSTM, TokenTransformer

BATCH, STEPS = 32, 20
REFERENCE = "plain"
Make = Callable[[], torch.nn.Module]


def token_losses(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of each text [n]."""
    return F.cross_entropy(scores, targets, reduction="none").mean(1)


def private(network: str) -> GradientSource:
    """Clip 1, noise multiplier 1, from a seed as opacus's default noise."""
    losses = Classification().losses if network == "lenet5" else token_losses
    plan = DpSgd(1.0, 1.0, 1.0, STEPS, BATCH, 100 * BATCH)
    return PerExampleGradient(plan, Randomness(0, True), (0, 0), partial(per_example_gradients, losses_of=losses))


def steps(network: str, module: torch.nn.Module, source: GradientSource) -> AbstractContextManager[Side]:
    """STEPS steps in this process."""
    model = FlatModel(module)
    drawn = torch.binomial(torch.full((STEPS,), 20.0 * BATCH), torch.tensor(1 / 20), generator=torch.Generator().manual_seed(7))
    sizes = drawn.int().tolist() if isinstance(source, PerExampleGradient) else [BATCH] * STEPS
    x, y = torch.randn(max(sizes), 1, 28, 28), torch.randint(0, 10, (max(sizes),))
    if network != "lenet5":
        x, y = (torch.randint(0, TOKENS, (max(sizes), LENGTH)) for _ in range(2))
    spec = LocalSpec(batch_size=BATCH, optimizer=OptimizerSpec(lr=0.05))
    local = Local(model, model.vector.clone(), spec, source, torch.Generator(), examples=BATCH, steps=STEPS)

    def all_steps() -> None:
        for step, size in enumerate(sizes):
            local.step = step
            if isinstance(source, PerExampleGradient):
                source._batch = x[:size], y[:size]
            source(local, x, y)
            local.descend()

    return timed(all_steps)


def own_lenet5() -> torch.nn.Module:
    """The registry's."""
    return registry.build("lenet5", (1, 28, 28), 10, 1)


NETWORKS: dict[str, Make] = {
    "lenet5": lambda: LeNet5(pool_first=True),
    "lstm": TokenLSTM,
    "transformer": TokenTransformer,
    "transformer, learned places": lambda: TokenTransformer(learned=True),
}


def measured(network: str, rounds: int, opacus: bool) -> Turns:
    """All sides of one network, in turns."""
    make = NETWORKS[network]
    sides = {
        REFERENCE: steps(network, make(), BatchGradient()),
        "fedveil": steps(network, make(), private(network)),
    }
    if network == "lenet5":
        sides |= {
            "plain, our pooling": steps(network, own_lenet5(), BatchGradient()),
            "fedveil, our pooling": steps(network, own_lenet5(), private(network)),
        }
    if opacus and "learned" not in network:
        command = [interpreter("opacus"), HERE / "peers" / "opacus_steps.py", "--network", network, "--mode"]
        one = {"OMP_NUM_THREADS": "1"}
        sides |= {f"opacus {mode}": program([*command, mode], one) for mode in ("plain", "hooks", "ghost")}
    return together(sides, rounds)


if __name__ == "__main__":
    asked = arguments(__doc__, NETWORKS, rounds=15, without_opacus=False)
    torch.set_num_threads(1)
    keep_freed_memory()
    for network in asked.names:
        turns = measured(network, asked.rounds, not asked.without_opacus)
        print(network, *(turns.line(side, REFERENCE) for side in turns.seconds), sep="\n", flush=True)
        save("per_example", {network: turns.table(REFERENCE)})
