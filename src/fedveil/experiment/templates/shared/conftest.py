"""The run that the tests look at: trained once."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.experiment.config import Config
from fedveil.experiment.config_files import load_config
from fedveil.experiment.result import Result
from fedveil.experiment.run import run

FILE = Path(__file__).with_name("config.toml")


@pytest.fixture(scope="session")
def config() -> Config:
    return load_config(FILE)


@pytest.fixture(scope="session")
def small() -> Config:
    """The same with few rounds and few clients in each."""
    return load_config(FILE, ["run.engine=inline", "training.rounds=2", "training.clients_per_round=5"])


@pytest.fixture(scope="session")
def result(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(config, tmp_path_factory.mktemp("run"))
