"""Keys that change no result: one list for resuming, for comparisons and for the groups of a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ConfigError
from fedveil.experiment.config import FREE_KEYS, Config, parse, without_free_keys
from fedveil.experiment.recorded_run import RunData, grouped
from fedveil.experiment.resume import same_run
from fedveil.studies.compare.comparison import default_out

CHANGES: dict[str, Any] = {
    "data.data_dir": "/elsewhere",
    "data.download": False,
    "run.clients_at_once": 3,
    "run.deterministic": True,
    "run.isolation": "copy",
    "run.engine": "pool",
    "run.name": "again",
    "run.plugins": ["own.module"],
    "run.track": ["tensorboard"],
    "training.client_timeout": 9.0,
}
OTHERS: dict[str, Any] = {"training.rounds": 3, "privacy.delta": 1e-6, "run.precision": "bf16", "data.name": "mnist"}


def changed(key: str, value: Any) -> Config:
    section, name = key.split(".")
    return parse({section: {name: value}})


def recorded(config: Config) -> RunData:
    """A run of which nothing but its configuration is known."""
    return RunData(Path("run"), config.model_dump(mode="json"), "", None, [], [], [], [], [], {}, {}, None)


def test_the_list() -> None:
    assert set(CHANGES) == FREE_KEYS
    assert without_free_keys({"run": {"seed": 1, "track": []}, "model": {"name": "x"}}) == {
        "run": {"seed": 1},
        "model": {"name": "x"},
    }


@pytest.mark.parametrize("key", CHANGES)
def test_a_free_key_neither_stops_a_run_nor_moves_a_comparison_nor_splits_a_group(key: str) -> None:
    before, now = Config(), changed(key, CHANGES[key])
    assert before != now
    same_run(before, now, Path("run"))
    assert default_out(before) == default_out(now)
    assert len(grouped([recorded(before), recorded(now)])) == 1


@pytest.mark.parametrize("key", OTHERS)
def test_any_other_key_does(key: str) -> None:
    before, now = Config(), changed(key, OTHERS[key])
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        same_run(before, now, Path("run"))
    assert default_out(before) != default_out(now)
    assert len(grouped([recorded(before), recorded(now)])) == 2


def test_seeds_are_grouped_but_not_resumed() -> None:
    first, second = (parse({"run": {"seed": seed}}) for seed in (1, 2))
    assert len(grouped([recorded(first), replace(recorded(second), path=Path("b"))])) == 1
    assert default_out(first) == default_out(second)
    with pytest.raises(ConfigError, match=r"run\.seed was 1 and is 2"):
        same_run(first, second, Path("run"))
