"""Large models as users run them, beside the limit program: memory by client, and where the seconds go.

    python benchmarks/large.py                                  # W3, ResNet-18 with 100 clients, 100 million parameters
    python benchmarks/large.py --workloads mlp100m --rounds 4
    python benchmarks/large.py --whole mlp100m aggregate        # one run, one line of JSON

Writes benchmarks/results/large.json. Everything is on: secret noise, budget, ledger, checkpoint, tables. Whole runs and the
limit take turns, each in processes of its own; ratios are of the fastest rounds. The first round, which starts workers, and the
last one do not count. `memory` is what the run's processes hold at most together, shared pages counted once (Linux); it is
measured in runs of tiny clients, 2 examples each, with 2 to 100 of them a round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.data.catalogue import info
from fedveil.data.dataset import Dataset
from fedveil.executors.pool import ProcessPool
from fedveil.experiment.config import Config, configure
from fedveil.experiment.run import run
from fedveil.federation import fit
from fedveil.federation.checkpoint import Checkpoints
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.release import noise
from fedveil.release.door import Door
from harness import arguments
from limit import WIDTH, WORKLOADS, Workload
from sides import descendants, held_bytes, limit, save, worked

ROUNDS = {"W3": 3, "cohort100": 2, "mlp100m": 6}
TINY = {"cohort100": (10, 50, 100), "mlp100m": (2, 4, 8)}
"""Clients a round of the runs whose memory is compared."""
PHASES: dict[str, tuple[Any, str]] = {
    "clients": (ProcessPool, "_collect"),
    "noise": (noise, "rounded_normal"),
    "door": (Door, "release_sum"),
    "ledger": (BudgetedLedger, "charge_all"),
    "server step": (fit, "_step"),
    "checkpoint": (Checkpoints, "finish"),
}
"""Functions of the main process whose time is told apart; what one of them spends in another counts for the other."""


class Clock:
    """Seconds that the main thread spends in each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = time.perf_counter()

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1] if self._open else "rest"] += now - self._since
        self._since = now

    def __call__(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **more: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **more)
            self._turn()
            self._open.append(phase)
            try:
                return function(*args, **more)
            finally:
                self._turn()
                self._open.pop()

        return timed

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last reading."""
        self._turn()
        found, self.seconds = dict(self.seconds), defaultdict(float)
        return found


def whole(work: Workload, view: str, rounds: int) -> dict[str, Any]:
    """Seconds of each round of one run, and of each phase of each."""
    clock = Clock()
    for phase, (owner, name) in PHASES.items():
        setattr(owner, name, clock(phase, getattr(owner, name)))
    data = examples(work)
    ticks: list[tuple[float, float]] = []
    phases: list[dict[str, float]] = []

    def row(_: Any) -> None:
        ticks.append((time.perf_counter(), worked(descendants(os.getpid()))))
        phases.append(clock.read())

    with tempfile.TemporaryDirectory() as folder:
        run(configuration(work, view, rounds + 2), Path(folder) / "run", row, data=data)
    rounds = [(end - start, done - before) for (start, before), (end, done) in pairwise(ticks[:-1])]
    return {"seconds": [s for s, _ in rounds], "work": [w for _, w in rounds], "phases": phases[1:-1]}


def memory(work: Workload, view: str) -> float:
    """Megabytes that a run of this workload takes at most."""
    tiny = replace(work, examples=2, batch=2)
    with tempfile.TemporaryDirectory() as folder, memory_of_all() as held:
        run(configuration(tiny, view, 3), Path(folder) / "run", data=examples(tiny))
    return max(held) / 2**20


def configuration(work: Workload, view: str, rounds: int, engine: str = "pool") -> Config:
    """The workload as users configure it."""
    mlp = work.model.startswith("mlp")
    local = {"local_epochs": work.epochs, "batch_size": work.batch, "optimizer": {"name": "sgd", "lr": work.lr}}
    return configure(
        data={"name": _data(work), "partition": {"kind": "iid", "clients": work.clients}},
        model={"name": "mlp", "hidden": [WIDTH, WIDTH]} if mlp else {"name": work.model},
        method={"name": "dp-fedavg"},
        training={"rounds": rounds, "evaluate_every": rounds, "clients_per_round": work.clients, "sampling": "fixed", **local},
        privacy={"noise_multiplier": 1.0, "delta": 0.05 / work.clients, "view": view},
        run={"engine": engine},
    )


def examples(work: Workload) -> Dataset:
    """Random images."""
    about, draw = info(_data(work)), np.random.default_rng(0)
    total = work.clients * work.examples
    x = draw.integers(0, 256, (total, *about.input_shape)).astype(np.uint8)
    y = draw.integers(0, 10, total)
    return Dataset(about, x, y, x[:10], y[:10])


def _data(work: Workload) -> str:
    return "mnist" if work.shape[0] == 1 else "cifar10"


@contextmanager
def memory_of_all() -> Iterator[list[int]]:
    """Bytes that this process and all below it hold, a shared page counted once, twice a second."""
    found, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.5):
            total = 0
            for pid in descendants(os.getpid()):
                with suppress(OSError):
                    total += held_bytes(pid)
            found.append(total)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


# --- both --------------------------------------------------------------------------------------------------------------


def measured(*arguments: object) -> dict[str, Any]:
    """What this program prints in a process of its own."""
    command = [sys.executable, __file__, *map(str, arguments)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def compare(workload: str, view: str, rounds: int, turns: int) -> dict[str, Any]:
    """Whole runs and the limit program in turns."""
    memory = {str(n): measured("--memory", workload, view, n)["mb"] for n in TINY.get(workload, ())}
    if not turns:
        return {"memory_by_clients_mb": memory}
    ours: list[dict[str, Any]] = []
    bare: list[tuple[float, float]] = []
    for _ in range(turns):
        with limit(workload) as side:
            bare += [side() for _ in range(rounds)]
        ours.append(measured("--whole", workload, view, "--rounds", rounds))
    seconds, work, phases = ([x for turn in ours for x in turn[key]] for key in ("seconds", "work", "phases"))
    return {
        "ratio": min(seconds) / min(s for s, _ in bare),
        "work_ratio": sum(work) / sum(w for _, w in bare),
        "seconds": seconds,
        "limit": [s for s, _ in bare],
        "phases": phases[seconds.index(min(seconds))],
        "memory_by_clients_mb": memory,
    }


def main() -> None:
    """Measure and print; `--whole` and `--memory` are one process each."""
    asked = arguments(
        __doc__, workloads=ROUNDS, views=["aggregate"], rounds=int, turns=2, whole=[], memory=[]
    )  # turns: 0 for memory alone
    if asked.whole:
        name, view = asked.whole
        print(json.dumps(whole(WORKLOADS[name], view, asked.rounds or ROUNDS[name])))
    elif asked.memory:
        name, view, clients = asked.memory
        print(json.dumps({"mb": memory(replace(WORKLOADS[name], clients=int(clients)), view)}))
    for name, view in () if asked.whole or asked.memory else product(asked.workloads, asked.views):
        found = compare(name, view, asked.rounds or ROUNDS[name], asked.turns)
        save("large", {f"{name} {view}": found})
        print(f"{name} {view}: MB by clients a round {found['memory_by_clients_mb']}", flush=True)
        if "ratio" in found:
            phases = ", ".join(f"{phase} {s:.2f}" for phase, s in sorted(found["phases"].items(), key=lambda item: -item[1]))
            ratios = f"{found['ratio']:.2f} of the limit, work {found['work_ratio']:.2f}"
            print(f"{name} {view}: {ratios}, {min(found['seconds']):.2f} s ({phases})", flush=True)


if __name__ == "__main__":
    main()
