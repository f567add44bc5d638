"""Speed of the ledger on this disk.

    python benchmarks/ledger.py [FOLDER]                # charges a second; opening, verifying and summing up 100,000 rows
    python benchmarks/ledger.py [FOLDER] --rows 1000000 # a run with so many rows: `fedveil ledger`, `certify` and `report` of it

The second form shows seconds and the largest resident size of each command, in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedveil.accounting.types import Adjacency, Gaussian, Scope, Unit, View
from fedveil.experiment.config import configure
from fedveil.experiment.run import run
from fedveil.ledger.budget import Budgets, GdpFilter
from fedveil.ledger.budgeted_ledger import summary
from fedveil.ledger.files import head_path
from fedveil.ledger.ledger import Entry, Ledger

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
    return timeit.repeat(action, number=1, repeat=times)


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


def large_run(folder: Path, rows: int, clients: int) -> Path:
    """The directory of a run of two rounds, whose ledger is replaced by one with `rows` releases of `clients` clients."""
    path = folder / "run"
    found = run(
        configure(
            data={"name": "digits", "partition": {"kind": "iid", "clients": 10}},
            model={"name": "linear"},
            method={"name": "dp-fedavg"},
            training={"rounds": 2, "clients_per_round": 10, "sampling": "fixed"},
            privacy={"noise_multiplier": 1.0, "delta": 1e-3, "view": "server"},
            run={"engine": "inline"},
        ),
        path,
    )
    ledger = path / "ledger.sqlite"
    for file in (ledger, head_path(ledger)):
        file.unlink()
    one = replace(entry(10), adjacency=found.privacy.scope.adjacency)
    with Ledger.create(ledger, "bench") as book:
        for start in range(0, rows, 10_000):
            numbers = range(start, min(rows, start + 10_000))
            book.charge_many([replace(one, round=n // clients, client=n % clients) for n in numbers])
    return path


def commands(path: Path) -> None:
    """Seconds and memory of the commands that read the ledger of a run."""
    for name in ("ledger", "certify", "report"):
        start = time.perf_counter()
        script = "from fedveil.cli.app import main; main()"
        process = subprocess.Popen([sys.executable, "-c", script, name, str(path)], stdout=subprocess.DEVNULL)
        used = os.wait4(process.pid, 0)[2]
        wall, cores = time.perf_counter() - start, used.ru_utime + used.ru_stime
        print(f"fedveil {name}: {wall:.1f} s, {cores:.1f} s of a core, {used.ru_maxrss / 1e3:.0f} MB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="where to write, by default the system's folder for temporary files")
    parser.add_argument("--rows", type=int, help="releases of a run's ledger")
    parser.add_argument("--clients", type=int, default=1000, help="clients of that run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        if given.rows is None:
            main(Path(name))
        else:
            commands(large_run(Path(name), given.rows, given.clients))
