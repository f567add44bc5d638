"""Several clients at once on a GPU beside one at a time: W3, and LaDP-FL's full setting.

    python benchmarks/gpu.py --rounds 5
    python benchmarks/gpu.py --cpu --rounds 5

LaDP-FL's setting: ResNet-18 on examples of CIFAR-10's shape, 100 clients of 500, 10 a round, 2 epochs in batches of
50, batch gradients clipped, noise on each upload. Its 400 rounds are not run: a few are timed, and the whole is the fastest of
them times 400, without evaluation. The noise is secret, as in a real run, and comes from the CPU; its share is measured by
itself. With --cpu, engine `batched` beside `inline` on W1, one thread each, which needs no GPU. Sides take turns round by round.
Writes benchmarks/results/gpu.json or benchmarks/results/batched_cpu.json.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from fedveil.accounting.types import View
from fedveil.executors.batched import Batched
from fedveil.executors.device import GPU, gpu_problem
from fedveil.executors.inline import Inline
from fedveil.federation.progress import Federation
from fedveil.federation.round import Engine
from fedveil.methods.fedavg import DPFedAvg
from fedveil.methods.method import Method
from fedveil.methods.setting import Setting
from fedveil.papers.ladp_fl.method import LaDPFL
from fedveil.release.noise import Randomness
from fedveil.training.local import Precision
from harness import arguments
from limit import WORKLOADS, Workload
from sides import federation, ours, save, setting, together

LADP = "ladp"
WORKLOADS[LADP] = Workload("resnet18", (3, 32, 32), 100, 500, 50, 2, 0.1)
LADP_ROUNDS, LADP_COHORT = 400, 10
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")


def w3() -> tuple[Method, Setting]:
    """DP-FedAvg on W3."""
    return DPFedAvg(), setting("W3")


def ladp() -> tuple[Method, Setting]:
    """LaDP-FL as published, at epsilon 0.2 a round."""
    s = setting(LADP, View.SERVER, cohort=LADP_COHORT, rounds=LADP_ROUNDS, epsilon=0.2, noise_multiplier=None, delta=0.02)
    return LaDPFL(variant="published"), replace(s, local=replace(s.local, batch_clip=20.0))


def placed(workload: str, method: Method, s: Setting, device: str, precision: Precision = "float32") -> Federation:
    """The run, with its model on `device`."""
    job = federation(workload, method, replace(s, local=replace(s.local, precision=precision)), seeded=workload != LADP)
    return replace(job, context=replace(job.context, model=job.context.model.to(device)))


def compare(workload: str, method_and_setting: tuple[Method, Setting], rounds: int, device: str) -> dict[str, Any]:
    """All clients of a round at once beside one at a time, in each precision; precision is global, so these take no turns."""
    table = {}
    for precision in PRECISIONS:
        sides = {}
        for name, at_once in (("one at a time", 1), ("at once", None)):
            job = placed(workload, *method_and_setting, device, precision)
            engine: Engine = Batched(job.context, at_once)
            sides[name] = ours(job, engine)
        turns = together(sides, rounds)
        print(f"{workload:>5}, {precision:>8} {turns.line('at once', 'one at a time')}", flush=True)
        table[precision] = turns.table("one at a time")
    return table


def noise_seconds(dimension: int, uploads: int) -> float:
    """Seconds for the secret noise of one round's uploads."""
    randomness, begin = Randomness(0), time.perf_counter()
    for _ in range(uploads):
        randomness.normal(dimension)
    return time.perf_counter() - begin


def on_gpu(rounds: int) -> dict[str, Any]:
    """W3, and a few rounds of LaDP-FL's setting with what 400 of them would take."""
    table = {"gpu": torch.cuda.get_device_name(GPU), "W3": compare("W3", w3(), rounds, GPU)}
    full = compare(LADP, ladp(), rounds, GPU)
    noise = noise_seconds(ladp()[1].layout.dimension, LADP_COHORT)
    print(f"secret noise of {LADP_COHORT} uploads on the CPU: {noise:.2f} s a round")
    for precision, sides in full.items():
        for side, row in sides.items():
            row["extrapolated_run_seconds"] = whole = LADP_ROUNDS * min(row["seconds"])
            print(f"{precision:>8}, {side}: {LADP_ROUNDS} rounds, extrapolated from {rounds}: {whole:.0f} s")
    return {**table, LADP: full, "noise_seconds_a_round": noise}


def on_cpu(rounds: int) -> dict[str, Any]:
    """Engine `batched` beside `inline` on W1."""
    torch.set_num_threads(1)
    sides = {}
    for name, kind in (("inline", Inline), ("batched", Batched)):
        job = federation("W1", DPFedAvg(), setting("W1"))
        sides[name] = ours(job, kind(job.context))
    turns = together(sides, rounds)
    print(turns.line("batched", "inline"))
    return turns.table("inline")


if __name__ == "__main__":
    asked = arguments(__doc__, rounds=5, cpu=False)
    if asked.cpu:
        save("batched_cpu", on_cpu(asked.rounds))
    elif problem := gpu_problem():
        raise SystemExit(f"benchmarks/gpu.py needs a GPU, but {problem}; --cpu measures engine batched on the CPU")
    else:
        save("gpu", on_gpu(asked.rounds))
