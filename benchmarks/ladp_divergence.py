"""LaDP-FL's KL divergences of layers: after one client's training, and what a small move of a noisy layer gives.

    FEDVEIL_DATA=... python benchmarks/ladp_divergence.py

Prints the figures of docs/methods/ladp-fl.md.
"""

from __future__ import annotations

import torch

from fedveil.experiment.config import configure
from fedveil.experiment.resolve import resolve
from fedveil.papers.ladp_fl.method import layer_kl
from harness import trained

WEIGHTS, MOVE, DRAWS = 1000, 0.01, 1000
SETTING = configure(
    data={"name": "fashion-mnist", "partition": {"kind": "iid", "clients": 1, "examples_per_client": 600}},
    model="lenet5",
    method="fedavg",
    training={"rounds": 1, "local_epochs": 2, "batch_size": 50, "batch_clip": 20.0, "optimizer": {"lr": 0.1}},
    run={"seed": 1, "engine": "inline"},
)
"""The paper's local training: 2 epochs, batch 50, rate 0.1, G_c = 20; LeNet-5 on 600 images of Fashion-MNIST."""


def moved(std: float) -> tuple[float, float, float]:
    """Median of the largest softmax weight, median and 90 % quantile of the divergence: a layer of noise, moved a little."""
    generator = torch.Generator().manual_seed(1)
    layer = std * torch.randn(DRAWS, WEIGHTS, generator=generator, dtype=torch.float64)
    near = layer + MOVE * torch.randn(DRAWS, WEIGHTS, generator=generator, dtype=torch.float64)
    p, q = torch.log_softmax(near, 1), torch.log_softmax(layer, 1)
    divergence = (p.exp() * (p - q)).sum(1)
    return q.exp().amax(1).median().item(), divergence.median().item(), divergence.quantile(0.9).item()


if __name__ == "__main__":
    first = resolve(SETTING).template()
    divergences = layer_kl(trained(SETTING)[1].model, first.vector, first.layout)
    for name, value in zip(first.layout.names, divergences.tolist(), strict=True):
        print(f"{name:<16}{value:.2g} nats")
    for std in (25.0, 50.0):
        top, middle, high = moved(std)
        what = f"{WEIGHTS} weights of std {std:g}, each moved by {MOVE:g}: largest softmax weight {top:.1%}"
        print(f"{what}, divergence {middle:.2g} nats (median), {high:.2g} (nine tenths below); {DRAWS} draws")
