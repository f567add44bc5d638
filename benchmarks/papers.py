"""Real runs at the papers' settings, for the "Measured" sections of docs/methods.

    FEDVEIL_DATA=... python benchmarks/papers.py [fedglp ladp fedanc aldp twin] [--jobs 2]

Each run is a cell of the grid runs/papers/GROUP; finished ones are kept, interrupted ones go on. What was found goes to
benchmarks/results/papers.json. Noise is seeded, so the figures can be had again. Deviations from the papers' settings are in the
overrides below, and in docs/methods.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from fedveil.experiment.config import Config
from fedveil.experiment.config_files import load_config
from fedveil.experiment.presets import path_of
from fedveil.experiment.recorded_run import read_run
from fedveil.papers.fedglp_adp.claim import accountant_noise_multiplier
from fedveil.studies.cell import Cell, CellState, Listener
from fedveil.studies.grid import run_grid
from fedveil.studies.twin import twin_sensitivity
from harness import ROOT, arguments, fill, keep, kept

RUNS = ROOT / "runs" / "papers"
KEPT = ("test_accuracy", "mean_personal_accuracy", "test_f1", "noise_norm", "beta", "gamma", "uplink_bits", "mask_share")
Job = tuple[str, str, tuple[str, ...]]
"""Name, preset and overrides of a run."""


def fedglp() -> Iterator[Job]:
    """FedGLP-ADP, Table 1 (Fashion-MNIST), the arms of its Table 5, gamma = 0 of Table 4; on a CNN of half the preset's width.

    With the noise of eight tensors, as these runs were made; the preset's is that of four layers.
    """
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
                yield f"{arm}-{epsilon:g}-{seed}", "fedglp-adp/fashion-mnist", (*base, *overrides, f"run.seed={seed}")
    alone = ('method={name="fedavg"}', "privacy={}", "training.measure_trained=true")
    for seed in (1, 2, 3):
        yield f"fedavg-{seed}", "fedglp-adp/fashion-mnist", (*base, *alone, f"run.seed={seed}")


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
            yield f"{arm}-{epsilon:g}", "ladp-fl/cifar10-cnn", (*base, f"privacy.epsilon={epsilon}", *more)


def fedanc() -> Iterator[Job]:
    """FedANC: with and without pre-training (Fig. 3), and accuracy on Fashion-MNIST."""
    base = ("training.rounds=30", "privacy.epsilon=2000.0")
    for arm, more in {"pretrained": (), "untrained": ("method.pretraining_steps=0",)}.items():
        yield arm, "fedanc/fashion-mnist", (*base, *more)
    yield "fedavg", "fedanc/fashion-mnist", ("training.rounds=30", 'method={name="fedavg"}', "privacy={}")


def aldp() -> Iterator[Job]:
    """ALDP-FL, Table 3: the window on MNIST with LeNet-5, over 12 rounds instead of 80."""
    for window in (2, 3, 4, 5):
        more = (f"method.window={window}", "training.rounds=12", "training.evaluate_every=1")
        yield f"window-{window}", "aldp-fl/mnist-lenet5", more


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
        yield name, "noisy-fedavg/sensitivity-lenet5", (*base, *more)


GROUPS: dict[str, Callable[[], Iterator[Job]]] = {"fedglp": fedglp, "ladp": ladp, "fedanc": fedanc, "aldp": aldp, "twin": twin}


def configuration(preset: str, overrides: tuple[str, ...]) -> Config:
    """The preset with the overrides, on the data here, with seeded noise."""
    fixed = (f'data.data_dir="{os.environ["FEDVEIL_DATA"]}"', "run.seeded_noise=true", 'run.engine="inline"')
    return load_config(path_of(preset), [*overrides, *fixed])


def distances(preset: str, overrides: tuple[str, ...]) -> list[float]:
    """Distances of twin runs, round by round."""
    return list(twin_sensitivity(configuration(preset, overrides), 0, "labels"))


def figures(state: CellState) -> dict[str, Any]:
    """A finished run in numbers: final and, where recorded, per round."""
    rows = read_run(state.path).history
    statement = json.loads((state.path / "statement.json").read_text())
    own = next(v for v in statement["views"] if v["proven"]["scope"]["view"] == statement["scope"]["view"])
    return {
        "last": {k: rows[-1][k] for k in KEPT if rows[-1].get(k) is not None},
        "curves": {k: [r[k] for r in rows if r.get(k) is not None] for k in ("test_accuracy", "beta", "gamma")},
        "claimed": own["claimed"] and own["claimed"]["epsilon"],
        "proven": own["proven"]["epsilon"],
        "rounds": len(rows),
    }


class Ended(Listener):
    """Says which runs are done."""

    def changed(self, state: CellState, left: float | None) -> None:
        """One line a run."""
        if state.state in ("done", "failed"):
            print(f"{state.cell.name}: {state.state} {state.error}", flush=True)


if __name__ == "__main__":
    asked, results = arguments(__doc__, GROUPS, jobs=2), kept("papers")
    for group in asked.names:
        found = results.setdefault(group, {})
        if group == "twin":
            fill("papers", results, {("twin", name): (distances, *rest) for name, *rest in twin()}, asked.jobs)
            continue
        cells = [Cell(name, configuration(preset, overrides)) for name, preset, overrides in GROUPS[group]()]
        states = run_grid(cells, RUNS / group, asked.jobs, Ended())
        found |= {state.cell.name: figures(state) for state in states if state.state == "done"}
        keep("papers", results)
        print(f"{group}: {sum(state.state == 'done' for state in states)} of {len(states)} runs")
