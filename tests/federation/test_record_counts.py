"""Counts on test records under DP-SGD, and scores in bins: what one record moves, what it costs, the same bits everywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from federation_runs import assert_same, bits, charged, config, finished, job
from fedveil.accounting.types import SampledGaussian, Scope, Unbounded
from fedveil.attacks import replay_door
from fedveil.attacks.replay import replay_federation
from fedveil.deploy.grid_engine import GridEngine
from fedveil.errors import ConfigError
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, configure
from fedveil.experiment.run import run
from fedveil.federation.evidence import cells_by_record, evaluation_counts
from fedveil.federation.fit import _tasks
from fedveil.federation.progress import start
from fedveil.federation.round import Failure, Work, attempted, failure, planned, sealed_outcome
from fedveil.federation.server import evaluation_figures
from fedveil.mechanism.cost import event_of, step_sensitivity
from fedveil.mechanism.plan import COUNTS, DpSgd, Extra, LocalDpSgd, Plan, Released, Upload
from fedveil.release.dpsgd import PerExampleGradient, counts_exponent, counts_of_steps
from fedveil.release.noise import Randomness
from fedveil.tasks.classification import SCORE_EDGES, Binary, Classification
from fedveil.tasks.scores import auc
from fedveil.verify import verify_run
from fedveil.verify.row_costs import Expected, RowCosts
from flower_nodes import Nodes
from joined_clients import Machines, configuration, consent, files, served
from method_kit import layout, model_of
from resumed_runs import go, interrupted

BINS = len(SCORE_EDGES) + 1
STEP = DpSgd(1.0, 2.0, 0.25, 8, 10.0, 100)
LAYOUT = layout({"a": (4,)})


def by_record(view: str = "server", **privacy: Any) -> Config:
    """The small digits with DP-SGD, and a quarter of each client's records for testing."""
    more = {"unit": "record", "view": view, "delta": 5e-4, "epsilon": None, "noise_multiplier": 0.3}
    more["evaluation"] = {"examples": 50}
    training = {"local": "dp-sgd", "batch_clip": None, "sampling": None, "local_steps": 8}
    return config({"name": "fedavg", "weighting": "uniform"}, view, training=training, privacy={**more, **privacy}, data=SPLIT)


SPLIT: dict[str, Any] = {"client_test_fraction": 0.25}


def table(folder: Path, **sections: Mapping[str, Any]) -> Config:
    """Three clients with a table of two classes, and the area under the ROC curve as their score."""
    files(folder)
    whole = configuration(folder, "together.csv").model_dump(mode="json", exclude_none=True)
    whole["data"]["client_test_fraction"] = 0.3
    for section, values in {"task": {"name": "binary"}, **sections}.items():
        whole[section] = values if section in ("method", "task") else {**whole.get(section, {}), **values}
    return configure(**whole)


RECORDS: dict[str, Any] = {
    "method": {"name": "fedavg", "weighting": "uniform"},
    "training": {"local": "dp-sgd", "local_steps": 20, "batch_size": 10, "batch_clip": None},
    "privacy": {"unit": "record", "epsilon": None, "noise_multiplier": 0.3, "evaluation": {"share": 0.1, "examples": 50}},
}


class Fixed(torch.nn.Module):
    """Answers with its input, fails on a negative one, and writes into its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x[:, 0] == -99).any()):
            raise ValueError("no such record")
        with torch.no_grad():
            self.weight.add_(1.0)
        return x[:, :1] + 0 * self.weight


def cells_of(values: list[float], classes: list[int]) -> torch.Tensor:
    x, y = torch.tensor(values, dtype=torch.float32).reshape(-1, 1), torch.tensor(classes[: len(values)])
    return cells_by_record(Binary(), model_of(Fixed()), x, y)


scores = st.one_of(st.floats(-20, 20, width=32), st.sampled_from([math.nan, math.inf, -99.0, *SCORE_EDGES]))


@settings(max_examples=60, deadline=None)
@given(st.lists(scores, min_size=1, max_size=8), st.data())
def test_a_record_moves_its_own_cell_alone(values: list[float], data: Any) -> None:
    """Left out it moves the counts by 1 at most, replaced by another one by sqrt(2)."""
    classes = data.draw(st.lists(st.integers(0, 1), min_size=8, max_size=8))
    place, other = data.draw(st.integers(0, len(values) - 1)), data.draw(scores)
    cells = cells_of(values, classes)
    changed = cells_of([*values[:place], other, *values[place + 1 :]], classes)
    others = [i for i in range(len(values)) if i != place]
    assert torch.equal(cells[others], changed[others])
    assert float(cells.norm(dim=1).max()) <= 1
    assert float((cells.sum(0) - changed.sum(0)).norm()) <= math.sqrt(2) + 1e-6


def test_a_record_on_which_the_network_fails_is_not_counted_and_changes_nothing() -> None:
    model = model_of(Fixed())
    x = torch.tensor([[0.5], [-99.0], [math.nan], [-5.0]])
    cells = cells_by_record(Binary(), model, x, torch.tensor([1, 1, 1, 0]))
    assert cells.sum(1).tolist() == [1, 0, 0, 1]
    assert cells[0].argmax() == BINS + 5
    assert cells[3].argmax() == 0
    assert model.vector.tolist() == [0]
    with pytest.raises(ConfigError, match="no such record"):
        cells_by_record(Binary(), model, x, torch.tensor([1, 1, 1, 0]), strict=True)


def test_right_answers_are_counted_record_by_record(tmp_path: Path) -> None:
    context = job(by_record(), tmp_path).context
    assert context.tests is not None
    x, y = context.tests.examples(1)
    cells = cells_by_record(Classification(), context.model, x, y)
    assert cells.sum(0).tolist() == evaluation_counts(Classification(), context.model, x, y).tolist()


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_the_price_is_that_of_the_gradients_unless_counts_have_less_noise(adjacency: str) -> None:
    scope, plan = Scope("record", adjacency, "server"), LocalDpSgd(step=STEP)  # type: ignore[arg-type]
    alone = event_of(plan, LAYOUT, scope, rate=None)
    assert isinstance(alone, SampledGaussian)
    assert alone.noise_multiplier == 2.0 / step_sensitivity(STEP, 4, scope.adjacency)

    def with_counts(std: float, name: str = COUNTS) -> Any:
        return event_of(replace(plan, extras={name: Extra(1.0, std)}), LAYOUT, scope, rate=None)

    assert with_counts(2.0) == alone
    assert with_counts(0.5) == replace(alone, noise_multiplier=0.5 / scope.adjacency.factor)
    assert isinstance(with_counts(0.0), Unbounded)
    with pytest.raises(ConfigError, match="no extra of a method"):
        with_counts(2.0, "within")


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_counts_cost_nothing_and_take_nothing(view: str) -> None:
    made = by_record(view, epsilon=3.0, noise_multiplier=None)
    other = by_record(view, epsilon=3.0, noise_multiplier=None, evaluation=None)
    one, two = certify_config(made), certify_config(other)
    assert (one.proven.epsilon, one.noise_multiplier) == (two.proven.epsilon, two.noise_multiplier)


def test_counts_have_the_mean_and_the_noise_of_their_steps() -> None:
    """Each record is counted K q times on average; the noise of K steps has deviation z sqrt(K)."""
    cells = torch.zeros(40, 2)
    cells[:30, 0] = 1
    found = []
    for seed in range(400):
        source = PerExampleGradient(STEP, Randomness(seed, seeded_noise=True), (0, 0))
        found.append(counts_of_steps(source, cells, Extra(1.0, 2.0)).tolist())
    values = np.array(found)
    assert values.mean(0) == pytest.approx([30 * 2, 0], abs=4 * 7 / math.sqrt(400))
    noise = 4 * 8
    assert values.var(0) == pytest.approx([noise + 30 * 8 * 0.25 * 0.75, noise], rel=0.25)


def test_counts_lie_on_a_grid_that_does_not_round_them() -> None:
    for std in (1e-9, 0.3, 2.0, 1e12):
        exponent = counts_exponent(Extra(1.0, std))
        assert -30 <= exponent <= 0
    source = PerExampleGradient(STEP, Randomness(1, seeded_noise=True), (0, 0))
    exponent, cells = counts_exponent(Extra(1.0, 2.0)), torch.eye(2)
    first, second = (source.count(part, Extra(1.0, 2.0), 3) for part in (cells, torch.zeros(2, 2)))
    assert {abs(int(v)) for v in first - second} <= {0, 2**-exponent}


def test_a_failed_client_releases_the_noise_of_its_counts(tmp_path: Path) -> None:
    there = job(by_record(), tmp_path)
    (task, *_) = _tasks(there, start(there), Released(0, there.context.model.vector.clone(), None), [1], None)
    plan = planned(there.context, task)
    failed = failure(there.context, task, plan, "a reason")
    assert isinstance(failed, Failure)
    release = sealed_outcome(there.context, task, failed, 0.0).release
    assert release is not None
    counts = release.upload.extras[COUNTS]  # type: ignore[union-attr]
    assert bool((counts != 0).all())
    assert bool((release.upload.vector != 0).all())  # type: ignore[union-attr]
    work = attempted(there.context, task, plan)
    assert isinstance(work, Work)
    assert bits(sealed_outcome(there.context, task, work, 0.0).release.upload.extras[COUNTS]) == bits(work.extras[COUNTS])  # type: ignore[union-attr]


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_the_same_bits_on_every_engine(view: str, tmp_path: Path) -> None:
    made = [job(by_record(view), tmp_path / name) for name in ("inline", "pool", "nodes")]
    inline = finished(made[0], Inline(made[0].context))
    assert_same(finished(made[1], ProcessPool(made[1].context, 2)), inline)
    nodes = Nodes(made[2].context, tmp_path / "clients")
    wire = finished(made[2], GridEngine(made[2].context, made[2].context.door.run, nodes))
    assert bits(wire.model) == bits(inline.model)
    names = ("noisy_accuracy", "noisy_accuracy_std", "noisy_examples")
    assert [[row.get(n) for n in names] for row in wire.history] == [[row.get(n) for n in names] for row in inline.history]
    assert all(name in inline.history[-1] for name in names)
    assert inline.history[-1]["noisy_examples"] == pytest.approx(4 / 6 * len(made[0].context.tests.y), rel=0.5)  # type: ignore[union-attr]
    assert all(
        row.extras == (COUNTS,) and row.clip[-1] == 1.0 and row.noise_std[-1] == 0.3 for row in charged(tmp_path / "inline")
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_replay_finds_nothing(view: str, tmp_path: Path) -> None:
    found = replay_federation(lambda folder: job(by_record(view), folder), rounds=2)
    assert found.findings == {}


def test_replay_finds_counts_of_a_record_that_counts_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PerExampleGradient.count
    monkeypatch.setattr(PerExampleGradient, "count", lambda self, cells, extra, step: real(self, 3 * cells, extra, step))
    found = replay_federation(lambda folder: job(by_record(), folder), rounds=1)
    assert replay_door.SENSITIVITY in found.findings


def test_replay_finds_counts_without_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(self: PerExampleGradient, cells: torch.Tensor, extra: Extra, step: int) -> Any:
        return (cells.sum(0).double() * 2.0 ** -counts_exponent(extra)).long().numpy()

    monkeypatch.setattr(PerExampleGradient, "count", bare)
    found = replay_federation(lambda folder: job(by_record(), folder), rounds=1)
    assert replay_door.DRAWN in found.findings


def test_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    made = by_record()
    go(made, tmp_path / "whole")
    interrupted(made, tmp_path / "parts", 2)
    go(made, tmp_path / "parts", resume=True)
    whole, parts = ((tmp_path / name / "history.csv").read_text().splitlines() for name in ("whole", "parts"))
    column = whole[0].split(",").index("noisy_accuracy")
    assert [row.split(",")[column] for row in whole] == [row.split(",")[column] for row in parts]


def test_a_run_is_verified_and_counts_with_less_noise_than_charged_are_not(tmp_path: Path) -> None:
    run(table(tmp_path, **RECORDS), tmp_path / "run")
    assert verify_run(tmp_path / "run").outcome == "verified"
    text = (tmp_path / "run/statement.md").read_text()
    assert "joins these counts as a training record joins the batches" in " ".join(text.split())
    (entry, *_) = charged(tmp_path / "run")
    assert isinstance(entry.event, SampledGaussian)
    step = {"event": "sampled_gaussian", "rate": entry.event.rate, "noise_multiplier": entry.event.noise_multiplier, "mu": None}
    about = {"seq": 1, "run": "r", "round": 0, "client": 0, "unit": "record", "adjacency": "zero_out", "view": "server"}
    row = {**about, **step, "count": entry.event.count, "participants": 1, "reads": "[]", "grid": None, "mechanism": "none"}
    row |= {"coordinates": entry.coordinates, "dimension": entry.dimension, "note": entry.note, "extras": '["evaluation"]'}
    row |= {"clip": json.dumps(entry.clip), "whole_clip": entry.whole_clip}
    kinds = frozenset({("sampled_gaussian", entry.event.rate)})
    for factor, right in ((1.0, True), (0.9, False), (2.0, True)):
        costs = RowCosts(Expected(("record", "zero_out", "server"), 3, 0, steps=True, kinds=kinds))
        costs.add({**row, "noise_std": json.dumps([*entry.noise_std[:-1], factor * entry.noise_std[-1]])}, "r")
        assert (costs.wrong == "") is right


@pytest.mark.parametrize("sections", [RECORDS, {"privacy": {"evaluation": {"share": 0.3, "examples": 30}, "view": "aggregate"}}])
def test_the_area_under_the_curve_is_shown_with_its_noise(sections: dict[str, Any], tmp_path: Path) -> None:
    more = {"epsilon": None, "noise_multiplier": 0.02 if "training" not in sections else 0.3}
    made = table(tmp_path, **{**sections, "privacy": {**sections["privacy"], **more}})
    rows = run(made, tmp_path / "run").history
    assert all({"noisy_auc", "noisy_auc_std", "noisy_examples"} <= row.keys() for row in rows)
    assert rows[-1]["noisy_auc"] == pytest.approx(rows[-2]["test_auc"], abs=4 * rows[-1]["noisy_auc_std"] + 0.1)
    assert 0 < rows[-1]["noisy_auc_std"] < 0.2


def uploaded(counts: torch.Tensor, std: float) -> Upload:
    plan = Plan(clip=1.0, noise_std=1.0, extras={COUNTS: Extra(1.0, std)})
    return Upload(0, 0, torch.zeros(3), torch.ones(1), plan, extras={COUNTS: counts})


def test_scores_in_bins_give_the_area_and_its_deviation(tmp_path: Path) -> None:
    setting = replace(job(by_record(), tmp_path).setting, task=Binary())
    rng = np.random.default_rng(5)
    y = torch.from_numpy(rng.random(3000) < 0.2)
    logits = torch.from_numpy(rng.normal(size=3000)) + 1.5 * y - 1
    counts = cells_of(logits.tolist(), y.long().tolist()).sum(0).reshape(2, BINS)
    assert counts.sum(1).tolist() == [int((~y).sum()), int(y.sum())]
    exact = evaluation_figures(setting, [uploaded(counts, 1e-9)], 1)
    assert exact["noisy_auc"] == pytest.approx(auc(logits, y), abs=0.03)
    assert exact["noisy_auc"] < auc(logits, y)  # ties
    drawn = [counts + 12 * torch.from_numpy(rng.normal(size=(2, BINS))).float() for _ in range(1000)]
    said = [evaluation_figures(setting, [uploaded(one, 12.0)], 1) for one in drawn]
    found = np.array([row["noisy_auc"] for row in said])
    assert np.median([row["noisy_auc_std"] for row in said]) == pytest.approx(found.std(), rel=0.15)
    assert found.mean() == pytest.approx(exact["noisy_auc"], abs=0.005)
    few = counts.clone()
    few[1] /= 20  # 30 examples of class 1, in 10 bins with this noise
    assert evaluation_figures(setting, [uploaded(few, 12.0)], 1) == {}


def test_a_server_without_a_test_file_shows_the_noisy_score(tmp_path: Path) -> None:
    made = table(tmp_path, **RECORDS)
    source = made.data.source.model_copy(update={"test_file": None, "file": "nowhere.csv"})  # type: ignore[union-attr]
    made = made.model_copy(update={"data": made.data.model_copy(update={"source": source})})
    order = {"epsilon": 1e4, "delta": 0.01, "order": 1.5}
    agreed = {
        number: consent(number, unit="record", data={"file": str(tmp_path / f"{number}.csv"), "columns": ["a", "b", "ill"]},
                        lifetime={"server": order})
        for number in range(3)
    }  # fmt: skip
    result, lines = served(made, tmp_path / "server", Machines(tmp_path / "clients", agreed))
    assert lines == []
    assert not any(name.startswith("test_") for row in result.history for name in row)
    assert all("noisy_auc" in row for row in result.history)
    assert verify_run(tmp_path / "server").outcome == "verified"


def test_tasks_without_an_answer_to_each_record_are_refused(tmp_path: Path) -> None:
    whole = table(tmp_path, **RECORDS).model_dump(mode="json", exclude_none=True)
    whole["data"]["source"]["target"] = ["ill", "b"]
    whole["data"]["source"]["features"] = ["a"]
    del whole["data"]["source"]["classes"]
    with pytest.raises(ConfigError, match="counts the answer to each record alone"):
        certify_config(configure(**{**whole, "task": {"name": "multi-label"}}))
