"""training.measure_trained: the clients' models after local training, measured and never sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil.configuration.config import configure
from fedveil.errors import ConfigError
from fedveil.run.run import run


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


def test_it_needs_the_clients_own_tests(tmp_path: Path) -> None:
    configuration = settings(measure_trained=True)
    del configuration["data"]["client_test_fraction"]
    with pytest.raises(ConfigError, match="client_test_fraction"):
        run(configure(**configuration), tmp_path / "run")


def test_a_method_with_personal_models_refuses_it(tmp_path: Path) -> None:
    configuration = settings(measure_trained=True)
    configuration["method"] = {"name": "fedglp-adp"}
    with pytest.raises(ConfigError, match="personal models of its own"):
        run(configure(**configuration), tmp_path / "run")
