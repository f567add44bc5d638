"""Rounds of blazefl's FedAvg, its clients in two threads: `python blazefl_rounds.py --workload W1`."""

from __future__ import annotations

import torch
from blazefl.contrib.fedavg import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer

from common import Batches, chosen, new_model, serve


class Models:
    """Its model selector."""

    def __init__(self, work) -> None:  # type: ignore[no-untyped-def]
        self.work = work

    def select_model(self, model_name: str) -> torch.nn.Module:
        """The one model."""
        return new_model(self.work)


class Examples:
    """Its partitioned data set."""

    def __init__(self, work) -> None:  # type: ignore[no-untyped-def]
        self.work = work

    def get_dataloader(self, type_, cid, batch_size, generator):  # type: ignore[no-untyped-def]
        """One client's batches."""
        return Batches(self.work, cid)


class Quiet(FedAvgThreadPoolClientTrainer):
    """Without its progress bar."""

    def progress_fn(self, it):  # type: ignore[no-untyped-def]
        """Nothing to show."""
        return it


def main() -> None:
    """Take turns."""
    work = chosen()
    torch.set_num_threads(1)
    n = work.clients
    server = FedAvgBaseServerHandler(Models(work), "", Examples(work), 10**9, n, 1.0, "cpu", work.batch, 0)
    clients = Quiet(Models(work), "", Examples(work), "cpu", n, work.epochs, work.batch, work.lr, 0, num_parallels=2)

    def one() -> None:
        clients.local_process(server.downlink_package(), server.sample_clients())
        for package in clients.uplink_package():
            server.load(package)

    serve(one)


if __name__ == "__main__":
    main()
