"""Speed of the ledger on this disk: python benchmarks/ledger.py [FOLDER]."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fedveil.accounting.types import Adjacency, Gaussian, Scope, Unit, View
from fedveil.ledger.budget import Budgets, GdpFilter
from fedveil.ledger.ledger import Entry, Ledger, summary

SCOPE = Scope(Unit.CLIENT, Adjacency.REPLACE_ONE, View.SERVER)


def entry(layers: int) -> Entry:
    """A typical upload of a network with this many layers."""
    return Entry(
        *("bench", 0, 3, SCOPE.unit, SCOPE.adjacency, SCOPE.view, Gaussian(1e-4)),
        clip=(1.0,) * layers,
        noise_std=(0.5,) * layers,
        coordinates=100,
        dimension=100,
        participants=10,
    )


def seconds(action: Callable[[], object], times: int) -> list[float]:
    """Wall time of each of several calls."""
    measured = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        measured.append(time.perf_counter() - start)
    return measured


def main(folder: Path) -> None:
    """Print charges a second for several numbers of layers, then opening and summing up a large ledger."""
    with (folder / "sync").open("wb", buffering=0) as file:

        def write_and_sync() -> None:
            file.write(b"x" * 128)
            os.fsync(file.fileno())

        sync = seconds(write_and_sync, 200)
    print(f"one write and sync of this disk: {statistics.median(sync) * 1e3:.2f} ms")
    for layers in (1, 10, 100):
        one = entry(layers)
        with Ledger.create(folder / f"{layers}.db", "bench") as ledger:
            single = seconds(partial(ledger.charge, one), 1000)
            batch = seconds(partial(ledger.charge_many, [one] * 100), 50)
            budgets = Budgets(GdpFilter(8.0, 1e-5), SCOPE)
            budgets.replay(ledger.entries())
            checked = seconds(partial(budgets.charge, ledger, [one]), 500)
        print(
            f"{layers:4d} layers: charge {statistics.median(single) * 1e3:.2f} ms ({1000 / sum(single):,.0f} a second), "
            f"charge_many {5000 / sum(batch):,.0f} rows a second, Budgets.charge {500 / sum(checked):,.0f} a second"
        )
    with Ledger.create(folder / "large.db", "bench") as ledger:
        for _ in range(100):
            ledger.charge_many([entry(10)] * 1000)
    opened = seconds(lambda: Ledger.open(folder / "large.db").close(), 3)
    with Ledger.open(folder / "large.db") as ledger:
        summed = seconds(lambda: summary(ledger), 3)
    size = (folder / "large.db").stat().st_size / 1e6
    print(f"100,000 rows ({size:.0f} MB): open and verify {min(opened):.2f} s, summary {min(summed):.2f} s")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        main(Path(name))
