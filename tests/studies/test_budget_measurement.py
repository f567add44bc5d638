"""The epsilon of LaDP-FL's equations 17 to 19, read off runs whose noise is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.experiment.run import run
from fedveil.papers.ladp_fl.measurements import of_budget
from method_kit import digits


def published(method: dict[str, Any], **training: Any) -> Config:
    options = {"batch_clip": 1.0, **training}
    return digits({"variant": "published", **method}, training=options, privacy={"epsilon": 0.4, "view": "server"})


def measured(config: Config, folder: Path) -> list[float]:
    path = run(config, folder / "run").path
    found = of_budget(config, path, folder)["epsilon_of_noise"]
    assert [round for round, _ in found] == [1, 2, 3]
    return [value for _, value in found]


def test_full_dp_has_the_epsilon_that_it_was_calibrated_to(tmp_path: Path) -> None:
    """q = 20 / 119 of the examples; three rounds of 0.4."""
    totals = measured(published({"name": "nbafl", "source": "ladp-fl"}), tmp_path)
    assert totals == pytest.approx([20 / 119 * 0.4 * t for t in (1, 2, 3)], rel=0.01)


def test_half_the_noise_reads_as_twice_the_epsilon(tmp_path: Path) -> None:
    """Falling by a factor of two a round: 1 + 2 + 4 of the first."""
    totals = measured(published({"name": "time-varying-dp", "source": "ladp-fl", "decay": 0.5}), tmp_path)
    assert totals[2] / totals[0] == pytest.approx(7, rel=1e-4)


def test_ladp_fl_and_full_dp_differ(tmp_path: Path) -> None:
    own = measured(published({"name": "ladp-fl", "bound": 1e3}), tmp_path)
    full = measured(published({"name": "nbafl", "source": "ladp-fl"}), tmp_path / "full")
    assert own[2] / full[2] == pytest.approx(0.5, abs=0.05)


def test_it_needs_clipped_gradients(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.batch_clip"):
        of_budget(digits({"name": "dp-fedavg"}, privacy={"epsilon": 1.0, "view": "server"}), tmp_path, tmp_path)
