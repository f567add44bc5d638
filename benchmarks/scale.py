"""Time and memory against the number of clients: 100 a round, a tiny model, both cores.

    python benchmarks/scale.py                                  # 10^2 to 10^6: table and figure
    python benchmarks/scale.py --clients 1000000 --rounds 20    # one line of JSON
    python benchmarks/scale.py --clients 1000000 --a-round 10000 --view server --rounds 4

`rss_mb` is the largest resident size of the main process, `workers_mb` that of its largest worker (which counts memory shared
with the main process again). Several numbers run one after the other, each in a process of its own, and are written to
benchmarks/results/scale.json and docs/figures/scale.svg.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.catalogue import info
from fedveil.data.dataset import Dataset
from fedveil.data.partition import checked_options, from_options
from fedveil.experiment.config import configure
from fedveil.experiment.run import run
from sides import HERE, save


def main() -> None:
    """Measure one number of clients here, several each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10**k for k in range(2, 7)])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--a-round", type=int, default=100, help="clients a round, on average; of one number of clients only")
    parser.add_argument("--view", choices=["aggregate", "server"], default="aggregate")
    parser.add_argument("--engine", default="pool")
    options = parser.parse_args()
    if len(options.clients) == 1:
        print(json.dumps(measure(options.clients[0], options.rounds, options.a_round, options.view, options.engine)))
        return
    table: dict[str, Any] = {}
    for n in options.clients:
        command = [sys.executable, __file__, "--clients", str(n), "--rounds", str(options.rounds)]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        table[str(n)] = json.loads(line.splitlines()[-1])
        print(line.strip(), flush=True)
    save("scale", table)
    draw(list(table.values()))


def draw(rows: list[dict[str, Any]]) -> None:
    """Round time and memory against the number of clients."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    clients = [row["clients"] for row in rows]
    least = rows[0]["round_seconds_least"]
    axes[0].semilogx(clients, [row["round_seconds_least"] / least for row in rows], "o-")
    axes[0].set(xlabel="clients", ylabel=f"fastest round / that of {clients[0]} clients", ylim=(0, 2))
    axes[1].semilogx(clients, [row["rss_mb"] for row in rows], "o-")
    axes[1].axhline(2000, color="grey", linestyle="--", linewidth=1)
    axes[1].set(xlabel="clients", ylabel="largest resident size, MB", ylim=(0, None))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    path = HERE.parent / "docs" / "figures" / "scale.svg"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def measure(n: int, rounds: int, a_round: int = 100, view: str = "aggregate", engine: str = "pool") -> dict[str, Any]:
    """One run with n clients; a round lasts from one row of the history to the next, with its charges and its checkpoint."""
    random, digits = np.random.default_rng(0), info("digits")
    x = random.integers(0, 17, (n, *digits.input_shape)).astype(np.uint8)
    y = random.integers(0, 10, n)
    data = Dataset(digits, x, y, x[:500], y[:500])
    config = configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": n}},
        model={"name": "linear"},
        method={"name": "dp-fedavg"},
        training={"rounds": rounds, "clients_per_round": min(a_round, n), "evaluate_every": rounds},
        privacy={"noise_multiplier": 1.0, "delta": 0.1 / n, "view": view},
        run={"engine": engine},
    )
    partition = from_options(checked_options({"kind": "iid", "clients": n}), y, seed=0)
    start, ticks = time.perf_counter(), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        result = run(config, Path(folder) / "run", lambda _: ticks.append(time.perf_counter()), data=data, partition=partition)
    seconds = [row["seconds"] for row in result.history]
    whole = [after - before for before, after in pairwise(ticks)]
    sizes = [resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "clients": n,
        "rounds": len(seconds),
        "total_seconds": time.perf_counter() - start,
        "round_seconds": statistics.median(seconds),
        "round_seconds_least": min(seconds),
        "whole_round_seconds": whole,
        "rss_mb": sizes[0],
        "workers_mb": sizes[1],
    }


if __name__ == "__main__":
    main()
