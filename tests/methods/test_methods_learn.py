"""Each method learns the embedded digits, where chance is 0.1, from many small clients under the noise of its promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedveil as fv
from method_kit import digits

SMALL = {"rounds": 20, "clients_per_round": 60, "sampling": "poisson", "local_epochs": 2, "batch_size": 8}
ALL = {**SMALL, "clients_per_round": None, "sampling": "fixed"}
FEW = {"rounds": 10, "clients_per_round": None, "local_epochs": 2}
WHOLE = {"rounds": 4, "clients_per_round": 240, "local_epochs": 4, "batch_size": 6}
THIRD = {"rounds": 12, "clients_per_round": 120, "sampling": "poisson", "local_epochs": 2, "batch_size": 4}
STEPS = {"rounds": 10, "clients_per_round": 50, "local_steps": 5, "batch_clip": 2.0, "optimizer": {"lr": 0.2}, "batch_size": 7}
SUM = {"epsilon": 8.0, "view": "aggregate"}
UPLOADS = {"epsilon": 2000.0, "view": "server"}
CLAIM = {"epsilon": 4.0, "view": "server", "unit": "record"}
GFL = {"name": "gfl-aldpa", "variant": "published", "budget": "round", "sensitivity": "mean", "keep": 0.3}
METHODS: list[tuple[dict[str, Any], int, dict[str, Any], dict[str, Any], float]] = [
    ({"name": "dp-fedsam", "clip": 0.5, "rho": 0.1}, 180, SMALL, SUM, 0.8),
    ({"name": "adaptive-clipping", "clip": 0.1, "rate": 0.3}, 180, SMALL, SUM, 0.6),
    ({"name": "adaptive-clipping", "clip": 0.1, "rate": 0.3}, 180, SMALL, {**UPLOADS, "epsilon": 200.0}, 0.6),
    ({"name": "dp-scaffold", "clip": 0.5, "control_clip": 0.5}, 180, SMALL, SUM, 0.6),
    ({"name": "dp-scaffold", "clip": 0.5, "control_clip": 0.5}, 180, {**SMALL, "sampling": "fixed"}, UPLOADS, 0.6),
    ({"name": "fedanc", "pretraining_steps": 20, "clip": 0.5}, 180, SMALL, SUM, 0.6),
    ({"name": "ldp-fed", "variant": "published", "mechanism": "ordinal"}, 12, FEW, CLAIM, 0.6),
    ({"name": "ldp-fed", "variant": "published", "mechanism": "gaussian"}, 12, FEW, CLAIM, 0.6),
    ({"name": "ldp-fed", "clip": 0.5}, 180, SMALL, SUM, 0.6),
    (GFL, 12, {**FEW, "rounds": 20}, CLAIM, 0.6),
    ({"name": "gfl-aldpa", "clip": 0.5, "keep": 0.3}, 180, ALL, SUM, 0.6),
    ({"name": "aldp-fl"}, 360, THIRD, {"epsilon": 8.0, "delta": 1e-4}, 0.7),
    ({"name": "ladp-fl"}, 360, THIRD, {"epsilon": 8.0, "delta": 1e-4}, 0.7),
    ({"name": "noisy-fedavg", "sigma": 0.05}, 100, STEPS, {}, 0.7),
    ({"name": "noisy-fedprox", "proximal": 2.0}, 100, {**STEPS, "local_steps": 10}, {"epsilon": 200.0}, 0.7),
    ({"name": "time-varying-dp"}, 240, WHOLE, SUM, 0.6),
    ({"name": "dpa-ldp"}, 240, WHOLE, SUM, 0.6),
    ({"name": "sensitive-dp"}, 240, WHOLE, SUM, 0.6),
]
"""With the number of clients, what else of `training` and `privacy`, and the accuracy; single uploads need a high epsilon."""


@pytest.mark.few(3)
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("method", "clients", "training", "privacy", "accuracy"), METHODS, ids=[f"{m[0]['name']}-{n}" for n, m in enumerate(METHODS)]
)
def test_it_learns(
    method: dict[str, Any], clients: int, training: dict[str, Any], privacy: dict[str, Any], accuracy: float, tmp_path: Path
) -> None:
    """Clients are trained in stacks where the method allows it."""
    training = {**training, "evaluate_every": training["rounds"]}
    config = digits(method, "run.engine=stacked", clients=clients, training=training, privacy=privacy)
    result = fv.train(config, tmp_path / "run")
    assert result.score > accuracy
    if method["name"] == "adaptive-clipping" and config.privacy.view == "aggregate":
        assert result.history[-1]["clip"] > 2 * 0.1  # the first clip was too small
