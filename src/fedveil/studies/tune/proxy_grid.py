"""Settings to try, as runs on a public data set with the partition of the data to be protected."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fedveil.data.catalogue import CATALOGUE
from fedveil.errors import ConfigError, nearest
from fedveil.experiment.config import Config, parse, toml_values
from fedveil.experiment.public_setting import population_of, setting_of
from fedveil.studies.cell import Cell

_FIXED = ("privacy", "data", "public", "run")
"""Sections that are not tuned: guarantee, data and randomness."""
_FREE_OF_THESE = ("data.features", "public.components", "run.final_model")


@dataclass(frozen=True)
class TuningSpec:
    """The specification of tuning on a public proxy.

    Args:
        config: configuration to tune; its data are not read. proxy: a public data set of the catalogue.
        grid: values to try by key, `section.key`; every combination is tried. seeds: number of runs of each, from run.seed on.
    """

    config: Config
    proxy: str
    grid: Mapping[str, Sequence[Any]]
    seeds: int = 1

    def __post_init__(self) -> None:
        data = self.config.data
        if self.proxy not in CATALOGUE:
            raise ConfigError(f"--on {self.proxy}: unknown data set{nearest(self.proxy, CATALOGUE)}; see `fedveil data`")
        if self.proxy == data.name and data.source is None:
            raise ConfigError(
                f"--on {self.proxy}: these are the data to be protected, and each run on them, or choice by their test set, "
                f"costs privacy that nobody charged: name another, public data set"
            )
        if self.seeds < 1:
            raise ConfigError(f"--seeds {self.seeds}: try each setting with at least one seed")
        check_grid(self.grid)

    def settings(self) -> list[dict[str, Any]]:
        """Return all combinations of values."""
        return combinations(self.grid)

    def cells(self) -> list[Cell]:
        """Return a cell for each combination and seed on the proxy."""
        sections, first = proxy_sections(self.config, self.proxy), self.config.run.seed
        found = []
        for i, setting in enumerate(self.settings()):
            for seed in range(first, first + self.seeds):
                config = parse(json.loads(json.dumps(sections)), [*overrides(setting), f"run.seed={seed}"])
                found.append(Cell(f"setting-{i}/seed-{seed}", config, {"setting": i, "seed": seed}))
        return found


def check_grid(grid: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a grid that is empty or changes guarantee, data or randomness."""
    if not grid:
        raise ConfigError("nothing to try: give --try section.key=[value, value] at least once")
    for key, values in grid.items():
        if key.partition(".")[0] in _FIXED and key not in _FREE_OF_THESE:
            raise ConfigError(f"--try {key}: guarantee, data and seeds stay as they are; tune keys of other sections")
        if not values:
            raise ConfigError(f"--try {key}: no values; write {key}=[0.1, 0.3]")


def combinations(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return all combinations of the values."""
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def proxy_sections(config: Config, proxy: str) -> dict[str, Any]:
    """Return sections that replace the data by the proxy: as many clients with as many examples, seeded noise, no budget.

    Raises:
        ConfigError: the proxy has too few examples.
    """
    population = population_of(config)
    clients, records = population.clients, setting_of(config, population).known_records
    if clients * records > CATALOGUE[proxy].train_size > 0:
        raise ConfigError(
            f"--on {proxy}: it has {CATALOGUE[proxy].train_size} training examples, and {clients} clients of {records} take "
            f"{clients * records}: name a larger public data set"
        )
    sections = config.model_dump(mode="json")
    partition = dict(config.data.partition)
    if partition["kind"] in ("iid", "users"):
        partition = {"kind": "iid", "clients": clients, "examples_per_client": records}
    sections["data"] |= {"name": proxy, "source": None, "partition": partition, "handed_over": [], "client_test_fraction": 0.0}
    sections["public"]["data"] = [name for name in config.public.data if name != proxy]
    sections["privacy"] |= {"budget": None, "evaluation": None}
    sections["training"]["evaluate_every"] = config.training.rounds
    sections["run"] |= {"seeded_noise": True, "track": []}
    return sections


def overrides(setting: Mapping[str, Any]) -> list[str]:
    """Return the setting as arguments of `--set`."""
    return [f"{key}={json.dumps(value)}" for key, value in setting.items()]


def grid_of(items: Sequence[str]) -> dict[str, list[Any]]:
    """Parse a grid from `section.key=[value, value]`, once for each key.

    Raises:
        ConfigError: an entry has another form, or a key occurs twice.
    """
    grid: dict[str, list[Any]] = {}
    for item in items:
        key, _, text = item.partition("=")
        try:
            values = toml_values(f"values = {text}")["values"]
        except ConfigError:
            values = None
        key = key.strip()
        if not isinstance(values, list) or "." not in key or key in grid:
            raise ConfigError(f"--try {item}: write section.key=[value, value], each key once, such as method.clip=[0.1, 0.3]")
        grid[key] = values
    return grid
