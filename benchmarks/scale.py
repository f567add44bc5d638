"""Time and memory against the number of clients: 100 a round, a tiny model, both cores.

    python benchmarks/scale.py                                  # 10^2 to 10^6: table and figure
    python benchmarks/scale.py --clients 1000000 --rounds 20    # one line of JSON
    python benchmarks/scale.py --clients 1000000 --a-round 10000 --view server --rounds 4

`rss_mb` is the largest resident size of the main process, `workers_mb` that of its largest worker (which counts memory shared
with the main process again). Several numbers run one after the other, each in a process of its own, and are written to
benchmarks/results/scale.json and docs/figures/scale.svg.
"""

from __future__ import annotations

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
from fedveil.drawing import blank, panels, quiet
from fedveil.drawing import save as save_figure
from fedveil.experiment.config import configure
from fedveil.experiment.run import run
from harness import FIGURES, arguments
from sides import save


def draw(rows: list[dict[str, Any]]) -> None:
    """Round time and memory against the number of clients."""
    left, right = panels(figure := blank(8, 3), 2, 2)
    clients, seconds = ([row[key] for row in rows] for key in ("clients", "round_seconds_least"))
    left.semilogx(clients, [s / seconds[0] for s in seconds], "o-")
    left.set(xlabel="clients", ylabel=f"fastest round / that of {clients[0]} clients", ylim=(0, 2))
    right.semilogx(clients, [row["rss_mb"] for row in rows], "o-")
    right.axhline(2000, color="grey", linestyle="--", linewidth=1)
    right.set(xlabel="clients", ylabel="largest resident size, MB", ylim=(0, None))
    quiet(left)
    quiet(right)
    save_figure(figure, FIGURES / "scale.svg")


def measure(n: int, rounds: int, a_round: int, view: str, engine: str) -> dict[str, Any]:
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


def several(clients: list[int], rounds: int) -> dict[str, Any]:
    """Each number of clients in a process of its own."""
    table = {}
    for n in clients:
        command = [sys.executable, __file__, "--clients", str(n), "--rounds", str(rounds)]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        table[str(n)] = json.loads(line)
        print(line, flush=True)
    return table


if __name__ == "__main__":
    asked = arguments(__doc__, clients=[10**k for k in range(2, 7)], rounds=20, a_round=100, view="aggregate", engine="pool")
    if len(asked.clients) == 1:
        print(json.dumps(measure(asked.clients[0], asked.rounds, asked.a_round, asked.view, asked.engine)))
    else:
        found = several(asked.clients, asked.rounds)
        save("scale", found)
        draw(list(found.values()))
