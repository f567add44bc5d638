"""Runs whose clients release counts on examples of their own: same price, right figures, the same bits on every engine."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from federation_runs import assert_same, bits, charged, config, covering, every_method, finished, job
from fedveil.attacks.replay import replay_federation
from fedveil.deploy.deployed_data import client_data
from fedveil.deploy.grid_engine import GridEngine
from fedveil.errors import ConfigError
from fedveil.executors.batched import Batched
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, configure
from fedveil.experiment.resolve import resolve
from fedveil.experiment.run import run
from fedveil.federation.evidence import evaluation_counts
from fedveil.federation.fit import _tasks
from fedveil.federation.progress import Federation, start
from fedveil.federation.round import Work, attempted, planned
from fedveil.federation.server import evaluation_figures
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.mechanism.plan import COUNTS, Plan, Released, Upload
from fedveil.statement.statement_layout import to_dict
from fedveil.tasks.classification import Classification
from fedveil.verify import verify_run
from fedveil.verify.statement_checks import expected
from flower_nodes import Nodes
from joined_clients import Machines, consent, served
from method_kit import first_task

NAMES = ("noisy_accuracy", "noisy_accuracy_std", "noisy_examples")
WITHOUT = {"examples": 0}
SUMMED = {name: c for name, c in every_method() if c.privacy.unit == "client" and c.privacy.view != "final"}


def counted(configuration: Config, **evaluation: Any) -> Config:
    """The same run, with counts."""
    sections = configuration.model_dump(mode="json", exclude_none=True)
    sections["data"]["client_test_fraction"] = 0.25
    sections["privacy"]["evaluation"] = {"share": 0.4, "examples": 4, **evaluation} if evaluation != WITHOUT else None
    return configure(**sections)


def clear(view: str = "aggregate", **privacy: Any) -> Config:
    """So little noise that the figures stand out of it."""
    more = {"epsilon": None, "noise_multiplier": 0.02, "delta": 1e-3}
    return counted(config({"name": "dp-fedavg"}, view, privacy={**more, **privacy}), examples=50)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", covering(SUMMED, 3))
def test_every_method_releases_them_at_its_own_price_or_not_at_all(name: str, tmp_path: Path) -> None:
    made, other = counted(SUMMED[name]), certify_config(counted(SUMMED[name], **WITHOUT))
    if math.isinf(other.proven.epsilon) or SUMMED[name].method.name == "banded-mf":
        with pytest.raises(ConfigError, match=r"privacy\.evaluation: (nothing is proven of this run|the noise of banded-mf)"):
            certify_config(made)
        return
    one = certify_config(made)
    assert one.proven.epsilon == other.proven.epsilon
    assert one.noise_multiplier == other.noise_multiplier
    there = job(made, tmp_path)
    finished(there, Inline(there.context))
    assert all(row.extras[-1] == COUNTS and row.clip[-1] == 4.0 for row in charged(tmp_path))
    assert isinstance(there.context.door.ledger, BudgetedLedger)


def test_what_is_counted_is_what_the_model_gets_right(tmp_path: Path) -> None:
    there = job(clear(), tmp_path)
    context = there.context
    assert context.tests is not None
    x, y = context.tests.examples(2)
    context.model.eval()
    with torch.no_grad():
        right = int((context.model.module(x).argmax(1) == y).sum())
    context.model.train()
    counts = evaluation_counts(context.task, context.model, x, y)
    assert counts.tolist() == [right, len(y) - right]
    assert 0 < right < len(y)
    assert evaluation_counts(context.task, context.model, x[:0], y[:0]).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("score", "kept"), [(math.nan, [0, 0]), (None, [0, 0]), (7.0, [5, 0]), (-1.0, [0, 5]), (0.5, [2.5, 2.5])]
)
def test_a_score_of_ones_own_stays_within_the_number_of_examples(score: Any, kept: list[float], tmp_path: Path) -> None:
    class Odd(Classification):
        def client_scores(self, *_: Any) -> list[float | None]:
            return [score]

    context = job(clear(), tmp_path).context
    x, y = context.clients.examples(0)
    assert evaluation_counts(Odd(), context.model, x[:5], y[:5]).tolist() == kept


def test_training_is_what_it_is_without_counts(tmp_path: Path) -> None:
    there = job(clear(), tmp_path)
    (task, *_) = _tasks(there, start(there), Released(0, there.context.model.vector.clone(), None), [1], None)
    works = [attempted(c, task, planned(c, task)) for c in (there.context, replace(there.context, evaluation=None))]
    first, second = works
    assert isinstance(first, Work)
    assert isinstance(second, Work)
    assert bits(first.update) == bits(second.update)
    assert set(first.extras) == {COUNTS}
    assert float(first.extras[COUNTS].sum()) == there.context.tests.size(1)  # type: ignore[union-attr]


def test_no_more_examples_than_the_public_number_count(tmp_path: Path) -> None:
    there = job(counted(config({"name": "dp-fedavg"}), examples=2), tmp_path)
    tasks = _tasks(there, start(there), Released(0, there.context.model.vector.clone(), None), list(range(6)), None)
    for task in tasks:
        work = attempted(there.context, task, planned(there.context, task))
        assert isinstance(work, Work)
        assert float(work.extras[COUNTS].sum()) == 2 < there.context.tests.size(task.client)  # type: ignore[union-attr]


@pytest.mark.parametrize("view", ["aggregate", "server"])
def test_figures_are_those_of_the_model_with_which_the_round_began(view: str, tmp_path: Path) -> None:
    made = clear(view)
    all_of_them = made.training.model_copy(update={"clients_per_round": 6})
    there = job(made.model_copy(update={"training": all_of_them}), tmp_path)
    rows = finished(there, Inline(there.context)).history
    tests = there.context.tests
    assert tests is not None
    plan = planned(there.context, first_task(there, 0))
    assert isinstance(plan, Plan)
    noise = plan.extras[COUNTS].noise_std * (math.sqrt(6) if view == "server" else 1)  # of six uploads, or of their sum
    for row, before in zip(rows[1:], rows, strict=False):
        truth = sum(a * tests.size(c) for c, a in enumerate(before["client_accuracy"])) / len(tests.y)
        assert row["noisy_accuracy"] == pytest.approx(truth, abs=6 * row["noisy_accuracy_std"])
        assert row["noisy_examples"] == pytest.approx(len(tests.y), rel=0.3)
        found = row["noisy_accuracy"]
        assert row["noisy_accuracy_std"] == pytest.approx(noise * math.hypot(found, 1 - found) / row["noisy_examples"])


def upload(there: Federation, right: float, wrong: float) -> Upload:
    plan = there.context.plan(Released(0, there.context.model.vector, None), {})
    counts = torch.tensor([right, wrong]) / there.setting.cohort
    return Upload(-1, 0, torch.zeros(3), torch.ones(1), plan, extras={COUNTS: counts})  # type: ignore[arg-type]


def noise_of(there: Federation) -> float:
    plan = there.context.plan(Released(0, there.context.model.vector, None), {})
    assert isinstance(plan, Plan)
    return plan.extras[COUNTS].noise_std


def test_the_deviation_is_that_of_the_noise(tmp_path: Path) -> None:
    there = job(clear(), tmp_path)
    std = noise_of(there)
    rng = np.random.default_rng(0)
    drawn = rng.normal([300.0, 100.0], std, (2000, 2))
    rows = [evaluation_figures(there.setting, [upload(there, *counts)], 1) for counts in drawn]
    found = np.array([row["noisy_accuracy"] for row in rows])
    said = evaluation_figures(there.setting, [upload(there, 300.0, 100.0)], 1)
    assert said["noisy_accuracy"] == pytest.approx(0.75)
    assert said["noisy_examples"] == pytest.approx(400)
    assert found.std() == pytest.approx(said["noisy_accuracy_std"], rel=0.1)
    assert found.mean() == pytest.approx(0.75, abs=0.005)


def test_what_drowns_in_the_noise_is_absent_and_an_empty_round_is_noise(tmp_path: Path) -> None:
    there = job(clear(), tmp_path)
    std = noise_of(there)
    assert evaluation_figures(there.setting, [upload(there, 2 * std, 2 * std)], 1) == {}
    assert evaluation_figures(there.setting, [upload(there, 3 * std, 2 * std)], 1)
    assert evaluation_figures(there.setting, [], 0) == {}
    plan = there.context.plan(Released(0, there.context.model.vector, None), {})
    empty = there.context.door.release_sum([], plan, 0, 4.0)
    assert evaluation_figures(there.setting, [empty], 0) == {}
    assert empty.integers is not None
    assert empty.integers[-2:].any()
    assert len(charged(tmp_path)) == 1


@pytest.mark.parametrize("view", ["aggregate", "server"])
def test_the_same_bits_on_every_engine(view: str, tmp_path: Path) -> None:
    made = [job(clear(view), tmp_path / name) for name in ("inline", "pool", "nodes")]
    inline = finished(made[0], Inline(made[0].context))
    assert_same(finished(made[1], ProcessPool(made[1].context, 2)), inline)
    run_, nodes = made[2], Nodes(made[2].context, tmp_path / "clients")
    wire = finished(run_, GridEngine(run_.context, run_.context.door.run, nodes))
    assert bits(wire.model) == bits(inline.model)
    shown = [[[row.get(name) for name in NAMES] for row in rows] for rows in (wire.history, inline.history)]
    assert shown[0] == shown[1]
    assert all(name in inline.history[-1] for name in NAMES)


def test_batched_counts_the_same(tmp_path: Path) -> None:
    one, two = job(clear(), tmp_path / "a"), job(clear(), tmp_path / "b")
    reference, other = finished(one, Inline(one.context)), finished(two, Batched(two.context))
    assert other.history[0]["noisy_accuracy"] == reference.history[0]["noisy_accuracy"]
    assert other.model.allclose(reference.model, atol=1e-4)


def test_a_whole_run_is_verified_certified_and_shown(tmp_path: Path) -> None:
    result = run(clear(), tmp_path / "run")
    assert verify_run(tmp_path / "run").outcome == "verified"
    assert "own test examples" in (tmp_path / "run/statement.md").read_text()
    header = (tmp_path / "run/history.csv").read_text().splitlines()[0].split(",")
    assert set(NAMES) <= set(header)
    assert "client_accuracy" not in header
    assert "±" in result.columns.noisy_text(result.history)
    statement, whole = to_dict(result.privacy), tomllib.loads((tmp_path / "run/config.toml").read_text())
    private = {key: value for key, value in whole["privacy"].items() if key != "evaluation"}
    plan, without = expected(statement, whole).plan, expected(statement, {**whole, "privacy": private}).plan
    assert plan is not None
    assert without is not None
    assert (plan[1], without[1]) == (50, 0)
    assert plan[2][0] > without[2][0]


def test_counts_are_no_part_of_the_largest_update(tmp_path: Path) -> None:
    """They count examples: a client with more of these than training.max_update_norm still sends its update."""
    made = clear()
    small = made.training.model_copy(update={"max_update_norm": 5.0})
    there = job(made.model_copy(update={"training": small}), tmp_path)
    rows = finished(there, Inline(there.context)).history
    assert [row["failed"] for row in rows] == [0] * len(rows)
    assert rows[-1]["noisy_examples"] > 4 * 5.0


@pytest.mark.few(1)
@pytest.mark.parametrize("unit", ["client", "record"])
def test_replay_finds_nothing(unit: str, tmp_path: Path) -> None:
    """Neighbours have other test examples, too."""
    found = replay_federation(lambda folder: job(clear("server", unit=unit), folder), rounds=2)
    assert found.findings == {}


def test_where_records_are_protected_they_are_priced_at_twice_their_bound(tmp_path: Path) -> None:
    """One record away still leaves counts of any kind, so these move by 2 B at most, as the update by twice its clip."""
    made = counted(config({"name": "dp-fedavg"}, "server", privacy={"unit": "record", "delta": 5e-4}))
    with_counts, without = certify_config(made), certify_config(counted(made, **WITHOUT))
    assert with_counts.proven.epsilon == without.proven.epsilon
    there = job(made, tmp_path)
    finished(there, Inline(there.context))
    plan, share = there.context.plan(Released(0, there.context.model.vector, None), {}), 0.4
    assert isinstance(plan, Plan)
    for row in charged(tmp_path):
        assert 2 * 4.0 / plan.extras[COUNTS].noise_std == pytest.approx(math.sqrt(share) * row.event.mu)
        assert 2 * plan.clip / float(plan.noise_std) == pytest.approx(math.sqrt(1 - share) * row.event.mu)


def test_a_client_certifies_them_and_the_bits_are_those_of_inline(tmp_path: Path) -> None:
    three = {"data": {"partition": {"kind": "iid", "clients": 3}}, "training": {"clients_per_round": 3, "rounds": 2}}
    made = counted(config({"name": "dp-fedavg"}, "server", **three))
    machines = Machines(tmp_path / "clients", {number: consent(number) for number in range(3)})
    result, lines = served(made, tmp_path / "server", machines)
    inline = run(made, tmp_path / "inline")
    assert lines == []
    assert bits(result.model.vector) == bits(inline.model.vector)
    assert verify_run(tmp_path / "server").outcome == "verified"
    assert not any("client_accuracy" in row for row in result.history)


def test_a_client_keeps_its_test_examples_from_training(tmp_path: Path) -> None:
    made = clear()
    alone = client_data(resolve(made), 2, None)
    assert alone.client_tests is not None
    assert [alone.client_tests.size(c) > 0 for c in range(6)] == [c == 2 for c in range(6)]
    assert [len(alone.clients.examples(c)[1]) > 0 for c in range(6)] == [c == 2 for c in range(6)]


TABLE = {"file": "none.csv", "features": ["a", "b"], "target": "c", "client": "who", "clients": 6, "train_examples": 300}
QUANTITIES = {"name": "table", "source": TABLE, "partition": {"kind": "users"}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no examples": ({"data": {"client_test_fraction": 0.0}}, "set data.client_test_fraction"),
    "final view": ({"privacy": {"view": "final"}}, "that view speaks of the last model alone"),
    "no share": ({"privacy": {"evaluation": {"examples": 4}}}, "privacy.evaluation.share: missing"),
    "no noise": ({"privacy": {"epsilon": None, "noise_multiplier": 0.0}}, "nothing is proven of this run"),
    "share": ({"privacy": {"evaluation": {"share": 1.0, "examples": 4}}}, "privacy.evaluation.share"),
    "bound": ({"privacy": {"evaluation": {"share": 0.1}}}, "privacy.evaluation.examples"),
    "correlated noise": (
        {"method": {"name": "banded-mf", "separation": 1}, "training": {"sampling": "fixed"}},
        "correlated over the rounds",
    ),
    "quantities": (
        {"data": QUANTITIES, "model": {"name": "linear"}, "task": {"name": "regression"}},
        "main metric of task.name = 'regression'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_runs_that_cannot_have_them_are_refused(name: str) -> None:
    changes, said = REFUSED[name]
    sections = counted(config({"name": "dp-fedavg"})).model_dump(mode="json", exclude_none=True)
    for section, values in changes.items():
        sections[section] = values if section in ("method", "model", "task") else {**sections.get(section, {}), **values}
    with pytest.raises(ConfigError, match=said):
        certify_config(configure(**sections))
