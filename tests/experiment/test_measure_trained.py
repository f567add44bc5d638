"""training.measure_trained: the clients' models after local training, measured and never sent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ConfigError, FedveilError
from fedveil.experiment.assembly import prepare
from fedveil.experiment.config import configure
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.resolve import data_spec, resolve
from fedveil.experiment.run import run
from fedveil.federation import evaluation
from fedveil.federation.plain_state import read_tree
from fedveil.federation.progress import Federation
from fedveil.report.report import page_values


def settings(**training: Any) -> dict[str, Any]:
    return {
        "data": {"name": "digits", "partition": {"kind": "dirichlet", "clients": 6, "alpha": 0.3}, "client_test_fraction": 0.3},
        "model": {"name": "linear"},
        "method": {"name": "dp-fedavg", "clip": 0.5},
        "training": {"rounds": 2, "local_epochs": 3, "batch_size": 8, "optimizer": {"lr": 0.5}, **training},
        "privacy": {"noise_multiplier": 20.0, "delta": 1e-3},
        "run": {"seed": 4, "seeded_noise": True, "engine": "inline"},
    }


def test_trained_models_are_measured_and_change_nothing_that_leaves(tmp_path: Path) -> None:
    plain = run(configure(**settings()), tmp_path / "plain")
    kept = run(configure(**settings(measure_trained=True)), tmp_path / "kept")
    assert plain.model.vector.equal(kept.model.vector)
    assert plain.privacy.proven == kept.privacy.proven
    row = kept.history[-1]
    assert row["mean_personal_accuracy"] > 0.6 > row["test_accuracy"]  # the noise drowns the global model, not the clients' own
    assert "mean_personal_accuracy" not in plain.history[-1]


def test_it_needs_tests(tmp_path: Path) -> None:
    configuration = settings(measure_trained=True)
    del configuration["data"]["client_test_fraction"]
    with pytest.raises(ConfigError, match="client_test_fraction"):
        run(configure(**configuration), tmp_path / "run")


def test_the_clients_models_are_measured_on_the_whole_test_set(tmp_path: Path) -> None:
    """The mean over the clients of each one's accuracy on all test examples, computed from the states that the run kept."""
    configuration = settings(measure_trained=True, personal_on_test_set=True)
    both = run(configure(**configuration), tmp_path / "both").history[-1]
    del configuration["data"]["client_test_fraction"]
    config, folder = configure(**configuration), tmp_path / "all"
    row = run(config, folder).history[-1]
    assert {"mean_personal_accuracy", "mean_personal_test_accuracy"} <= set(both)
    (group,) = page_values([read_run(tmp_path / "both")])["groups"]
    card = group["cards"]["score"]
    assert f"personal models: {100 * both['mean_personal_accuracy']:.1f} %" in str(card)
    assert f"personal models on the test set: {100 * both['mean_personal_test_accuracy']:.1f} %" in str(card)
    assert "mean_personal_accuracy" not in row
    prepared, shares = prepare(data_spec(config)), []
    model, (x, y) = resolve(config, prepared.population).template(), prepared.test
    for state in read_tree(folder / "checkpoint" / "states-2.safetensors").values():
        model.load(state["private"]["trained"])
        shares.append(float((model.module(x).argmax(1) == y).float().mean()))
    assert len(shares) == 6
    assert row["mean_personal_test_accuracy"] == pytest.approx(sum(shares) / 6, abs=1e-6)
    assert row["mean_personal_test_accuracy"] < both["mean_personal_accuracy"] - 0.1  # its own labels are what a client knows
    for public in ("history.csv", "summary.json"):
        assert "personal_test" not in (folder / public).read_text()  # it tells of single clients


def test_a_network_that_fails_with_a_clients_model_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> float:
        raise FedveilError("the network divided by zero")

    monkeypatch.setattr(evaluation, "client_score", failing)
    ended = run(configure(**settings(measure_trained=True, personal_on_test_set=True)), tmp_path / "run")
    assert math.isnan(ended.history[-1]["mean_personal_accuracy"])
    assert math.isnan(ended.history[-1]["mean_personal_test_accuracy"])
    assert ended.history[-1]["test_accuracy"] > 0


def test_clients_elsewhere_keep_their_models_to_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {}

    def trained(experiment: Any, job: Federation, *more: Any) -> None:
        measured[engine] = (job.personal_on_test_set, job.client_tests is not None)

    monkeypatch.setattr("fedveil.experiment.run._train", trained)
    for engine in ("inline", "flower"):
        configuration = settings(measure_trained=True, personal_on_test_set=True)
        configuration["run"]["engine"] = engine
        run(configure(**configuration), tmp_path / engine)
    assert measured == {"inline": (True, True), "flower": (False, False)}


def test_a_method_without_own_models_has_none_to_measure(tmp_path: Path) -> None:
    plain = run(configure(**settings()), tmp_path / "plain")
    asked = run(configure(**settings(personal_on_test_set=True)), tmp_path / "asked")
    assert asked.history[-1].keys() == plain.history[-1].keys()


def test_a_method_with_personal_models_refuses_it(tmp_path: Path) -> None:
    configuration = settings(measure_trained=True)
    configuration["method"] = {"name": "fedglp-adp"}
    with pytest.raises(ConfigError, match="personal models of its own"):
        run(configure(**configuration), tmp_path / "run")
