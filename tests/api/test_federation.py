"""The Python API: federations, their runs, and what a run answers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from federation_runs import small_digits
from fedveil.errors import ConfigError, DataError
from seeded_digests import digest_of
from task_runs import TASKS, made, small

pytestmark = pytest.mark.heavy
DP: dict[str, Any] = {
    "method": fv.DPFedAvg(clip=0.5),
    "training": fv.Training(rounds=2, clients_per_round=4),
    "privacy": fv.Privacy(epsilon=8, delta=1e-2),
    "model": "linear",
    "data": {"name": "digits", "partition": {"kind": "iid", "clients": 6}},
    "run": {"seeded_noise": True},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fv.Run:
    return fv.Federation(**DP).fit(small_digits(), out=tmp_path_factory.mktemp("api") / "run", seed=3, engine="inline")


def test_a_section_is_an_object_a_name_or_a_dict() -> None:
    given = fv.Federation(method="dp-fedavg", task="classification", data="digits", training={"rounds": 2})
    typed = fv.Federation(method=fv.DPFedAvg(), task=fv.Classification(), data={"name": "digits"}, training=fv.Training(rounds=2))
    classes = fv.Federation(method=fv.DPFedAvg(), task=fv.Classification, data={"name": "digits"}, training=fv.Training(rounds=2))
    assert given.config.resolved() == typed.config.resolved() == classes.config.resolved()


@pytest.mark.parametrize(
    ("given", "key", "value", "among"),
    [
        ({"method": "dp-fedavgg"}, "method.name", "dp-fedavgg", "dp-fedavg"),
        ({"method": {"name": "dp-fedavg", "clipp": 1}}, "method.clipp", 1, "clip"),
        ({"training": {"rounds": "three"}}, "training.rounds", "three", None),
        ({"training": {"sampling": "all"}}, "training.sampling", "all", "poisson"),
        ({"run": {"isolation": "thread"}}, "run.isolation", "thread", "copy"),
        ({"model": {"name": "mlp", "hiden": 3}}, "model.hiden", 3, "hidden"),
        ({"nonsense": 1}, "nonsense", 1, "privacy"),
    ],
)
def test_an_error_tells_a_program_the_key_the_value_and_what_is_allowed(
    given: dict[str, Any], key: str, value: object, among: str | None
) -> None:
    with pytest.raises(fv.ConfigError) as caught:
        fv.configure(**given)
    error = pickle.loads(pickle.dumps(caught.value))  # as it comes from a worker
    assert (error.key, error.value) == (key, value)
    assert (among in error.allowed) if among else error.allowed == ()
    assert key in str(error)


def test_it_trains_what_train_trains(run: fv.Run, tmp_path: Path) -> None:
    keywords = DP | {"run": {"seeded_noise": True, "seed": 3, "engine": "inline"}}
    trained = fv.train(fv.configure(**keywords), tmp_path / "run", data=small_digits())
    assert digest_of(trained.path) == digest_of(run.path)
    assert trained.score == pytest.approx(run.score)


def test_a_run_that_is_opened_answers_as_the_one_that_was_trained(run: fv.Run) -> None:
    opened = fv.open_run(run.path, data=small_digits())
    data = small_digits()
    assert (opened.predict(data) == run.predict(data.x_test)).all()
    assert (opened.predict(data) == data.y_test).mean() == pytest.approx(run.score)
    assert opened.privacy == run.privacy
    assert list(opened.history) == list(run.history)
    assert opened.config.resolved() == run.config.resolved()
    assert type(opened.model) is type(run.model)


def test_a_network_that_was_passed_in_is_passed_in_again(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = copy.deepcopy(net.state_dict())
    trained = fv.Federation(**DP | {"model": net}).fit(small_digits(), out=tmp_path / "run")
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())
    opened = fv.open_run(tmp_path / "run", model=net)
    assert (opened.predict(small_digits()) == trained.predict(small_digits())).all()
    with pytest.raises(ConfigError, match="hand it over"):
        _ = fv.open_run(tmp_path / "run").model


@pytest.mark.parametrize("task", TASKS)
def test_predictions_have_the_form_of_the_targets(task: str, tmp_path: Path) -> None:
    configured, data = small(task), made(task)
    trained = fv.Federation.from_config(configured).fit(data, out=tmp_path / "run")
    found = trained.predict(data)
    form = (len(data.y_test),) if task in ("cox", "hazards") else data.y_test.shape
    assert found.shape == form
    if found.dtype.kind == "i" and trained.config.task.main.name == "accuracy":
        assert (found == data.y_test).mean() == pytest.approx(trained.score)


def test_examples_of_another_shape_are_refused(run: fv.Run) -> None:
    with pytest.raises(DataError, match=r"shape \(3,\), and the model takes"):
        run.predict(np.zeros((2, 3)))


def test_what_a_run_answers(run: fv.Run, tmp_path: Path) -> None:
    assert run.scores["accuracy"] == run.score == run.history[-1]["test_accuracy"]
    assert len(run.history) == 2
    assert run.plot("loss", tmp_path / "loss.svg").stat().st_size > 1000
    assert run.report(tmp_path / "page.html").stat().st_size > 10_000
    assert not [check for check in fv.open_run(run.path, data=small_digits()).replay(1).checks if check.finding]
    assert run.audit(20).own.audited is not None
    assert run.privacy.own.audited is not None


def test_verification_is_true_only_where_everything_was_verified(tmp_path: Path) -> None:
    secret = fv.Federation(**DP | {"run": {}}).fit(small_digits(), out=tmp_path / "run")
    assert secret.verify()
    assert not secret.verify(pin="0" * 64)
    (tmp_path / "run" / "private" / "history.csv").unlink()
    assert not secret.verify()


def test_a_notebook_shows_runs_statements_and_comparisons(run: fv.Run) -> None:
    assert "<h3>Privacy statement: dp-fedavg" in run.privacy._repr_html_()
    assert "proven epsilon" in run._repr_html_()
    assert run._repr_html_().count("<table>") >= 1
    assert "Claimed, proven, audited" in str(run.privacy)
    side = fv.compare([run, run.path])
    assert [row["method"] for row in side.rows] == ["dp-fedavg"] * 2
    assert side._repr_html_().count("<tr>") == 3


def test_values_are_replaced_and_files_read(tmp_path: Path) -> None:
    fed = fv.Federation(**DP)
    assert fed.replace(privacy__epsilon=2, method=fv.FedAvg).config.privacy.epsilon == 2
    assert fed.replace(privacy__epsilon=2).certify().proven.epsilon <= 2 < fed.certify().proven.epsilon <= 8
    (tmp_path / "a.toml").write_text('[method]\nname = "dp-fedavg"\n[privacy]\nepsilon = 3.0\n', encoding="utf-8")
    assert fv.Federation.from_toml(tmp_path / "a.toml", ["privacy.delta=0.001"]).config.privacy.delta == 1e-3
    with pytest.raises(ConfigError, match="no key"):
        fed.replace(budget__epsilon=1)


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    def interrupt(row: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    fed = fv.Federation(**DP)
    with pytest.raises(KeyboardInterrupt):
        fv.train(fed.config, tmp_path / "run", interrupt, data=small_digits())
    assert len(fed.fit(small_digits(), out=tmp_path / "run", resume=True).history) == 2


def test_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        fv.open_run(tmp_path)
    with pytest.raises(ConfigError, match="nothing to compare"):
        fv.compare([])
