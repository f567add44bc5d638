"""A run of each method is charged the configured epsilon, in each view: neither more nor, but for rounding, less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedveil as fv
from fedveil.accounting.gaussian import epsilon_of
from fedveil.experiment.public_setting import calibrated_setting
from method_kit import charged_mu, digits, method_releases_mu

STEPS = {"local_steps": 3, "batch_clip": 2.0}
METHODS: list[tuple[dict[str, Any], float, dict[str, Any]]] = [
    ({"name": "adaptive-clipping"}, 8.0, {}),
    ({"name": "adapldp"}, 500.0, {}),
    ({"name": "aldp-fl"}, 5.0, {}),
    ({"name": "dp-fedsam", "keep": 0.5}, 8.0, {}),
    ({"name": "dp-scaffold"}, 8.0, {}),
    ({"name": "gfl-aldpa", "keep": 0.5}, 8.0, {}),
    ({"name": "ladp-fl"}, 5.0, {}),
    ({"name": "ldp-fed", "layers_a_round": 1}, 8.0, {}),
    ({"name": "nbafl"}, 5.0, {}),
    ({"name": "noisy-fedavg"}, 5.0, STEPS),
    ({"name": "noisy-fedavg"}, 5.0, {**STEPS, "schedule": "stage-wise"}),
    ({"name": "noisy-fedprox", "proximal": 1.0}, 5.0, STEPS),
    ({"name": "sensitive-dp"}, 500.0, {}),
]
"""With epsilon, and what else of `training`."""
CASES = [
    pytest.param(*case, view, id=f"{case[0]['name']}-{view}", marks=[pytest.mark.slow] * (number % 2 == (view == "server")))
    for number, case in enumerate(METHODS)
    for view in ("server", "aggregate")
]


@pytest.mark.few(6)
@pytest.mark.parametrize(("method", "epsilon", "training", "view"), CASES)
def test_the_ledger_holds_the_configured_epsilon(
    method: dict[str, Any], epsilon: float, training: dict[str, Any], view: str, tmp_path: Path
) -> None:
    """Each client in the server view, and the sums in the other, as the method plans before the run."""
    network = ['model={name="mlp", hidden=[4]}'] if method["name"] == "ldp-fed" else []  # of several layers
    config = digits(method, *network, privacy={"epsilon": epsilon, "view": view}, training={"clients_per_round": 12, **training})
    result = fv.train(config, tmp_path / "run")
    spent = charged_mu(result.path / "ledger.sqlite")
    assert set(spent) == (set(range(12)) if view == "server" else {-1})
    planned = method_releases_mu(*calibrated_setting(config))
    for mu in spent.values():
        assert mu == pytest.approx(planned, rel=1e-4)
        assert epsilon * (1 - 1e-3) < epsilon_of(mu, 1e-3) <= epsilon
    assert result.privacy.proven.epsilon == pytest.approx(epsilon, rel=1e-3)
