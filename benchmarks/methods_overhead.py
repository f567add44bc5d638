"""A round of every method and variant beside a round of DP-FedAvg in the same view, in turns.

    python benchmarks/methods_overhead.py --workloads W1 --rounds 10
    python benchmarks/methods_overhead.py --workloads W1 --rounds 5 --only fedanc

Writes benchmarks/results/methods.json. In the aggregate view the round's noise is added once to the sum, in the server view
each client adds its own; so methods are compared within a view. What cannot run in a workload's setting is named and left out.
`--profile NAME` shows where a method's round spends its time.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Mapping
from typing import Any

from fedveil.accounting.types import View
from fedveil.errors import ConfigError
from fedveil.executors.inline import Inline
from fedveil.federation.progress import Federation
from fedveil.methods.method_registry import METHODS, method_from
from harness import arguments
from sides import Turns, federation, ours, save, setting, together

ROUNDS = {"W0": 100, "W1": 8, "W2": 3, "W3": 2, "many": 8}
REFERENCE = "dp-fedavg"
CLIPS_BATCHES = ("ladp-fl", "time-varying-dp", "dpa-ldp", "sensitive-dp")
"""Methods that, as published, bound an update by the clip of each batch's gradient."""


def variants() -> list[dict[str, Any]]:
    """The options of every method, published and proven; Noisy-FedAvg and Noisy-FedProx train alike."""
    found: list[dict[str, Any]] = []
    for name, kind in METHODS.items():
        both = "variant" in kind.model_fields and not name.startswith("noisy")
        found += [{"name": name, "variant": v} for v in ("proven", "published")] if both else [{"name": name}]
    return found


def job(workload: str, options: Mapping[str, Any], view: View) -> Federation:
    """A run of one method; it takes as many steps as the workload's epochs, and clips batch gradients where it must."""
    name = str(options["name"])
    changes: dict[str, Any] = {}
    s = setting(workload, view)
    if name.startswith("noisy") or (name in CLIPS_BATCHES and options.get("variant") == "published"):
        steps = s.steps if name.startswith("noisy") else None
        changes["local"] = type(s.local)(s.local.epochs, steps, s.local.batch_size, s.local.optimizer, batch_clip=1.0)
    if options.get("variant") == "published":
        changes |= {"epsilon": 6.0, "noise_multiplier": None}
    if name == "fedavg":
        changes["noise_multiplier"] = None
    return federation(workload, method_from(dict(options)), setting(workload, view, **changes))


def view_of(options: Mapping[str, Any]) -> View:
    """Published variants send each upload to the server; the others are measured with one noise on the sum."""
    return View.SERVER if options.get("variant") == "published" else View.AGGREGATE


def label(options: Mapping[str, Any]) -> str:
    """Name and variant."""
    return " ".join(str(v) for v in options.values())


def compare(workload: str, rounds: int, only: str, view: View) -> Turns:
    """All methods of a view and DP-FedAvg in it."""
    chosen = [o for o in variants() if only in label(o) and view_of(o) is view and label(o) != REFERENCE]
    sides = {REFERENCE: ours(job(workload, {"name": REFERENCE}, view))}
    for options in chosen:
        try:
            sides[label(options)] = ours(job(workload, options, view))
        except ConfigError as problem:
            print(f"{label(options)} left out: {problem}", flush=True)
    return together(sides, rounds, warm=1)


def profile(workload: str, only: str) -> None:
    """Where one inline round goes, the third."""
    for options in variants():
        if only in label(options):
            run = job(workload, options, view_of(options))
            with ours(run, Inline(run.context)) as side:
                side(), side()
                with cProfile.Profile() as found:
                    side()
            print(label(options))
            pstats.Stats(found).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    asked = arguments(__doc__, workloads=["W1", "W3"], rounds=int, only="", profile=str)
    for workload in asked.workloads:
        if asked.profile:
            profile(workload, asked.profile)
        for view in () if asked.profile else (View.AGGREGATE, View.SERVER):
            turns = compare(workload, asked.rounds or ROUNDS[workload], asked.only, view)
            if not asked.only:
                save("methods", {f"{workload} {view.value}": turns.table(REFERENCE)})
            print(f"{workload}, view {view.value}: beside {REFERENCE}")
            for side in turns.seconds:
                print(turns.line(side, REFERENCE), flush=True)
