"""The convergent analysis' attacks after T rounds (Tables 11, 13, 15, 16), at the paper's scale, from one run for each sigma.

    python benchmarks/attacks_along_a_run.py 0.01 --rounds 1000 --data-dir DIR --out OUT    # or 0.1, 0, and 1.0 (Table 11)
    python benchmarks/paper_tables.py OUT                                      # into benchmarks/results

`fedveil reproduce noisy-fedavg/table-13 --scale paper` and its like train a run for each T. A run of 300 rounds passes T = 100
and 200 on its way; its checkpoints there are kept here, and measured as the recipes measure a finished run. So a cell has the
distribution of the recipe's, and the cells of one sigma are of one run, where the recipe's are of runs with noise of their own.
The tables share the run because all are in the server's view, as Table 11 needs it.

Called again with the same OUT, it goes on where the training stopped, and trains nothing if it has passed all the rounds. So
`--tables` alone trains, `--tables 13` then measures one table while another process measures the next, and `--rounds 500` what a
run of 1,000 has passed.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedveil.experiment.config import Config
from fedveil.experiment.resume import has_begun
from fedveil.experiment.run import run
from fedveil.studies.grid import cell_job
from fedveil.studies.reproduce.measurements import MEASURES
from fedveil.studies.reproduce.recipe import Recipe, RecipeRow, collected, rows
from fedveil.studies.reproduce.recipe_files import RowJob, job_of, load_recipe
from fedveil.studies.reproduce.recipe_table import write_results
from fedveil.studies.reproduce.reproduction import Reproduction, RowOutcome

OVERRIDES = ("model.name=lenet5", "training.schedule=constant", "privacy.view=server")
TABLES = ("noisy-fedavg/table-11", "noisy-fedavg/table-13", "noisy-fedavg/table-15", "noisy-fedavg/table-16")
Row = tuple[str, Recipe, RecipeRow, list[str], RowJob]


def chosen(sigma: str, rounds: int, data_dir: Path | None) -> Iterator[Row]:
    """The rows of this sigma on CIFAR-10 that a run of so many rounds passes; the paper does not state the rounds of Table 16."""
    for name in TABLES:
        recipe = load_recipe(name)
        stated = any(axis.name == "T" for axis in recipe.axes)
        overrides = [*OVERRIDES, *([] if stated else [f"training.rounds={rounds}"])]
        for row in rows(recipe):
            if sigma not in row.labels or "CIFAR-100" in row.labels:
                continue
            job = job_of(recipe, row, "paper", data_dir=data_dir, overrides=overrides)
            if job.config.training.rounds <= rounds:
                yield name, recipe, row, overrides, job


def trained(config: Config, rounds: set[int], out: Path) -> None:
    """Train, or go on, and keep the run as it stands after each of these rounds, in OUT/T."""
    path = out / "run"

    def keep(record: dict[str, Any]) -> None:
        done = record["round"] + 1
        if done % 10 == 0:
            print(f"round {done}", flush=True)
        if done in rounds:
            shutil.copytree(path / "checkpoint", out / str(done) / "checkpoint", dirs_exist_ok=True)

    run(config, path, keep, resume=has_begun(path))
    for done in rounds:
        for file in path.glob("ledger.sqlite*"):  # which may be ahead of a checkpoint
            shutil.copy(file, out / str(done))


def main() -> None:
    """Train where the run does not reach, measure, and write a result for each table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sigma", choices=("1.0", "0.1", "0.01", "0"))
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--tables", nargs="*", choices=[name[-2:] for name in TABLES], default=[name[-2:] for name in TABLES])
    parser.add_argument("--engine", choices=("inline", "cuda"), default="inline")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("attacks-along-a-run"))
    asked = parser.parse_args()
    every, out = list(chosen(asked.sigma, asked.rounds, asked.data_dir)), asked.out / f"sigma-{asked.sigma}"
    longest = max((job.config for *_, job in every), key=lambda config: config.training.rounds)
    for *_, job in every:
        same = job.config.model_copy(update={"training": longest.training})
        assert same == longest, f"not a beginning of the same run: {job.config}"
    todo = [row for row in every if row[0][-2:] in asked.tables]
    if not all((out / str(job.config.training.rounds) / "ledger.sqlite").exists() for *_, job in every):
        config = Config.model_validate(cell_job("run", longest, out).arguments["config"])
        config = config.model_copy(update={"run": config.run.model_copy(update={"engine": asked.engine})})
        trained(config, {job.config.training.rounds for *_, job in every}, out)
    results: dict[str, Reproduction] = {}
    for name, recipe, row, overrides, job in todo:
        done = job.config.training.rounds
        measured = MEASURES[recipe.measure["name"]].series(job.config, out / str(done), out / str(done) / "files", **job.options)
        print(name, row.labels, measured, flush=True)
        found = [(collected(measured, column.of, column.collect), column) for column in recipe.columns]
        assert not any(isinstance(value, str) for value, _ in found), found
        values = tuple((value * column.times,) for value, column in found)
        outcome = RowOutcome(row, values, problems=("",) * len(values), measured=measured)
        before = results[name].outcomes if name in results else ()
        left_out = len(rows(recipe)) - len(before) - 1
        outcomes, folder = (*before, outcome), out / name.replace("/", "-")
        results[name] = Reproduction(name, recipe, "paper", 1, tuple(overrides), {}, outcomes, left_out, folder)
    for result in results.values():
        write_results(result)


if __name__ == "__main__":
    main()
