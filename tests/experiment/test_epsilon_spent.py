"""The column `epsilon_spent`: what the ledger's releases prove after each round, and the statement's number at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from federation_runs import config as one
from federation_runs import covering, every_method, prepared, small_digits
from fedveil.accounting.accountant import bound
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Adjacency, Event, Gaussian, SampledGaussian, Unbounded
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify
from fedveil.experiment.config import Config
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.run import run
from fedveil.experiment.spending import EpsilonSpent
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.ledger import Ledger
from fedveil.methods.method_registry import METHODS


def with_training(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def accepted(config: Config) -> bool:
    try:
        calibrated_setting(config, prepared(config).population)
    except ConfigError:
        return False
    return True


def whole_plans() -> Iterator[tuple[str, Config]]:
    """Every method of the registry in every view, where all clients take part in all rounds, and sampled sums."""
    for name, config in every_method():
        everybody = config if "banded-mf" in name else with_training(config, clients_per_round=None)
        yield name, everybody
        sampled = with_training(config, clients_per_round=3, sampling="poisson")
        if not name.endswith("server") and accepted(sampled):
            yield f"{name}-poisson", sampled
    records = {"unit": "record", "delta": 1e-5}
    for view in ("server", "aggregate"):
        yield f"dp-sgd-{view}", one({"name": "dp-fedavg"}, view, training={"local": "dp-sgd"}, privacy=records)
    most = {"max_participations": 2}
    yield "two participations", one({"name": "dp-fedavg"}, "server", training={"clients_per_round": None}, privacy=most)


PLANS = dict(whole_plans())


def test_the_registry_is_covered() -> None:
    assert len([name for name in PLANS if name.endswith("poisson")]) >= 6
    assert {name for name in METHODS if not any(plan.startswith(name) for plan in PLANS)} == set()


@pytest.mark.few(10)
@pytest.mark.parametrize("name", covering(PLANS, 1))
def test_at_the_end_it_is_the_statements_number(name: str, tmp_path: Path) -> None:
    result = run(PLANS[name], tmp_path / "run", data=small_digits())
    column = [row.get("epsilon_spent") for row in result.history]
    proven = result.privacy.proven.epsilon
    if math.isinf(proven):
        assert set(column) == {None}
        return
    assert column[-1] == pytest.approx(proven, rel=1e-6, abs=1e-6)
    assert all(0 < a <= b * (1 + 1e-9) for a, b in pairwise(column))
    assert read_run(result.path).history[-1]["epsilon_spent"] == column[-1]


class Book:
    """A ledger of one event a round."""

    def __init__(self, event: Event) -> None:
        self.event, self.held = event, 0

    def charged_since(self, since: int) -> Iterator[tuple[int, int, Event]]:
        for number in range(since + 1, self.held + 1):
            yield number, -1, self.event


def curve(config: Config, event: Event, rounds: int) -> tuple[list[float], float]:
    """The column over so many rounds that charge `event`, and the statement's number."""
    method, setting = calibrated_setting(config)
    statement, book = certify(method, setting), Book(event)
    spending = EpsilonSpent(cast(BudgetedLedger, book), method, setting, statement)
    column = []
    for t in range(rounds):
        book.held += 1
        column.append(spending.after(t)["epsilon_spent"])
    return column, statement.proven.epsilon


SAMPLED = {"rounds": 60, "clients_per_round": 2, "sampling": "poisson"}


def test_sampled_sums_are_bounded_between_exact_and_renyi_and_grow() -> None:
    config = one({"name": "dp-fedavg"}, "aggregate", training=SAMPLED, privacy={"epsilon": None, "noise_multiplier": 1.0})
    column, proven = curve(config, SampledGaussian(1 / 3, 1.0, 1), 60)
    assert column == sorted(column)
    assert column[-1] == proven
    for t in (1, 5, 19, 20, 21, 40, 59):
        events = [SampledGaussian(1 / 3, 1.0, t)]
        exact, renyi = (bound(events, 0.01, accountant=a, adjacency=Adjacency.ZERO_OUT)[0] for a in ("pld", "rdp"))
        assert exact * (1 - 1e-9) <= column[t - 1] <= renyi * (1 + 1e-3)
        if t in (20, 40):
            assert column[t - 1] == pytest.approx(exact, rel=1e-6), "a knot is composed exactly"


def test_what_is_charged_beyond_the_plan_counts() -> None:
    """A round that is done again with new noise after a crash is charged twice."""
    for training, event in (
        (SAMPLED, SampledGaussian(1 / 3, 1.0, 1)),
        ({"rounds": 60, "clients_per_round": None}, Gaussian(1.0)),
    ):
        config = one({"name": "dp-fedavg"}, "aggregate", training=training, privacy={"epsilon": None, "noise_multiplier": 1.0})
        column, proven = curve(config, event, 62)
        assert column[59] == pytest.approx(proven, rel=1e-9)
        wanted = bound([replace(event, count=62)], 0.01, adjacency=Adjacency.ZERO_OUT)[0]  # type: ignore[arg-type]
        assert proven < column[61] == pytest.approx(wanted, rel=1e-6)


def test_an_event_that_costs_more_than_planned_is_not_capped_by_the_plan() -> None:
    config = one({"name": "dp-fedavg"}, "aggregate", training=SAMPLED, privacy={"epsilon": None, "noise_multiplier": 1.0})
    column, proven = curve(config, SampledGaussian(1 / 3, 0.5, 1), 60)
    assert column[-1] > 2 * proven
    column, _ = curve(config, Unbounded("no noise"), 2)
    assert column == [math.inf, math.inf]


def test_in_the_server_view_it_is_that_of_the_client_who_spent_most(tmp_path: Path) -> None:
    config = one({"name": "dp-fedavg"}, "server", training={"rounds": 5, "clients_per_round": 2})
    result = run(config, tmp_path / "run", data=small_digits())
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        entries = [entry for _, _, entry in ledger.entries()]
    for row in result.history:
        spent: Counter[int] = Counter(e.client for e in entries if e.round <= row["round"])
        mu = entries[0].event.mu * math.sqrt(max(spent.values()))  # type: ignore[union-attr]
        assert row["epsilon_spent"] == pytest.approx(epsilon_of(mu, 0.01), rel=1e-6)


def test_a_resumed_run_counts_what_the_ledger_held(tmp_path: Path) -> None:
    config = one({"name": "dp-fedavg"}, "aggregate", training={"clients_per_round": None})
    whole = run(config, tmp_path / "whole", data=small_digits())

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", stop, data=small_digits())
    resumed = run(config, tmp_path / "run", data=small_digits(), resume=True)
    assert [r["epsilon_spent"] for r in resumed.history] == [r["epsilon_spent"] for r in whole.history]
