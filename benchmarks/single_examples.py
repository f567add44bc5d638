"""A step of DP-SGD whose gradients of single examples are taken by four ways in turns: those of docs/models.md, and torch's own.

    python benchmarks/single_examples.py --rounds 15

"In a batch" is how built-in networks and an `nn.Sequential` of torch's layers are computed; "one call each" how any other network
is, to which the same networks are handed here; "vmap alone" is `torch.func`, "loop" one backward pass for each example. A step
has clip and noise besides. Ratios are to one call each: above 1 the other way is slower. Writes results/single_examples.json.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from fedveil.executors.device import keep_freed_memory
from fedveil.gradients import per_example
from fedveil.gradients.gradient_blocks import Block, Dense
from fedveil.gradients.per_example import one_by_one, vectorised
from fedveil.mechanism.plan import DpSgd
from fedveil.models import model_registry as registry
from fedveil.release.dpsgd import PerExampleGradient
from fedveil.release.noise import Randomness
from fedveil.tasks.classification import Classification
from fedveil.training.local import Local, LocalSpec
from fedveil.training.params import FlatModel
from harness import arguments
from sides import Side, save, timed, together

REFERENCE = "one call each"
losses_of = Classification().losses
Gradients = Callable[[nn.Module, Tensor, Tensor], tuple[list[Block], Tensor]]


class LeNet5(nn.Module):
    """LeNet-5 as a class of a user's own, with averages and tanh as published."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = F.avg_pool2d(torch.tanh(self.conv1(x)), 2)
        x = F.avg_pool2d(torch.tanh(self.conv2(x)), 2).flatten(1)
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))  # type: ignore[no-any-return]


class Wide(nn.Module):
    """A perceptron of 1.9 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(784, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 10)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)  # type: ignore[no-any-return]


def vmap_alone(net: nn.Module, x: Tensor, y: Tensor) -> tuple[list[Block], Tensor]:
    """As torch's documentation computes it."""
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return losses_of(functional_call(net, weights, (one[None],)), target[None])[0]

    found, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")(weights, x, y)
    return [Dense(each.flatten(1)) for each in found.values()], losses


WAYS: dict[str, Gradients] = {
    "in a batch": partial(per_example.gradients, losses=losses_of),
    REFERENCE: partial(vectorised, losses_of=losses_of),
    "vmap alone": vmap_alone,
    "loop": partial(one_by_one, losses_of=losses_of),
}
SHAPES = {"cnn3": (3, 32, 32), "resnet18": (3, 32, 32)}
BATCHES = {"resnet18": 8, "vit-small": 8}
OWN: dict[str, Callable[[], nn.Module]] = {"LeNet-5, a class": LeNet5, "wide perceptron, a class": Wide}
NETWORKS = ("linear", "mlp", "lenet5", "cnn2", "cnn3", "resnet18", "vit-small", *OWN)


def steps(net: nn.Module, shape: tuple[int, ...], expected: int, gradients: Gradients) -> AbstractContextManager[Side]:
    """One step, on a full pass of examples."""
    model, plan = FlatModel(net), DpSgd(1.0, 1.0, 1.0, 1, expected, 100 * expected)
    source = PerExampleGradient(plan, Randomness(0, True), (0, 0), gradients)
    local = Local(model, model.vector.clone(), LocalSpec(), source, torch.Generator())
    x, y = torch.randn(plan.together, *shape), torch.randint(0, 10, (plan.together,))

    def step() -> None:
        source._batch = x, y
        source(local, x, y)

    return timed(step)


if __name__ == "__main__":
    asked = arguments(__doc__, NETWORKS, rounds=15, batch=64)
    torch.set_num_threads(1)
    keep_freed_memory()
    for name in asked.names:
        shape, n = SHAPES.get(name, (1, 28, 28)), BATCHES.get(name, asked.batch)
        torch.manual_seed(1)
        net = OWN[name]() if name in OWN else registry.build(name, shape, 10, 1)
        ways = {way: make for way, make in WAYS.items() if way != "in a batch" or per_example.known(net)}
        turns = together({way: steps(net, shape, n, make) for way, make in ways.items()}, asked.rounds)
        print(f"{name}, batch {n}", *(turns.line(way, REFERENCE) for way in turns.seconds), sep="\n", flush=True)
        save("single_examples", {name: turns.table(REFERENCE)})
