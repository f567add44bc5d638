"""The score that chooses: noised at the door, charged as what it is, and moved by one client by no more than that."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.accounting.types import Gaussian
from fedveil.errors import ConfigError
from fedveil.experiment.assembly import federation
from fedveil.experiment.config import configure
from fedveil.experiment.resolve import opened
from fedveil.federation import evaluation as module
from fedveil.federation.evaluation import check_score, release_score
from fedveil.federation.progress import Federation, start
from fedveil.ledger.ledger import Ledger
from fedveil.tasks.classification import Classification
from fedveil.tasks.regression import Regression

CLIENTS = 40


def prepared(tmp_path: Path, adjacency: str = "zero_out", noise: float = 4.0) -> Federation:
    config = configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": CLIENTS}, "client_test_fraction": 0.25},
        model={"name": "linear", "start": "zero"},
        method={"name": "dp-fedavg"},
        training={"rounds": 3, "clients_per_round": 10},
        privacy={
            "noise_multiplier": 1.0,
            "delta": 1e-3,
            "adjacency": adjacency,
            "selection": {"runs": 1, "score_noise": noise},
        },
    )
    Ledger.create(tmp_path / "ledger.sqlite", "run").close()
    return federation(*opened(config), tmp_path / "ledger.sqlite", "run")


@pytest.mark.parametrize(("adjacency", "mu"), [("zero_out", 0.25), ("replace_one", 0.5)])
def test_it_is_one_release_of_one_number_charged_by_its_sensitivity(adjacency: str, mu: float, tmp_path: Path) -> None:
    job = prepared(tmp_path, adjacency)
    score = release_score(job, start(job))
    assert score is not None
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ((_, _, entry),) = ledger.entries()
    assert entry.event == Gaussian(mu)
    assert (entry.coordinates, entry.clip, entry.noise_std, entry.participants) == (1, (0.5,), (2.0,), CLIENTS)
    assert job.setting.selection is not None
    assert job.setting.selection.releases([], job.setting.scope.adjacency) == [Gaussian(mu)]


def scores(job: Federation, values: list[float | None], n: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    one_by_one = itertools.cycle(values)
    monkeypatch.setattr(module, "client_score", lambda *_: next(one_by_one))
    free = dataclasses.replace(job.context.door, ledger=Free())
    job = dataclasses.replace(job, context=dataclasses.replace(job.context, door=free))
    return np.array([release_score(job, start(job)) for _ in range(n)])


class Free:
    """A ledger that keeps nothing."""

    def charge_all(self, entries: Any) -> None: ...

    def charge_once(self, entry: Any, *, digest: str) -> None: ...

    def admits(self, client: int, event: Any) -> bool:
        return True


def test_mean_and_spread_are_those_that_the_statement_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[float | None] = [0.9] * (CLIENTS // 2) + [0.5] * (CLIENTS // 2 - 1) + [None]
    found, deviation = scores(prepared(tmp_path), values, 400, monkeypatch), 4.0 / (2 * CLIENTS)
    assert found.mean() == pytest.approx(0.7, abs=5 * deviation / math.sqrt(400))
    assert found.std() == pytest.approx(deviation, rel=0.2)


def test_one_client_moves_the_sum_by_at_most_one_half_whatever_its_software_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepared(tmp_path, noise=0.01)
    quiet: list[float | None] = [0.5] * CLIENTS
    deviation = 0.01 / (2 * CLIENTS)
    for claimed in (1.0, 1000.0, math.nan):
        loud = scores(job, [claimed, *quiet[1:]], 1, monkeypatch)[0]
        assert abs(loud - 0.5) <= 0.5 / CLIENTS + 6 * deviation


def test_a_client_on_whose_examples_the_network_fails_counts_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends would show it, and private selection takes failed runs for released."""
    job = prepared(tmp_path, noise=1e-6)
    each = iter([None, *[1.0] * (CLIENTS - 1)])

    def failing(*_: Any) -> float:
        if (score := next(each)) is None:
            raise ValueError("an example of client 0")
        return score

    monkeypatch.setattr(module, "client_score", failing)
    assert release_score(job, start(job)) == pytest.approx(1 - 0.5 / CLIENTS, abs=1e-4)


def test_who_has_no_share_or_no_tests_is_told_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"data\.client_test_fraction"):
        check_score(Classification(), tests=False)
    with pytest.raises(ConfigError, match="--on"):
        check_score(Regression(), tests=True)


def test_a_run_that_stands_alone_has_no_score(tmp_path: Path) -> None:
    job = prepared(tmp_path)
    alone = dataclasses.replace(job, setting=dataclasses.replace(job.setting, selection=None))
    assert release_score(alone, start(alone)) is None
