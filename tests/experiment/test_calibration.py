"""The noise of a configuration is computed once a statement and once a run: the search takes up to a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import parse
from fedveil.experiment.new_project import demo_config
from fedveil.experiment.run import run
from fedveil.methods import run_cost
from fedveil.studies.twin import twin_sensitivity


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The epsilons that were calibrated to."""
    found: list[float] = []
    real = run_cost.calibrate

    def counted(epsilon: float, *arguments: object, **more: object) -> float:
        found.append(epsilon)
        return real(epsilon, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(run_cost, "calibrate", counted)
    return found


def test_a_statement_calibrates_once(searches: list[float]) -> None:
    certify_config(demo_config())
    assert searches == [8.0]


def test_a_run_calibrates_once(searches: list[float], tmp_path: Path) -> None:
    sections = demo_config().model_dump()
    result = run(parse({**sections, "training": {**sections["training"], "rounds": 1}}), tmp_path / "run")
    assert searches == [8.0]
    assert result.privacy.noise_multiplier == pytest.approx(certify_noise(sections))


def certify_noise(sections: dict[str, dict[str, object]]) -> float:
    noise = certify_config(parse({**sections, "training": {**sections["training"], "rounds": 1}})).noise_multiplier
    assert noise is not None
    return noise


def test_twins_share_one_calibration(searches: list[float]) -> None:
    sections = demo_config().model_dump()
    twin_sensitivity(parse({**sections, "training": {**sections["training"], "rounds": 1}}), 0)
    assert searches == [8.0]
