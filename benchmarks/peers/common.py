"""What the peers' programs share: the workloads of the limit program, their examples, plain local training, and taking turns.

Runs in each peer's own environment and uses nothing of fedveil. The peers train and average; they neither clip nor add noise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from limit import WORKLOADS, Workload, network

__all__ = ["WORKLOADS", "Batches", "Turn", "Workload", "chosen", "examples", "new_model", "serve", "train"]


def chosen() -> Workload:
    """The workload named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=list(WORKLOADS), default="W1")
    return WORKLOADS[parser.parse_args().workload]


def new_model(work: Workload) -> nn.Module:
    """The workload's network, ReLU after pooling."""
    return network(work.model, pool_first=True)


@lru_cache(maxsize=1000)
def examples(work: Workload, client: int) -> tuple[Tensor, Tensor]:
    """Random examples and labels of one client."""
    draw = torch.Generator().manual_seed(client)
    x = torch.randn(work.examples, *work.shape, generator=draw)
    return x, torch.randint(0, 10, (work.examples,), generator=draw)


class Batches:
    """A shuffled pass over one client's examples, gathered once and cut: faster than torch's DataLoader."""

    def __init__(self, work: Workload, client: int) -> None:
        self.dataset, self.y = examples(work, client)
        self.size = work.batch

    def __iter__(self):  # type: ignore[no-untyped-def]
        order = torch.randperm(len(self.y))
        return zip(self.dataset[order].split(self.size), self.y[order].split(self.size), strict=True)


def train(model: nn.Module, work: Workload, client: int) -> None:
    """Local training as a user would write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    for _ in range(work.epochs):
        for x, y in Batches(work, client):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


class Turn:
    """For libraries that keep the loop to themselves: call it after each round, the first of which is to warm up."""

    def __init__(self) -> None:
        self.start: float | None = None

    def __call__(self) -> bool:
        """Answer with the round's seconds and wait for the next line; False when there is none."""
        print("ready" if self.start is None else time.perf_counter() - self.start, file=sys.__stdout__, flush=True)
        more = bool(sys.stdin.readline())
        self.start = time.perf_counter()
        return more


def serve(one: Callable[[], object]) -> None:
    """One round for each line on standard input."""
    turn = Turn()
    one()
    while turn():
        one()
