"""LaDP-FL's KL divergences of layers: after one client's training, and what a small move of a noisy layer gives.

    FEDVEIL_DATA=... python benchmarks/ladp_divergence.py

Prints the figures of docs/methods/ladp-fl.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from fedveil.experiment.config import Config, configure
from fedveil.experiment.resolve import resolve
from fedveil.experiment.run import run
from fedveil.papers.ladp_fl.method import layer_kl

WEIGHTS, MOVE, DRAWS = 1000, 0.01, 1000


def setting() -> Config:
    """The paper's local training: 2 epochs, batch 50, rate 0.1, G_c = 20; LeNet-5 on 600 images of Fashion-MNIST."""
    return configure(
        data={"name": "fashion-mnist", "partition": {"kind": "iid", "clients": 1, "examples_per_client": 600}},
        model="lenet5",
        method="fedavg",
        training={"rounds": 1, "local_epochs": 2, "batch_size": 50, "batch_clip": 20.0, "optimizer": {"lr": 0.1}},
        run={"seed": 1, "engine": "inline"},
    )


def trained() -> dict[str, float]:
    """KL(softmax(trained_j) || softmax(initial_j)) of each layer, in nats."""
    config = setting()
    start = resolve(config).template()
    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder) / "run")
        end = load_file(Path(folder) / "run" / "model.safetensors")
    layout = start.layout
    before = start.vector.clone()
    after = torch.cat([end[name].flatten() for name in layout.names])
    return dict(zip(layout.names, layer_kl(after, before, layout).tolist(), strict=True))


def moved(std: float) -> tuple[float, float, float]:
    """Median of the largest softmax weight, median and 90 % quantile of the divergence: a layer of noise, moved a little."""
    generator = torch.Generator().manual_seed(1)
    layer = std * torch.randn(DRAWS, WEIGHTS, generator=generator, dtype=torch.float64)
    near = layer + MOVE * torch.randn(DRAWS, WEIGHTS, generator=generator, dtype=torch.float64)
    p, q = torch.log_softmax(near, 1), torch.log_softmax(layer, 1)
    divergence = (p.exp() * (p - q)).sum(1)
    return q.exp().amax(1).median().item(), divergence.median().item(), divergence.quantile(0.9).item()


def main() -> None:
    """Print both."""
    for name, value in trained().items():
        print(f"{name:<16}{value:.2g} nats")
    for std in (25.0, 50.0):
        top, middle, high = moved(std)
        print(f"{WEIGHTS} weights of std {std:g}, each moved by {MOVE:g}: largest softmax weight {top:.1%}, "
              f"divergence {middle:.2g} nats (median), {high:.2g} (nine tenths below); {DRAWS} draws")  # fmt: skip


if __name__ == "__main__":
    main()
