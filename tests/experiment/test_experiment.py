"""An experiment with other steps is that of a configuration with these steps."""

from __future__ import annotations

import pytest

from fedveil.experiment.config import Config, parse
from fedveil.experiment.resolve import resolve


def configuration(steps: int, batch: int, measured: bool) -> Config:
    training = {"rounds": 2, "local_steps": steps, "batch_size": batch, "measure_trained": measured}
    data = {"name": "digits", "partition": {"kind": "iid", "clients": 6}, "client_test_fraction": 0.2}
    return parse({"data": data, "method": {"name": "fedavg", "proximal": 0.1}, "training": training})


@pytest.mark.parametrize("measured", [False, True])
def test_other_steps_are_planned_and_trained_as_configured(measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    method = type(configuration(1, 1, measured).method)
    monkeypatch.setattr(method, "client", lambda self, s: ("local training of", s.local.steps, s.local.batch_size))
    changed, configured = resolve(configuration(5, 8, measured)).with_steps(1, 1), resolve(configuration(1, 1, measured))
    assert changed.setting == configured.setting
    assert changed.client == configured.client
