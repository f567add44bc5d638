"""Rounds of fedveil's pool and of other libraries, each in its own environment, in turns.

    python benchmarks/peers/install.py
    python benchmarks/peers/compare.py --workloads W0 W1 --rounds 10

Writes benchmarks/results/peers.json. One session for each peer, with ours and the limit program in it, so that no peer's idle
processes disturb another's rounds. Ours clips and adds noise, the peers only train and average. How each is run: the docstring
of its program. Ratios are to ours: above 1 is slower than fedveil.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from fedveil.methods.fedavg import DPFedAvg
from harness import HERE, arguments
from peers.install import interpreter
from sides import Turns, federation, limit, ours, program, save, setting, together

PEERS = dict.fromkeys(("blazefl", "pfl", "fluke", "flower"))
ROUNDS = {"W0": 100, "W1": 10, "W2": 3, "W3": 2}


def compare(peer: str, workload: str, rounds: int) -> Turns:
    """One session."""
    theirs = [interpreter(peer), HERE / "peers" / f"{peer}_rounds.py", "--workload", workload]
    job = federation(workload, DPFedAvg(), setting(workload))
    return together({"fedveil": ours(job), "limit": limit(workload), peer: program(theirs)}, rounds)


if __name__ == "__main__":
    asked = arguments(__doc__, peers=PEERS, workloads=["W0", "W1"], rounds=int)
    for workload, peer in product(asked.workloads, asked.peers):
        try:
            turns = compare(peer, workload, asked.rounds or ROUNDS[workload])
        except (FileNotFoundError, RuntimeError) as error:
            print(f"{workload} {peer}: not measured: {error}", flush=True)
            continue
        save("peers", {f"{workload} {peer}": turns.table("fedveil")})
        print(f"{workload}{turns.line(peer, 'fedveil')}", flush=True)
