"""Real runs at the papers' settings, for the "Measured" sections of docs/methods.

    FEDVEIL_DATA=... python benchmarks/papers.py [fedglp ladp fedanc aldp twin] [--jobs 2]

Each run is a run directory under runs/papers/GROUP; finished ones are kept, interrupted ones go on. What was found goes to
benchmarks/results/papers.json. Noise is seeded, so the figures can be had again. Deviations from the papers' settings are in the
overrides below, and in docs/methods.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "runs" / "papers"
OUT = HERE / "results" / "papers.json"


@dataclass(frozen=True)
class Job:
    """One run: a preset with overrides; `twin` measures the global sensitivity instead."""

    group: str
    name: str
    preset: str
    overrides: tuple[str, ...]
    twin: bool = False


def fedglp() -> Iterator[Job]:
    """FedGLP-ADP, Table 1 (Fashion-MNIST), the arms of its Table 5, gamma = 0 of Table 4; on a CNN of half the preset's width.

    With the noise of eight tensors, as these runs were made; the preset's is that of four layers.
    """
    from fedveil.papers.fedglp_adp.claim import accountant_noise_multiplier

    own_tests = ("data.partition.alpha=1.0", "data.client_test_fraction=0.5", "training.personal_on_test_set=false")
    base = ("model.channels=[8, 16]", "model.hidden=64", *own_tests, "training.evaluate_every=20")
    for seed in (1, 2, 3):
        for epsilon in (2.0, 6.0, 16.0):
            sigma = accountant_noise_multiplier(epsilon, 20, 0.1)
            glp = (f"privacy.epsilon={epsilon}", 'method.layers="tensors"')
            arms: dict[str, tuple[str, ...]] = {"fedglp-adp": glp}
            arms["dp-fedavg"] = (
                'method={name="dp-fedavg", clip=0.5}',
                f'privacy={{noise_multiplier={sigma!r}, delta=0.1, allow_vacuous_delta=true, view="aggregate"}}',
                "training.measure_trained=true",
            )
            once = f"noise_multiplier={sigma * 19**0.5!r}, delta=0.1, allow_vacuous_delta=true"  # the noise of 19 rounds in one
            arms["noise-once"] = (arms["dp-fedavg"][0], f'privacy={{{once}, view="aggregate"}}', *arms["dp-fedavg"][2:])
            arms["noise-once"] += ("training.rounds=2", "training.evaluate_every=2")
            arms["glp-only"] = (*glp, 'method.clipping="flat"')
            if epsilon == 6.0:
                arms["gamma-0"] = (*glp, "method.gamma=0")
            for arm, overrides in arms.items():
                yield Job(
                    "fedglp", f"{arm}-{epsilon:g}-{seed}", "fedglp-adp/fashion-mnist", (*base, *overrides, f"run.seed={seed}")
                )
    alone = ('method={name="fedavg"}', "privacy={}", "training.measure_trained=true")
    for seed in (1, 2, 3):
        yield Job("fedglp", f"fedavg-{seed}", "fedglp-adp/fashion-mnist", (*base, *alone, f"run.seed={seed}"))


def ladp() -> Iterator[Job]:
    """LaDP-FL: the CIFAR-10 CNN with and without privacy estimation (P = B in all layers), 60 rounds.

    Claimed epsilon 0.5, and those at which the noise at P = B has the norm (400) or the std (2900) of the paper's Table VII.
    """
    base = ("model.channels=[16, 32]", "model.hidden=128", "training.rounds=60", "training.evaluate_every=5")
    same, chosen = ("method.privacy_estimation=false",), ("method.threshold=1.0",)
    arms = {e: {"ladp-fl": (), "same-noise": same} for e in (0.5, 47.5, 400.0, 2900.0)}
    arms[0.5]["ladp-fl-R1"] = chosen
    for epsilon, mores in arms.items():
        for arm, more in mores.items():
            yield Job("ladp", f"{arm}-{epsilon:g}", "ladp-fl/cifar10-cnn", (*base, f"privacy.epsilon={epsilon}", *more))


def fedanc() -> Iterator[Job]:
    """FedANC: with and without pre-training (Fig. 3), and accuracy on Fashion-MNIST."""
    base = ("training.rounds=30", "privacy.epsilon=2000.0")
    for arm, more in {"pretrained": (), "untrained": ("method.pretraining_steps=0",)}.items():
        yield Job("fedanc", arm, "fedanc/fashion-mnist", (*base, *more))
    yield Job("fedanc", "fedavg", "fedanc/fashion-mnist", ("training.rounds=30", 'method={name="fedavg"}', "privacy={}"))


def aldp() -> Iterator[Job]:
    """ALDP-FL, Table 3: the window on MNIST with LeNet-5, over 12 rounds instead of 80."""
    for window in (2, 3, 4, 5):
        more = (f"method.window={window}", "training.rounds=12", "training.evaluate_every=1")
        yield Job("aldp", f"window-{window}", "aldp-fl/mnist-lenet5", more)


def twin() -> Iterator[Job]:
    """Noisy-FedAvg, Fig. 2 and Table 9 on MNIST with LeNet-5: global sensitivity over 100 rounds; m = 20, K = 5, V = 10."""
    base = ('data.name="mnist"', "training.rounds=100", "training.evaluate_every=100", 'training.schedule="constant"')
    rows = {
        "base": (),
        **{f"K-{k}": (f"training.local_steps={k}",) for k in (10, 20)},
        **{f"V-{v}": (f"training.batch_clip={v}.0",) for v in (1, 5, 20)},
        **{f"schedule-{s}": (f'training.schedule="{s}"',) for s in ("cyclic", "stage-wise", "iterative")},
        **{f"alpha-{a}": ('method.name="noisy-fedprox"', f"method.proximal={a}") for a in (0.01, 0.1, 1.0)},
        **{f"m-{m}": (f"data.partition.clients={m}", f"training.clients_per_round={m}") for m in (10, 40, 80)},
    }
    for name, more in rows.items():
        yield Job("twin", name, "noisy-fedavg/sensitivity-lenet5", (*base, *more), twin=True)


GROUPS: dict[str, Callable[[], Iterator[Job]]] = {"fedglp": fedglp, "ladp": ladp, "fedanc": fedanc, "aldp": aldp, "twin": twin}


def measured(path: Path) -> Path:
    """Where the distances of a twin measurement lie; a name may have a point in it."""
    return path.parent / f"{path.name}.json"


def run(job: Job) -> str:
    """Run the job in a process of one thread unless it is done; returns its name, and the error if there was one."""
    path, data = RUNS / job.group / job.name, os.environ["FEDVEIL_DATA"]
    common = (*job.overrides, f'data.data_dir="{data}"', "run.seeded_noise=true", 'run.engine="inline"')
    if job.twin:
        command = [sys.executable, __file__, "--twin", job.preset, str(path), *common]
        done = measured(path).exists()
    else:
        command = [sys.executable, "-m", "fedveil", "run", "--preset", job.preset, "--quiet"]
        command += ["--resume" if (path / "ledger.sqlite").exists() else "--out", str(path)]
        command += [word for o in common for word in ("--set", o)]
        done = (path / "summary.json").exists()
    if done:
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    print(f"{job.group}/{job.name}: {'done' if ended.returncode == 0 else ended.stderr[-600:]}", flush=True)
    return "" if ended.returncode == 0 else f"{job.group}/{job.name}"


def measure_twin(preset: str, path: Path, overrides: list[str]) -> None:
    """Write the distances of twin runs, round by round."""
    from fedveil.experiment.config_files import chosen, load_config
    from fedveil.studies.twin import twin_sensitivity

    distances = twin_sensitivity(load_config(chosen(None, preset), overrides), 0)
    measured(path).write_text(json.dumps(distances))


def collected() -> dict[str, Any]:
    """Every finished run in numbers: final and, where recorded, per round."""
    from fedveil.experiment.recorded_run import read_run

    found: dict[str, Any] = {}
    keep = ("test_accuracy", "mean_personal_accuracy", "test_f1", "noise_norm", "beta", "gamma", "uplink_bits", "mask_share")
    for job in (job for group in GROUPS.values() for job in group()):
        path = RUNS / job.group / job.name
        if job.twin and measured(path).exists():
            found.setdefault(job.group, {})[job.name] = json.loads(measured(path).read_text())
        elif (path / "summary.json").exists():
            rows = read_run(path).history
            last = {k: rows[-1][k] for k in keep if rows[-1].get(k) is not None}
            curves = {k: [r[k] for r in rows if r.get(k) is not None] for k in ("test_accuracy", "beta", "gamma")}
            statement = json.loads((path / "statement.json").read_text())
            own = next(v for v in statement["views"] if v["proven"]["scope"]["view"] == statement["scope"]["view"])
            found.setdefault(job.group, {})[job.name] = {
                "last": last,
                "curves": curves,
                "claimed": own["claimed"] and own["claimed"]["epsilon"],
                "proven": own["proven"]["epsilon"],
                "rounds": len(rows),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", default=list(GROUPS), help=", ".join(GROUPS))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    jobs = [job for group in options.groups for job in GROUPS[group]()]
    with ThreadPoolExecutor(options.jobs) as pool:
        failed = [name for name in pool.map(run, jobs) if name]
    OUT.write_text(json.dumps(collected(), indent=1))
    print(f"{OUT}: {len(jobs) - len(failed)} of {len(jobs)} runs; failed: {', '.join(failed) or 'none'}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--twin"]:
        measure_twin(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    else:
        main()
