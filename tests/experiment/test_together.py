"""Clients that train in one pass can move each other's rounding: then the statement assumes that they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedveil.executors.device as device_module
import fedveil.executors.select_engine as select_engine
import fedveil.experiment.run as run_module
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, configure
from fedveil.experiment.config_files import read_config
from fedveil.statement.statement_layout import read_statement
from resumed_runs import case, go, interrupted


def assumed(configuration: Config) -> bool:
    return any("one pass" in a.what for a in certify_config(configuration).assumptions)


def with_engine(configuration: Config, engine: str) -> Config:
    return configuration.model_copy(update={"run": configuration.run.model_copy(update={"engine": engine})})


@pytest.mark.parametrize("engine", ["auto", "inline", "pool", "stacked", "batched", "cuda"])
def test_the_statement_says_where_clients_train_in_one_pass(engine: str) -> None:
    assert assumed(configure(run={"engine": engine})) == (engine in ("batched", "cuda"))


def test_clients_that_add_noise_in_each_step_train_one_at_a_time() -> None:
    local = {"local": "dp-sgd", "batch_size": 10}
    method = {"name": "dp-fedavg", "clip": 1.0}
    private = {"unit": "record", "epsilon": 2.0, "view": "server"}
    assert not assumed(configure(training=local, method=method, privacy=private, run={"engine": "batched"}))


def test_a_run_begun_without_that_assumption_does_not_go_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = case("dp-fedavg aggregate", training={"rounds": 3})
    interrupted(configuration, tmp_path / "a", 2)
    with pytest.raises(ConfigError, match="several clients in one pass"):
        go(with_engine(configuration, "batched"), tmp_path / "a", resume=True)
    for module in (run_module, select_engine):  # as on a machine with one
        monkeypatch.setattr(module, "device_for", lambda *_: device_module.GPU)
    assert len(go(with_engine(configuration, "auto"), tmp_path / "a", resume=True).history) == 3


def test_what_began_in_one_pass_says_so_also_when_it_ends_otherwise(tmp_path: Path) -> None:
    configuration = with_engine(case("dp-fedavg aggregate", training={"rounds": 3}), "batched")
    interrupted(configuration, tmp_path / "a", 2)
    result = go(with_engine(configuration, "inline"), tmp_path / "a", resume=True)
    assert any("one pass" in a.what for a in result.privacy.assumptions)
    assert result.privacy == read_statement(tmp_path / "a")


def test_auto_on_a_gpu_is_recorded_with_its_assumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (run_module, select_engine):  # no GPU is needed to see what is recorded
        monkeypatch.setattr(module, "device_for", lambda *_: "cpu")
    monkeypatch.setattr(device_module, "GPU", "cpu")
    configuration = with_engine(case("dp-fedavg aggregate", training={"rounds": 2}), "auto")
    result = go(configuration, tmp_path / "a")
    assert read_config(tmp_path / "a" / "config.toml").run.engine == "cuda"
    assert any("one pass" in a.what for a in result.privacy.assumptions)
