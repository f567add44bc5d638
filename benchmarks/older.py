"""Rounds of this checkout beside rounds of an older one, in turns: does a change cost time?

    git worktree add ../older 51c3e25
    python benchmarks/older.py ../older --workloads W1 W3 --rounds 10

Each checkout runs its own `sides.py` in a process of its own, on the pool with two workers, with secret noise.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from harness import ROOT
from sides import Side, program, together

ROUND = """
import sys
from fedveil import DPFedAvg
from sides import federation, ours, setting
with ours(federation(sys.argv[1], DPFedAvg(), setting(sys.argv[1]), seeded=False)) as side:
    print("ready", flush=True)
    for _ in sys.stdin:
        print(side()[0], flush=True)
"""


def side(root: Path, workload: str) -> AbstractContextManager[Side]:
    """Rounds of one checkout."""
    path = f"{root / 'src'}:{root / 'benchmarks'}"
    return program([sys.executable, "-c", ROUND, workload], {"PYTHONPATH": path})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path, help="another checkout")
    parser.add_argument("--workloads", nargs="+", default=["W1", "W3"])
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    for workload in asked.workloads:
        sides = {name: side(root, workload) for name, root in (("this", ROOT), ("older", asked.older.resolve()))}
        print(workload, together(sides, asked.rounds).line("this", to="older"), flush=True)
