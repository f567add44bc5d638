"""The project keeps its promise, leaks nothing and learns: run with `python -m pytest`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.adversary.replay import replay
from fedveil.configuration.config import load_config
from fedveil.run.run import Result, run
from fedveil.statement.certify import certify_config

CONFIG = load_config(Path(__file__).with_name("config.toml"))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(CONFIG, tmp_path_factory.mktemp("run"))


def test_the_statement_promises_the_configured_epsilon() -> None:
    proven = certify_config(CONFIG).proven
    assert CONFIG.privacy.epsilon is not None
    assert 0.99 * CONFIG.privacy.epsilon < proven.epsilon <= CONFIG.privacy.epsilon
    assert (proven.delta, proven.scope.unit, proven.scope.view) == (1e-3, "client", "aggregate")


def test_the_run_gives_the_guarantee_that_was_certified(result: Result) -> None:
    assert result.privacy.proven == certify_config(CONFIG).proven


def test_nothing_private_shows_but_through_the_noise() -> None:
    """Replays the run on adversarial neighbours: the one test of privacy that a method needs."""
    assert replay(CONFIG).findings == {}


def test_the_clip_shrinks_as_the_method_says(result: Result) -> None:
    assert [row["clip"] for row in result.history] == pytest.approx([2.0 * 0.97**t for t in range(15)])


def test_it_learns(result: Result) -> None:
    assert result.accuracy > 0.7  # chance is one in three
