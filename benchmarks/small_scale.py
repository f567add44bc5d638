"""Whether the small scale of every recipe learns: FedAvg, with plain steps and no noise, in the setting of its rows.

    OMP_NUM_THREADS=1 FEDVEIL_DATA=... python benchmarks/small_scale.py [RECIPE ...] [--seeds 1 2 3] [--set data.name=NAME]

Arms can differ only where something is learned, so FedAvg shall end 20 points above chance; what does not is pointed out.
Settings that two recipes share are run once; of rows that differ in nothing but the number of rounds the longest is. Recipes
that train nothing, attack the first model or count seconds, bits and noise are left out; rows whose data are not here have no
accuracy: --set puts other data in their place. Accuracy is that of the global model. Writes benchmarks/results/small_scale.json,
where finished runs are kept until their settings change; what was set by hand stands beside the recipe's own.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from fedveil.experiment.config import Config
from fedveil.studies.reproduce.measurements import MEASURES
from fedveil.studies.reproduce.recipe import kept as kept_in
from fedveil.studies.reproduce.recipe import rows
from fedveil.studies.reproduce.recipe_files import job_of, load_recipe
from fedveil.studies.reproduce.recipe_list import recipe_names
from fedveil.studies.reproduce.reproduction import chance_of, presence
from harness import accuracy, arguments, keep, kept

MARGIN = 0.2
"""How far above chance FedAvg shall end."""
PLAIN = ('method={name="fedavg"}', "privacy={}", "training.measure_trained=false", "run.engine='inline'")


def settings(name: str, overrides: Sequence[str] = ()) -> Iterator[tuple[str, Config]]:
    """The distinct FedAvg settings of a recipe's small rows, each with the labels of its first row."""
    recipe = load_recipe(name)
    longest: dict[str, tuple[str, Config]] = {}
    for row in rows(recipe):
        if row.missing or not kept_in(recipe, row, "small"):
            continue
        config = job_of(recipe, row, "small", overrides=(*overrides, *PLAIN)).config
        training = config.training.model_copy(update={"rounds": 0, "evaluate_every": 0})
        key = config.model_copy(update={"training": training}).model_dump_json(exclude={"run"})
        if key not in longest or longest[key][1].training.rounds < config.training.rounds:
            longest[key] = (", ".join(row.labels), config)
    yield from longest.values()


def trains(name: str) -> bool:
    """Whether figures of the recipe depend on what is learned; seconds, bits and noise do not."""
    recipe = load_recipe(name)
    measure = recipe.measure["name"]
    if measure == "run":
        return any(column.of not in ("seconds", "noise_norm", "epsilon_of_noise", "beta") for column in recipe.columns)
    return measure == "twin" or (MEASURES[measure].trains and measure != "uplink")


def measured(config: Config, seed: int, found: dict[str, float]) -> float:
    """The accuracy of the last global model with this seed, from `found` if it was run before."""
    training = config.training.model_copy(update={"evaluate_every": config.training.rounds})
    seeded = config.model_copy(update={"training": training, "run": config.run.model_copy(update={"seed": seed})})
    content = seeded.model_dump_json(exclude={"run": True, "data": {"data_dir"}})
    key = f"{hashlib.sha256(content.encode()).hexdigest()[:16]}-{seed}"
    if key not in found:
        found[key] = accuracy(seeded)
    return found[key]


def main() -> None:
    """Every recipe named, row by row."""
    asked = arguments(__doc__, recipe_names(), seeds=[1], set=[])
    results: dict[str, Any] = kept("small_scale", {"runs": {}, "recipes": {}})
    here = functools.cache(lambda name: presence(name, os.environ.get("FEDVEIL_DATA")) == "here")
    for name in (name for name in asked.names if trains(name)):
        table = results["recipes"][", ".join([name, *asked.set])] = {}
        for labels, config in settings(name, asked.set):
            chance = chance_of(config.data.name)
            if not here(config.data.name) or chance is None:
                table[labels] = {"data": config.data.name, "accuracy": None}
                continue
            values = [measured(config, seed, results["runs"]) for seed in asked.seeds]
            table[labels] = {"data": config.data.name, "chance": chance, "accuracy": values}
            keep("small_scale", results)
            enough = "" if min(values) >= chance + MARGIN else "  LESS THAN 20 POINTS ABOVE CHANCE"
            print(f"{name}: {labels}: {', '.join(f'{100 * v:.1f}' for v in values)} %{enough}", flush=True)
    keep("small_scale", results)


if __name__ == "__main__":
    main()
