# ruff: noqa: E402
"""Rounds of fluke's federated averaging, whose clients run one after the other: `python fluke_rounds.py --workload W1`.

fluke imports torchvision and services for logging, none of which is used here; empty stand-ins take their place.
"""

from __future__ import annotations

import os
import sys
from unittest.mock import MagicMock

import torchmetrics  # noqa: F401  (it looks for torchvision by itself, before the stand-ins)

for name in (
    "torchvision",
    "torchvision.datasets",
    "torchvision.transforms",
    "torchvision.models",
    "datasets",
    "wandb",
    "clearml",
):
    sys.modules[name] = MagicMock()
sys.modules["torch.utils.tensorboard"] = MagicMock()

import torch
from fluke import DDict, FlukeENV
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import EarlyStopping, Server

from common import Turn, chosen, examples, new_model


class Turns:
    """Its server's observer."""

    def __init__(self) -> None:
        self.turn = Turn()

    def end_round(self, round: int) -> None:
        """Stop when there are no more lines."""
        if not self.turn():
            raise EarlyStopping(round)

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return lambda *args, **kwargs: None


def main() -> None:
    """Take turns."""
    work = chosen()
    torch.set_num_threads(os.cpu_count() or 1)
    FlukeENV().set_eval_cfg(eval_every=10**9, pre_fit=False, post_fit=False, server=False, locals=False)
    optimizer = OptimizerConfigurator(DDict(name=torch.optim.SGD, lr=work.lr), DDict(name="StepLR", step_size=1, gamma=1.0))
    clients = []
    for i in range(work.clients):
        loader = FastDataLoader(*examples(work, i), num_labels=10, batch_size=work.batch, shuffle=True)
        clients.append(Client(i, loader, None, optimizer, torch.nn.CrossEntropyLoss(), local_epochs=work.epochs))
    server = Server(new_model(work), None, clients)
    for client in clients:
        client.set_channel(server.channel)
    server.attach(Turns())
    server.fit(n_rounds=10**6, eligible_perc=1.0, finalize=False)


if __name__ == "__main__":
    main()
