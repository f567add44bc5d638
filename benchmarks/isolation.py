"""Seconds a client in a process of its own, beside the same network in one process, in turns.

    python benchmarks/isolation.py [--turns 5] [--steps 20]

Clients of random pictures train each network three times in a row: as it is built in (one process for all), and wrapped in a
module of the user's own with a process, and with a copy, for each client. Each line has the medians of the turns.

With --steps, two clients take so many steps of DP-SGD in each round, and each line has the time of one step: on a copy, in a
process for each client, and with another one for each pass. The two small networks alone are measured.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedveil as fv
from fedveil.models.model_registry import build
from harness import arguments

CASES = {
    "linear, 8 examples": ("linear", (1, 8, 8), 8, 60),
    "LeNet-5, 600 examples": ("lenet5", (1, 28, 28), 600, 10),
    "ResNet-18, 50 examples": ("resnet18", (3, 32, 32), 50, 2),
    "ViT-Small, 16 examples": ("vit-small", (3, 32, 32), 16, 2),
}
"""Network, shape of an example, examples a client, clients."""


class Wrapped(nn.Module):
    """The same network, as code of the user's own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the network inside does."""
        out: torch.Tensor = self.inner(x)
        return out


def data(shape: tuple[int, ...], examples: int, clients: int) -> Any:
    """Random examples of ten classes."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(examples * clients, *shape)).astype(np.float32), rng.integers(0, 10, examples * clients)
    return fv.from_arrays(x, y, client=np.repeat(np.arange(clients), examples), test=(x[:20], np.arange(20) % 10), classes=10)


def seconds(name: str, how: str, turn: int, folder: Path, steps: int) -> float:
    """The mean seconds a client and round, without the first round; a step, if there are steps."""
    network, shape, examples, clients = CASES[name]
    if steps:
        examples, clients = max(examples, 32), 2
    model: Any = network if how == "built in" else Wrapped(build(network, shape, 10, 0))
    marks: list[float] = []
    training: dict[str, Any] = {"rounds": 3, "batch_size": 32, "evaluate_every": 0}
    records = {"local": "dp-sgd", "local_steps": steps} if steps else {}
    config = fv.configure(
        model=model,
        method="fedavg" if steps else {"name": "dp-fedavg", "clip": 1.0},
        training=training | records,
        privacy={"noise_multiplier": 1.0, "delta": 1e-5, "unit": "record" if steps else "client"},
        run={"engine": "inline", "isolation": None if how == "built in" else how},
    )
    fv.train(
        config,
        folder / f"{name} {how} {turn}",
        lambda row: marks.append(time.perf_counter()),
        data=data(shape, examples, clients),
    )
    return (marks[-1] - marks[0]) / (len(marks) - 1) / clients / max(steps, 1)


if __name__ == "__main__":
    asked = arguments(__doc__, turns=5, steps=0)
    ways = ("copy", "process", "pass") if asked.steps else ("built in", "process", "copy")
    for name in list(CASES)[: 2 if asked.steps else None]:
        with tempfile.TemporaryDirectory() as folder:
            turns = [[seconds(name, way, turn, Path(folder), asked.steps) for way in ways] for turn in range(asked.turns)]
        middle = [1000 * statistics.median(times) for times in zip(*turns, strict=True)]
        shown = ", ".join(f"{way} {value:.1f} ms ({value / middle[0]:.2f})" for way, value in zip(ways, middle, strict=True))
        print(f"{name}: {shown}", flush=True)
