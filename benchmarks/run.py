"""Engine `pool`, and `stacked` where `auto` chooses it, beside the limit program, round by round in turns.

    python benchmarks/run.py --workloads W0 W1 --rounds 10

Writes benchmarks/results/engine.json. Ratios are of the fastest rounds, which other load disturbs least.
"""

from __future__ import annotations

from fedveil.executors.pool import ProcessPool
from fedveil.executors.select_engine import engine_to_record
from fedveil.methods.fedavg import DPFedAvg
from harness import arguments
from sides import Turns, federation, limit, ours, save, setting, together

ROUNDS = {"W0": 200, "W1": 15, "W2": 6, "W3": 2, "many": 15}
"""Unless --rounds is given: about ten seconds a side."""


def compare(workload: str, rounds: int) -> Turns:
    """Rounds of both."""
    job = federation(workload, DPFedAvg(), setting(workload))
    sides = {"limit": limit(workload), "pool": ours(job)}
    if engine_to_record("auto", job.context.model, job.context.objective, job.setting) == "stacked":
        sides["stacked"] = ours(job, ProcessPool(job.context, 2, stacked=True))
    return together(sides, rounds)


if __name__ == "__main__":
    asked = arguments(__doc__, workloads=ROUNDS, rounds=int)
    for name in asked.workloads:
        turns = compare(name, asked.rounds or ROUNDS[name])
        save("engine", {name: turns.table("limit")})
        for side in list(turns.seconds)[1:]:
            print(f"{name:>5}{turns.line(side, 'limit')}", flush=True)
