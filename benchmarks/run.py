"""Engine `pool`, and `stacked` where `auto` chooses it, beside the limit program, round by round in turns.

    python benchmarks/run.py --workloads W0 W1 --rounds 10

Writes benchmarks/results/engine.json. Ratios are of the fastest rounds, which other load disturbs least.
"""

from __future__ import annotations

import argparse
import sys

from fedveil.executors.pool import ProcessPool
from fedveil.executors.select_engine import settled
from fedveil.methods.fedavg import DPFedAvg
from sides import HERE, Turns, federation, ours, program, save, setting, together

ROUNDS = {"W0": 200, "W1": 15, "W2": 6, "W3": 2, "many": 15}
"""Unless --rounds is given: about ten seconds a side."""


def compare(workload: str, rounds: int) -> Turns:
    """Rounds of both."""
    limit = [sys.executable, HERE / "limit.py", "--lines", "--workload", workload]
    job = federation(workload, DPFedAvg(), setting(workload))
    sides = {"limit": program(limit), "pool": ours(job)}
    if settled("auto", job.context.model, job.context.objective, job.setting) == "stacked":
        sides["stacked"] = ours(job, ProcessPool(job.context, 2, stacked=True))
    return together(sides, rounds)


def main() -> None:
    """Measure and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(ROUNDS), default=list(ROUNDS))
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    for name in options.workloads:
        turns = compare(name, options.rounds or ROUNDS[name])
        save("engine", {name: turns.table("limit")})
        for side in list(turns.seconds)[1:]:
            print(f"{name:>5}{turns.line(side, 'limit')}", flush=True)


if __name__ == "__main__":
    main()
