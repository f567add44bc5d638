"""A round as a user's run does it: secret noise, the budget checked, the ledger charged, a checkpoint and the tables written.

    python benchmarks/whole_run.py                                          # W0 and many, both views, three engines
    python benchmarks/whole_run.py --workloads W0 --views server --engines pool --profile

Writes benchmarks/results/whole_run.json. The other programs measure the engine alone (see `sides.py`); here a round lasts from
one row of the history to the next. The first and the last round, which start workers and evaluate, do not count.
`--profile` shows where the time of the main process goes, and writes nothing; with `--engines inline` that is all of it.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import tempfile
import time
from contextlib import nullcontext
from itertools import pairwise, product
from pathlib import Path

from fedveil.experiment.run import run
from harness import arguments
from large import configuration, examples
from limit import WORKLOADS
from sides import save

ROUNDS = {"W0": 100, "many": 8}
CHOICES = {"aggregate": "", "server": ""}, {"pool": "", "inline": "", "stacked": ""}


def measure(workload: str, view: str, engine: str, rounds: int) -> list[float]:
    """Seconds of each round of one run."""
    work, ticks = WORKLOADS[workload], list[float]()
    config = configuration(work, view, rounds + 2, engine)
    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder) / "run", lambda _: ticks.append(time.perf_counter()), data=examples(work))
    return [after - before for before, after in pairwise(ticks[:-1])]


if __name__ == "__main__":
    asked = arguments(__doc__, workloads=ROUNDS, views=CHOICES[0], engines=CHOICES[1], rounds=int, profile=False)
    for names in product(asked.workloads, asked.views, asked.engines):
        profile = cProfile.Profile() if asked.profile else None
        with profile or nullcontext():
            seconds = measure(*names, asked.rounds or ROUNDS[names[0]])
        clients = WORKLOADS[names[0]].clients
        least, median = min(seconds) * 1e3, statistics.median(seconds) * 1e3
        each = f"{median / clients:.2f} ms a client"
        print(f"{' '.join(names):>22}  least {least:8.2f} ms  median {median:8.2f} ms a round, {each}", flush=True)
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        else:
            save("whole_run", {" ".join(names): {"clients": clients, "seconds": seconds}})
