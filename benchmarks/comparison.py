"""The comparison of methods at equal proven guarantee, each tuned by one rule with the same number of looks on MNIST.

    FEDVEIL_DATA=... python benchmarks/comparison.py --workers 16 --minutes 9     # as often as needed: finished runs are kept
    python benchmarks/comparison.py --page                                      # docs/comparison.md and its figure

Every method is tuned by 12 runs on MNIST in the same federation for small epsilons and 12 for large ones (`comparison_space.py`),
then run on Fashion-MNIST at every epsilon with every seed. What is left to do is taken in order of what it tells: all looks, then
seed 1 of everything, then seed 2. Noise is seeded, so the figures can be had again. `--results A B` keeps runs in A and reads
those of B, another machine's, too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from comparison_space import (
    CONTESTS,
    EPSILONS,
    LOOKS,
    METHODS,
    PARTITIONS,
    PRESET,
    PROXY,
    SEEDS,
    STEPS,
    TUNED_AT,
    Setting,
    looks,
    overrides,
)
from fedveil.data.load import load
from fedveil.executors.inline import Inline
from fedveil.experiment.assembly import Prepared, federation, prepare
from fedveil.experiment.config import Config, parse
from fedveil.experiment.config_files import load_config, path_of
from fedveil.experiment.plugins import feature_map
from fedveil.experiment.resolve import data_spec, resolve
from fedveil.federation.evaluation import final_model
from fedveil.federation.fit import fit
from fedveil.federation.progress import Federation, Progress, start
from fedveil.ledger.ledger import Ledger
from fedveil.studies.tune.proxy_grid import proxy_sections

RESULTS = Path(__file__).resolve().parent / "results" / "comparison.json"
OWN_TEST = 0.2
"""Share of each client's examples that it keeps for its own test."""
Found = dict[str, dict[str, Any]]
"""What came of each finished run, by its key."""


class Job(NamedTuple):
    """One run: of a contest, in the phase `tune` or `compare`, with a setting that is a look's number."""

    contest: str
    phase: str
    method: str
    partition: str
    epsilon: float
    seed: int
    look: int

    @property
    def key(self) -> str:
        """Its name among the results. The look of a comparison is a result and no part of the name."""
        parts = (self.contest, self.phase, self.method, self.partition, f"{self.epsilon:g}", str(self.seed))
        return " ".join((*parts, str(self.look)) if self.phase == "tune" else parts)


# --- what is to be done -------------------------------------------------------------------------------------------------


def tuning(contest: str, method: str, tuned_at: float) -> list[Job]:
    """All looks at a method, at one of the epsilons that settings are chosen at."""
    partition = CONTESTS[contest].partitions[0]
    return [Job(contest, "tune", method, partition, tuned_at, SEEDS[0], look) for look in range(LOOKS)]


def choice(found: Found, contest: str, method: str, epsilon: float) -> int | None:
    """The look with the best score on MNIST; None before all were taken, or where none could be."""
    from_contest = CONTESTS[contest].chosen or contest
    looked = tuning(from_contest, method, TUNED_AT[epsilon])
    if any(job.key not in found for job in looked):
        return None
    score = CONTESTS[from_contest].score
    scores = {job.look: float(found[job.key][score]) for job in looked if "error" not in found[job.key]}
    return max(scores, key=lambda look: scores[look]) if scores else None


def jobs(found: Found) -> Iterator[Job]:
    """All runs whose settings are known, those that tell most first: looks, then seed 1 of everything; slow ones at the end."""
    entered = [(contest, method) for contest in CONTESTS for method in CONTESTS[contest].methods]
    entered.sort(key=lambda pair: METHODS[pair[1]].heavy)
    for contest, method in entered:
        if not CONTESTS[contest].chosen:
            for tuned_at in dict.fromkeys(TUNED_AT.values()):
                yield from tuning(contest, method, tuned_at)
    chosen = {(*pair, e): choice(found, *pair, e) for pair in entered for e in EPSILONS}
    for heavy in (False, True):
        for seed in SEEDS:
            for partition in PARTITIONS:
                for contest, method in entered:
                    if partition in CONTESTS[contest].partitions and METHODS[method].heavy == heavy:
                        looked = ((e, chosen[contest, method, e]) for e in EPSILONS)
                        yield from (Job(contest, "compare", method, partition, e, seed, at) for e, at in looked if at is not None)


def all_cells() -> list[Job]:
    """Every run of the comparison, whether or not its setting is known yet."""
    return [
        Job(contest, "compare", method, partition, epsilon, seed, -1)
        for contest, entered in CONTESTS.items()
        for method in entered.methods
        for partition in entered.partitions
        for epsilon in EPSILONS
        for seed in SEEDS
    ]


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
        prepared = data_of(json.dumps({**bare, "run": {"seed": config.run.seed}}))
        with tempfile.TemporaryDirectory() as folder:
            ledger = Path(folder) / "ledger.sqlite"
            Ledger.create(ledger, "r").close()
            assembled = federation(resolve(config, prepared.population), prepared, ledger, "r")
            progress = start(assembled)
            fit(assembled, Inline(assembled.context), progress)
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
    import torch

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


# --- many runs ----------------------------------------------------------------------------------------------------------


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def read(paths: list[Path]) -> Found:
    """The results of all files; the first one's count where two have the same run."""
    found: Found = {}
    for path in reversed(paths):
        if path.exists():
            found |= json.loads(path.read_text(encoding="utf-8"))
    return found


def save(found: Found, path: Path) -> None:
    """Replaced as a whole, so that an interruption leaves the older file."""
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".new")
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(found[key])}" for key in sorted(found))
    fresh.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    fresh.replace(path)


def warm(contest: str, phase: str) -> None:
    """Compute the features of the data set once, before many processes would each."""
    config = configuration(Job(contest, phase, "dp-fedavg", "iid", 1.0, 1, 0))
    features = feature_map(config.data, config.public)
    assert features is not None
    features.of(load(config.data.name, config.data.data_dir, config.data.download))


def next_job(found: Found, running: set[str], phases: tuple[str, ...]) -> Job | None:
    """The first run that is neither finished nor begun."""
    return next((job for job in jobs(found) if job.phase in phases and job.key not in found and job.key not in running), None)


def work(found: Found, path: Path, workers: int, minutes: float, count: int | None, phases: tuple[str, ...]) -> None:
    """Run what is left until the time or the count is up; what has begun by then is finished."""
    end, left = time.monotonic() + 60 * minutes, count if count is not None else 10**9
    if (first := next_job(found, set(), phases)) is None:
        return
    warm(first.contest, first.phase)
    running: dict[Future[dict[str, Any]], Job] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=one_thread) as pool:
        if "compare" in phases:  # beside the first runs, for later ones
            for contest in ("global", "public"):
                pool.submit(warm, contest, "compare")
        while True:
            while len(running) < workers and left > 0 and time.monotonic() < end:
                job = next_job(found, {j.key for j in running.values()}, phases)
                if job is None:
                    break
                running[pool.submit(run, job)], left = job, left - 1
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                found[job.key] = future.result()
                print(f"{len(found):5d}  {job.key}  {found[job.key]}", flush=True)
            save(found, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=1e6, help="start no further run after that long")
    parser.add_argument("--count", type=int, help="start so many runs at most")
    parser.add_argument("--phase", choices=("tune", "compare"), help="only this one; by default both")
    parser.add_argument("--results", type=Path, nargs="+", default=[RESULTS], help="written to the first; all are read")
    parser.add_argument("--again", action="store_true", help="runs that failed are run again")
    parser.add_argument("--page", action="store_true", help="run nothing; write docs/comparison.md and its figure")
    options = parser.parse_args()
    found = read(options.results)
    if options.again:
        found = {key: result for key, result in found.items() if "error" not in result}
    if options.page:
        from comparison_page import write  # draws, and the others need not load what draws

        write(found)
        return
    phases = (options.phase,) if options.phase else ("tune", "compare")
    work(found, options.results[0], options.workers, options.minutes, options.count, phases)
    left = [job for job in all_cells() if job.key not in found]
    print(f"missing cells: {len(left)} of {len(all_cells())}; failed runs: {sum('error' in result for result in found.values())}")


if __name__ == "__main__":
    main()
