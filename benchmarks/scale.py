"""Time and memory against the number of clients: 100 a round, a tiny model, both cores.

    python benchmarks/scale.py --clients 1000000 --rounds 20

prints one line of JSON; `rss_mb` is the largest resident size of the main process, `workers_mb` that of its largest worker
(which counts memory shared with the main process again).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from fedveil.data.catalogue import info
from fedveil.data.dataset import Dataset
from fedveil.data.partition import checked_options, from_options
from fedveil.experiment.config import configure
from fedveil.experiment.run import run


def main() -> None:
    """Measure one number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    n = given.clients
    draw, digits = np.random.default_rng(0), info("digits")
    x = draw.integers(0, 17, (n, *digits.input_shape)).astype(np.uint8)
    y = draw.integers(0, 10, n)
    data = Dataset(digits, x, y, x[:500], y[:500])
    config = configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": n}},
        model={"name": "linear"},
        method={"name": "dp-fedavg"},
        training={"rounds": given.rounds, "clients_per_round": min(100, n), "evaluate_every": given.rounds},
        privacy={"noise_multiplier": 1.0, "delta": 0.1 / n},
        run={"engine": "pool"},
    )
    partition = from_options(checked_options({"kind": "iid", "clients": n}), y, seed=0)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = run(config, Path(folder) / "run", data=data, partition=partition)
    seconds = [row["seconds"] for row in result.history]
    sizes = [resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(
        json.dumps(
            {
                "clients": n,
                "rounds": len(seconds),
                "total_seconds": time.perf_counter() - start,
                "round_seconds": statistics.median(seconds),
                "round_seconds_least": min(seconds),
                "rss_mb": sizes[0],
                "workers_mb": sizes[1],
            }
        )
    )


if __name__ == "__main__":
    main()
