"""What the benchmarks share: sides that take turns, so that whatever else the machine does falls on all of them alike.

They measure the engine: nothing is charged, saved or evaluated, and noise comes from a seed unless a program says otherwise.
What that leaves out of a run's round, `whole_run.py` measures.

A side is something that does one round at a time and says what it took: a run of fedveil in this process (`ours`), or a
program that does a round for each line it is sent (`program`), such as the limit program or another library.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.executors.pool import ProcessPool
from fedveil.federation.clients import Clients
from fedveil.federation.fit import one_round
from fedveil.federation.progress import Federation, start
from fedveil.federation.round import Context, Engine
from fedveil.methods.method import Method, extras_of
from fedveil.methods.run_cost import Planner
from fedveil.methods.setting import Setting
from fedveil.models import model_registry as registry
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.release.release_layout import NullLedger
from fedveil.training.local import LocalSpec, OptimizerSpec
from fedveil.training.params import FlatModel
from harness import HERE, keep, kept
from limit import WORKLOADS

Side = Callable[[], tuple[float, float]]
"""One round: seconds on the clock, and seconds that cores worked for it (NaN where the system does not tell)."""


@dataclass(frozen=True)
class Turns:
    """Each side's rounds, in the order in which they took turns: seconds on the clock, and seconds of cores at work."""

    seconds: Mapping[str, list[float]]
    work: Mapping[str, list[float]]

    def ratio(self, side: str, to: str) -> float:
        """Fastest round of `side` over the fastest round of `to`: other load disturbs these least."""
        return min(self.seconds[side]) / min(self.seconds[to])

    def work_ratio(self, side: str, to: str) -> float:
        """The cores' work in all rounds over that of `to`: waiting for a core does not lengthen it; it hides idle cores."""
        return sum(self.work[side]) / (sum(self.work[to]) or math.nan)

    def table(self, to: str) -> dict[str, Any]:
        """Everything, with ratios to one side."""
        return {
            side: {
                "ratio": self.ratio(side, to),
                "work_ratio": self.work_ratio(side, to),
                "seconds": self.seconds[side],
                "work": self.work[side],
            }
            for side in self.seconds
        }

    def line(self, side: str, to: str) -> str:
        """One side beside another, for people."""
        seconds = f"{min(self.seconds[side]):.4f} s beside {min(self.seconds[to]):.4f} s"
        return f"{side:>28}  {self.ratio(side, to):5.2f}   work {self.work_ratio(side, to):5.2f}   ({seconds})"


def take_turns(sides: Mapping[str, Side], rounds: int, warm: int = 1) -> Turns:
    """`rounds` rounds of each side after `warm` uncounted ones, one side after the other, in an order that turns around."""
    turns = Turns({name: [] for name in sides}, {name: [] for name in sides})
    for turn in range(-warm, rounds):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            seconds, work = sides[name]()
            if turn >= 0:
                turns.seconds[name].append(seconds)
                turns.work[name].append(work)
    return turns


def worked(processes: Iterable[int]) -> float:
    """Seconds that cores have worked for these processes (Linux), in the steps of the system's clock (10 ms)."""
    ticks = 0
    for pid in processes:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") or math.nan


def descendants(pid: int) -> list[int]:
    """A process and all below it (Linux)."""
    found = [pid]
    for process in found:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def held_bytes(pid: int) -> int:
    """Bytes that a process holds, of a shared page its part (Linux)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


# --- sides -------------------------------------------------------------------------------------------------------------


def setting(workload: str, view: View = View.AGGREGATE, **changes: Any) -> Setting:
    """The public setting of a workload: all clients in each round; noise multiplier 1 unless `changes` say otherwise."""
    work = WORKLOADS[workload]
    layout = FlatModel(registry.build(work.model, work.shape, 10, 1)).layout
    local = LocalSpec(epochs=work.epochs, batch_size=work.batch, optimizer=OptimizerSpec(lr=work.lr))
    n, scope = work.clients, Scope(Unit.CLIENT, Adjacency.ZERO_OUT, view)
    s = Setting(n, n, 100, "fixed", local, layout, work.examples, 10, scope, 1e-3, noise_multiplier=1.0)
    return replace(s, **changes)


def federation(workload: str, method: Method, s: Setting, seeded: bool = True) -> Federation:
    """A run on random examples of the workload's shapes; nothing is evaluated or charged.

    seeded: noise from a seed, which is as fast as the limit program's; else from the operating system's entropy.
    """
    work, draw = WORKLOADS[workload], np.random.default_rng(0)
    total = work.clients * work.examples
    x = draw.standard_normal((total, *work.shape)).astype(np.float32)
    clients = Clients.of(x, draw.integers(0, 10, total), np.split(np.arange(total), work.clients))
    model = FlatModel(registry.build(work.model, work.shape, 10, 1))
    s, randomness = method.calibrate(s), Randomness(0, seeded)
    door = Door(model.layout, s.scope, "r", NullLedger(), randomness, extras=extras_of(method, s), bits=s.grid_bits)
    summed = s.scope.view is not View.SERVER
    context = Context(
        model, clients, s.local, method.client(s), Planner.of(method.release(s), s), door, randomness, summed, model.buffers()
    )
    return Federation(s, method, context, (clients.x[:10], clients.y[:10]), randomness, evaluate_every=10**9)


@contextmanager
def ours(job: Federation, engine: Engine | None = None) -> Iterator[Side]:
    """Rounds of fedveil: the pool with two workers, or another engine.

    Each round starts from the first model, so that a method whose noise drives training away does no other work than the rest.
    """
    progress = start(job)
    first = progress.model.clone()
    with engine or ProcessPool(job.context, 2) as running:

        def work() -> float:
            return worked([os.getpid(), *(p.pid for p in active_children() if p.pid)])

        def side() -> tuple[float, float]:
            progress.model = first.clone()
            before = work()
            one_round(job, running, progress)
            return float(progress.history[-1]["seconds"]), work() - before

        yield side


@contextmanager
def program(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Iterator[Side]:
    """Rounds of a program that prints `ready` and then answers each line with the seconds of a round.

    Whatever else it prints before `ready` is passed over; what it says on standard error is shown when it fails.
    """
    with subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        sent, answers = process.stdin, process.stdout

        def answer(expected: Callable[[str], bool]) -> str:
            for line in answers:
                if expected(line):
                    return line
            process.kill()
            raise RuntimeError(f"{command} ended:\n{process.stderr.read() if process.stderr else ''}")

        answer(lambda line: line.strip() == "ready")

        def side() -> tuple[float, float]:
            before = worked(descendants(process.pid))
            sent.write("\n")
            sent.flush()
            return float(answer(_number)), worked(descendants(process.pid)) - before

        try:
            yield side
        finally:
            sent.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _number(line: str) -> bool:
    try:
        float(line)
    except ValueError:
        return False
    return True


def limit(workload: str) -> AbstractContextManager[Side]:
    """Rounds of the limit program."""
    return program([sys.executable, HERE / "limit.py", "--lines", "--workload", workload])


@contextmanager
def timed(action: Callable[[], object]) -> Iterator[Side]:
    """What a call in this process takes."""

    def side() -> tuple[float, float]:
        before, start = worked([os.getpid()]), time.perf_counter()
        action()
        return time.perf_counter() - start, worked([os.getpid()]) - before

    yield side


def together(sides: Mapping[str, Any], rounds: int, warm: int = 1) -> Turns:
    """`take_turns` of sides that are context managers, all of them open at once."""
    with ExitStack() as stack:
        return take_turns({name: stack.enter_context(side) for name, side in sides.items()}, rounds, warm)


def wanting() -> float:
    """Other processes that want a core, the mean over a second (Linux; elsewhere the load average of the last minute).

    The load average would count the benchmark that ended a moment ago.
    """
    path, counts = Path("/proc/stat"), []
    if not path.exists():
        return os.getloadavg()[0]
    for _ in range(50):
        time.sleep(0.02)
        counts.append(int(path.read_text().partition("procs_running ")[2].split()[0]) - 1)
    return float(np.mean(counts))


BEFORE = wanting()
"""Processes that wanted a core before this benchmark began; seconds mean little where that is above a half."""

# --- results -----------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What was measured on, with which versions."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in about.splitlines() if "model name" in line]
    packages = dict.fromkeys(("torch", "numpy", "fedveil"), "?")
    for name in packages:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": packages,
        "threads": torch.get_num_threads(),
    }


def save(name: str, table: Mapping[str, Any]) -> None:
    """Put these entries into benchmarks/results/<name>.json, with the machine and how busy it was before each was measured."""
    held = loaded(name)
    loads = {**held["load"], **dict.fromkeys(table, round(BEFORE, 1))}
    keep(name, {"machine": machine(), "table": {**held["table"], **table}, "load": loads})


def loaded(name: str) -> dict[str, Any]:
    """What benchmarks/results/<name>.json holds: `table`, and `load` for each of its entries."""
    return {"table": {}, "load": {}} | kept(name)
