"""Private search under replay: the house's tells only of its best run; searches that leak are caught, each by its world."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from fedveil.accounting.selection import Selection
from fedveil.experiment.config import configure
from fedveil.experiment.result import Result
from fedveil.studies.tune import search as module
from fedveil.studies.tune.search import Chance, SearchSpec
from replayed_search import ALONE, EXCHANGED, Attempt, Kept, replayed_search

SEARCH = Selection(3.0, 0.0)


def spec() -> SearchSpec:
    config = configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 30}, "client_test_fraction": 0.25},
        model={"name": "linear", "start": "zero"},
        method={"name": "dp-fedavg"},
        training={"rounds": 1, "clients_per_round": 10, "sampling": "fixed"},
        privacy={"epsilon": 8.0, "delta": 1e-3},
        run={"engine": "inline"},
    )
    return SearchSpec(config, {"training.optimizer.lr": [0.01, 0.1, 1.0]}, 20.0)


def honest(spec: SearchSpec, out: Path, selection: Selection, chance: Chance, attempt: Attempt) -> None:
    """The house's search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "train", attempt)
        module.private_search(spec, out, selection, chance)


def by_private_score(spec: SearchSpec, out: Path, selection: Selection, chance: Chance, attempt: Attempt) -> None:
    """Chooses by the clients' scores without noise."""

    def bare(config: Any, prepared: Any, folder: Path) -> Result:
        result = attempt(config, prepared, folder)
        return replace(result, selection_score=fmean(a for a in result.history[-1]["client_accuracy"] if a is not None))

    honest(spec, out, selection, chance, bare)


def with_losers(spec: SearchSpec, out: Path, selection: Selection, chance: Chance, attempt: Attempt) -> None:
    """Keeps every run's model."""
    models: list[Path] = []

    def keeping(config: Any, prepared: Any, folder: Path) -> Result:
        result = attempt(config, prepared, folder)
        models.append(shutil.copyfile(folder / "model.safetensors", out.with_name(f"{out.name}-{len(models)}")))
        return result

    honest(spec, out, selection, chance, keeping)
    for i, model in enumerate(models):
        model.rename(out / f"candidate-{i}.safetensors")


def saying_how_often(spec: SearchSpec, out: Path, selection: Selection, chance: Chance, attempt: Attempt) -> None:
    """Writes a line for each run."""
    runs: list[Result] = []

    def counted(config: Any, prepared: Any, folder: Path) -> Result:
        runs.append(attempt(config, prepared, folder))
        return runs[-1]

    honest(spec, out, selection, chance, counted)
    print(f"{len(runs)} runs")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept.of(spec(), SEARCH, tmp_path_factory.mktemp("kept"))


def test_the_search_tells_of_its_best_run_alone(kept: Kept, tmp_path: Path) -> None:
    assert replayed_search(honest, spec(), SEARCH, kept, tmp_path) == {}


def test_a_choice_by_the_private_score_is_caught(kept: Kept, tmp_path: Path) -> None:
    """The runs' raw scores differ, so that exchanging them turns the choice."""
    raw = (0.2, 0.5, 0.9)
    histories = [[*r.history[:-1], {**r.history[-1], "client_accuracy": [a]}] for r, a in zip(kept.results, raw, strict=True)]
    apart = replace(kept, results=[replace(r, history=h) for r, h in zip(kept.results, histories, strict=True)])
    assert "run/config.toml" in replayed_search(by_private_score, spec(), SEARCH, apart, tmp_path)[EXCHANGED]
    assert replayed_search(honest, spec(), SEARCH, apart, tmp_path / "honest") == {}


def test_losers_that_are_kept_are_caught(kept: Kept, tmp_path: Path) -> None:
    assert "candidate-1.safetensors" in replayed_search(with_losers, spec(), SEARCH, kept, tmp_path)[ALONE]


def test_a_number_of_runs_that_shows_is_caught(kept: Kept, tmp_path: Path) -> None:
    assert replayed_search(saying_how_often, spec(), SEARCH, kept, tmp_path) == {ALONE: "what is shown"}
