"""The project keeps its promise and leaks nothing: run with `python -m pytest`."""

from __future__ import annotations

from fedveil.attacks.replay import replay
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config
from fedveil.experiment.result import Result


def test_the_statement_promises_the_configured_epsilon(config: Config) -> None:
    proven, promised = certify_config(config).proven, config.privacy
    assert promised.epsilon is not None
    assert 0.99 * promised.epsilon < proven.epsilon <= promised.epsilon
    assert (proven.delta, proven.scope.unit, proven.scope.view) == (promised.delta, promised.unit, promised.view)


def test_the_run_gives_the_guarantee_that_was_certified(config: Config, result: Result) -> None:
    assert result.privacy.proven == certify_config(config).proven


def test_nothing_private_shows_but_through_the_noise(small: Config) -> None:
    """Replays a small run on adversarial neighbours: the one test of privacy that your own code needs."""
    assert replay(small).findings == {}
