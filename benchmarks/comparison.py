"""The comparison of methods at equal proven guarantee, each tuned by one rule with the same number of looks on MNIST.

    FEDVEIL_DATA=... python benchmarks/comparison.py --workers 16     # as often as needed: finished runs are kept
    python benchmarks/comparison.py --page                          # docs/comparison.md and its figure

Every method is tuned by 12 runs on MNIST in the same federation for small epsilons and 12 for large ones (`comparison_space.py`),
then run on Fashion-MNIST at every epsilon with every seed: all looks first, then seed 1 of everything, then seed 2. Noise is
seeded, so the figures can be had again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from functools import lru_cache
from statistics import fmean
from typing import Any

import torch

from comparison_page import write
from comparison_space import (
    CONTESTS,
    PARTITIONS,
    PRESET,
    PROXY,
    STEPS,
    Found,
    Job,
    Setting,
    all_cells,
    all_looks,
    choice,
    looks,
    overrides,
)
from fedveil.data.load import load
from fedveil.experiment.assembly import Prepared, prepare
from fedveil.experiment.config import Config, parse
from fedveil.experiment.config_files import load_config
from fedveil.experiment.plugins import feature_map
from fedveil.experiment.presets import path_of
from fedveil.experiment.resolve import data_spec
from fedveil.federation.evaluation import final_model
from fedveil.federation.progress import Federation, Progress
from fedveil.studies.tune.proxy_grid import proxy_sections
from harness import arguments, fill, kept, trained

OWN_TEST = 0.2
"""Share of each client's examples that it keeps for its own test."""

# --- one run ------------------------------------------------------------------------------------------------------------


def configuration(job: Job) -> Config:
    """The preset in the job's federation, with its setting; on the proxy as `fedveil tune --on` has it."""
    setting: Setting = looks(job.method)[job.look]
    public = json.dumps(CONTESTS[job.contest].public)
    fixed = [f"data.partition={PARTITIONS[job.partition]}", f"public.data={public}", f"privacy.epsilon={job.epsilon}"]
    changed = [*fixed, *overrides(job.method, setting), f"run.seed={job.seed}", "run.seeded_noise=true"]
    own = f"data.client_test_fraction={OWN_TEST}"
    config = load_config(path_of(PRESET), [*changed, own, "training.evaluate_every=1000"])
    return parse(proxy_sections(config, PROXY), [own]) if job.phase == "tune" else config


@lru_cache(maxsize=1)
def data_of(sections: str) -> Prepared:
    """The clients' data, kept for the next run, which mostly has the same."""
    return prepare(data_spec(parse(json.loads(sections))))


def run(job: Job) -> dict[str, Any]:
    """What came of a run: its accuracies in percent, or why it failed."""
    began = time.monotonic()
    try:
        config = configuration(job)
        bare = {"data": config.data.model_dump(mode="json"), "public": config.public.model_dump(mode="json")}
        assembled, progress = trained(config, data_of(json.dumps({**bare, "run": {"seed": config.run.seed}})))
        result = accuracies(assembled, progress, job.partition == "dirichlet")
    except Exception as problem:  # one that cannot be run is a result, and stops no other
        result = {"error": f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else '-'}"}
    return {**result, "look": job.look, "seconds": round(time.monotonic() - began, 1)}


def accuracies(job: Federation, progress: Progress, personal: bool) -> dict[str, float]:
    """In percent: of the global model on the test set and, by the mean over clients, on theirs; of the clients' own models."""
    last = progress.history[-1]
    values = {"accuracy": last["test_accuracy"], "client": fmean(a for a in last["client_accuracy"] if a is not None)}
    if "mean_personal_accuracy" in last:
        values["personal"] = last["mean_personal_accuracy"]
    elif personal:
        values["personal"] = trained_on(job, progress)
    return {name: round(100 * float(value), 3) for name, value in values.items()}


def trained_on(job: Federation, progress: Progress) -> float:
    """Mean accuracy on the clients' own tests after each trained the final model once more on its own examples, for itself."""
    model, clients, tests = job.context.model, job.context.clients, job.client_tests
    assert tests is not None
    first, found = final_model(progress), []
    for client in range(len(clients)):
        (x, y), (own_x, own_y) = clients.examples(client), tests.examples(client)
        if not len(own_y):
            continue
        model.load(first)
        for _ in range(STEPS):
            model.grad.zero_()
            job.context.task.loss(model.module(x), y).backward()  # type: ignore[no-untyped-call]
            model.vector.sub_(job.setting.local.optimizer.lr * model.grad)
        with torch.no_grad():
            found.append(float((model.module(own_x).argmax(1) == own_y).float().mean()))
    return fmean(found)


def warm(contest: str, phase: str) -> None:
    """Compute the features of the data set once, before many processes would each."""
    config = configuration(Job(contest, phase, "dp-fedavg", "iid", 1.0, 1, 0))
    features = feature_map(config.data, config.public)
    assert features is not None
    features.of(load(config.data.name, config.data.data_dir, config.data.download))


def work(found: Found, jobs: Iterable[Job], workers: int) -> None:
    """Do those of the runs that are not finished; the features are computed once, before many processes would each."""
    missing = [job for job in jobs if job.key not in found]
    for contest in dict.fromkeys(job.contest for job in missing):
        warm(contest, missing[0].phase)
    fill("comparison", found, {(job.key,): (run, job) for job in missing}, workers)


if __name__ == "__main__":
    asked, found = arguments(__doc__, workers=os.cpu_count() or 1, page=False), kept("comparison")
    if asked.page:
        write(found)
    else:
        work(found, all_looks(), asked.workers)
        looked = ((job, choice(found, job.contest, job.method, job.epsilon)) for job in all_cells())
        work(found, (job._replace(look=look) for job, look in looked if look is not None), asked.workers)
        left, failed = sum(job.key not in found for job in all_cells()), sum("error" in result for result in found.values())
        print(f"missing cells: {left} of {len(all_cells())}; failed runs: {failed}")
