"""Engine `pool` beside the limit program, interleaved: seconds a round and their ratio.

    python benchmarks/run.py --workloads W0 W1 --rounds 5 --repeats 2

Writes benchmarks/results/engine.json. Ratios are of the fastest rounds, which other load disturbs least.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from limit import WORKLOADS

from fedveil.federation.clients import Clients
from fedveil.federation.fit import Federation, fit, start
from fedveil.federation.pool import Pool
from fedveil.federation.round import Context
from fedveil.local import LocalSpec, OptimizerSpec
from fedveil.methods.base import Setting
from fedveil.methods.dp_fedavg import DPFedAvg
from fedveil.models import registry
from fedveil.params import FlatModel
from fedveil.privacy.types import Adjacency, Scope, Unit, View
from fedveil.release.door import Door
from fedveil.release.noise import Randomness

HERE = Path(__file__).parent


class _Count:
    """Charges nothing: the limit program keeps no ledger either."""

    def charge(self, entry: Any) -> int:
        """Nothing."""
        return 0


def pool(name: str, rounds: int) -> list[float]:
    """Seconds of each round of DP-FedAvg on a workload, after the first."""
    work = WORKLOADS[name]
    draw = np.random.default_rng(0)
    total = work.clients * work.examples
    x = draw.standard_normal((total, *work.shape)).astype(np.float32)
    clients = Clients.of(x, draw.integers(0, 10, total), np.split(np.arange(total), work.clients))
    model = FlatModel(registry.build(work.model, work.shape, 10, 1))
    local = LocalSpec(epochs=work.epochs, batch_size=work.batch, optimizer=OptimizerSpec(lr=work.lr))
    scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
    n = work.clients
    s = Setting(n, n, rounds + 1, "fixed", local, model.layout, work.examples, 10, scope, 1e-3, noise_multiplier=1.0)
    method, randomness = DPFedAvg(), Randomness(0, True)
    door = Door(model.layout, scope, "r", _Count(), randomness)
    context = Context(model, clients, local, method.objective(s), method.policy(s), door, randomness, True, model.buffers())
    job = Federation(s, method, context, (clients.x[:10], clients.y[:10]), evaluate_every=rounds + 1)
    progress = start(job)
    fit(job, Pool(context, 2), progress)
    return [row["seconds"] for row in progress.history[1:]]


def limit(name: str, rounds: int) -> list[float]:
    """The same by the limit program."""
    command = [sys.executable, str(HERE / "limit.py"), "--workload", name, "--rounds", str(rounds)]
    seconds: list[float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["rounds"]
    return seconds


def main() -> None:
    """Measure and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["W0", "W1", "W2", "W3", "many"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    table: dict[str, Any] = {}
    for name in given.workloads:
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(given.repeats):
            theirs += limit(name, given.rounds)
            ours += pool(name, given.rounds)
        table[name] = {"pool": ours, "limit": theirs, "ratio": min(ours) / min(theirs)}
        print(f"{name:>5}  pool {min(ours):.4f} s  limit {min(theirs):.4f} s  ratio {min(ours) / min(theirs):.2f}", flush=True)
    machine = {"platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg(), "torch": torch.__version__}
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "engine.json").write_text(json.dumps({"machine": machine, "workloads": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
