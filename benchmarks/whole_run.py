"""A round as a user's run does it: secret noise, the budget checked, the ledger charged, a checkpoint and the tables written.

    python benchmarks/whole_run.py                                          # W0 and many, both views, three engines
    python benchmarks/whole_run.py --workloads W0 --views server --engines pool --profile

Writes benchmarks/results/whole_run.json. The other programs measure the engine alone (see `sides.py`); here a round lasts from
one row of the history to the next. The first and the last round, which start workers and evaluate, do not count.
`--profile` shows where the time of the main process goes, and writes nothing; with `--engines inline` that is all of it.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from contextlib import nullcontext
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from fedveil.data.catalogue import info
from fedveil.data.dataset import Dataset
from fedveil.experiment.config import configure
from fedveil.experiment.run import run
from limit import WORKLOADS
from sides import save

ROUNDS = {"W0": 100, "many": 8}
ENGINES = ["pool", "inline", "stacked"]


def measure(workload: str, view: str, engine: str, rounds: int) -> list[float]:
    """Seconds of each round of one run."""
    work, draw, mnist = WORKLOADS[workload], np.random.default_rng(0), info("mnist")
    total = work.clients * work.examples
    x = draw.integers(0, 256, (total, *mnist.input_shape)).astype(np.uint8)
    y = draw.integers(0, 10, total)
    config = configure(
        data={"name": "mnist", "partition": {"kind": "iid", "clients": work.clients}},
        model={"name": work.model},
        method={"name": "dp-fedavg"},
        training={
            "rounds": rounds + 2,
            "clients_per_round": work.clients,
            "sampling": "fixed",
            "local_epochs": work.epochs,
            "batch_size": work.batch,
            "optimizer": {"name": "sgd", "lr": work.lr},
            "evaluate_every": rounds + 2,
        },
        privacy={"noise_multiplier": 1.0, "delta": 0.05 / work.clients, "view": view},
        run={"engine": engine},
    )
    ticks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder) / "run", lambda _: ticks.append(time.perf_counter()), data=Dataset(mnist, x, y, x[:50], y[:50]))
    return [after - before for before, after in pairwise(ticks[:-1])]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(ROUNDS), default=list(ROUNDS))
    parser.add_argument("--views", nargs="+", choices=["aggregate", "server"], default=["aggregate", "server"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for names in product(options.workloads, options.views, options.engines):
        profile = cProfile.Profile() if options.profile else None
        with profile or nullcontext():
            seconds = measure(*names, options.rounds or ROUNDS[names[0]])
        clients = WORKLOADS[names[0]].clients
        least, median = min(seconds) * 1e3, statistics.median(seconds) * 1e3
        print(
            f"{' '.join(names):>22}  least {least:8.2f} ms  median {median:8.2f} ms a round, {median / clients:.2f} ms a client",
            flush=True,
        )
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        else:
            save("whole_run", {" ".join(names): {"clients": clients, "seconds": seconds}})


if __name__ == "__main__":
    main()
