"""Configurations for which a method has no price or no meaning: certifying refuses them and names the remedy."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config
from method_kit import digits

UPDATES = (
    *("adapldp", "adaptive-clipping", "aldp-fl", "blur-lus", "dp-fedsam", "dp-scaffold", "fed-addp", "fed-dpa", "fed-smp"),
    *("gfl-aldpa", "ladp-fl", "ldp-fed", "nbafl", "sensitive-dp", "time-varying-dp"),
)
"""Methods whose noise is on whole updates."""
ADAM = {"optimizer": {"name": "adam", "lr": 0.1}}
SERVER, SUM = {"epsilon": 8.0, "view": "server"}, {"epsilon": 8.0, "view": "aggregate"}
RECORD = {"epsilon": 8.0, "unit": "record"}
PUBLISHED = {"variant": "published"}
PUBLIC = {"name": "fed-smp", "share": 0.2, "mask": "public", "public_steps": 3}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    *(({"name": name}, {"local": "dp-sgd"}, RECORD, "training.local = 'sgd'") for name in UPDATES),
    ({"name": "adap-dp-fl"}, {}, RECORD, "training.local = 'dp-sgd'"),
    ({"name": "adap-dp-fl"}, {"local": "dp-sgd", **ADAM}, RECORD, "plain SGD steps"),
    *(({"name": n, **PUBLISHED}, {}, SUM, "view = 'server'") for n in ("blur-lus", "fed-dpa", "fed-smp")),
    *(({**PUBLIC, "variant": v}, {}, SERVER, "set data.public_fraction") for v in ("published", "proven")),
    ({"name": "dp-scaffold"}, {"optimizer": {"lr": 0.1, "momentum": 0.9}}, SUM, "plain SGD steps"),
    ({"name": "dp-scaffold"}, {"optimizer": {"lr": 0.1, "weight_decay": 0.1}}, SUM, "plain SGD steps"),
    ({"name": "dp-scaffold"}, ADAM, SUM, "plain SGD steps"),
    ({"name": "dp-scaffold"}, {"schedule": "cyclic"}, SUM, "plain SGD steps"),
    ({"name": "fed-dpa"}, {"optimizer": {"lr": 0.1, "weight_decay": 0.1}}, SUM, "weight_decay"),
    ({"name": "fed-dpa", **PUBLISHED, "sigma": 1.0}, {}, SERVER, "method.sigma = 1 fixes the noise"),
    ({"name": "gfl-aldpa"}, {"sampling": "poisson"}, SUM, "training.sampling = 'fixed'"),
    ({"name": "nbafl"}, {"sampling": "poisson"}, SUM, "training.sampling = 'fixed'"),
    ({"name": "nbafl"}, {}, {**SUM, "min_survivors": 3}, "privacy.min_survivors"),
    ({"name": "nbafl", **PUBLISHED, "exposures": 21}, {}, SERVER, "method.exposures = 21"),
    ({"name": "nbafl", **PUBLISHED, "source": "ladp-fl"}, {}, SERVER, "training.batch_clip"),
]


@pytest.mark.parametrize(("method", "training", "privacy", "remedy"), REFUSED)
def test_what_a_method_cannot_do_is_refused(
    method: dict[str, Any], training: dict[str, Any], privacy: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        certify_config(digits(method, training=training, privacy=privacy))
    assert remedy in str(caught.value)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("adap-dp-fl", {"clip_range": [2.0, 1.0]}),
    ("adaptive-clipping", {"quantile": 1.0, "clip": 0.0, "rate": math.inf, "count_share": 1.0}),
    ("dp-fedsam", {"clip": 0.0, "rho": -0.1, "keep": 0.0}),
    ("dp-scaffold", {"clip": 0.0, "control_clip": math.inf, "control_share": 1.0}),
]


@pytest.mark.parametrize(("method", "values"), OPTIONS, ids=[name for name, _ in OPTIONS])
def test_an_option_out_of_its_range_is_refused(method: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        with pytest.raises(ConfigError) as caught:
            digits({"name": method, name: value})
        assert (caught.value.key, caught.value.value) == (f"method.{name}", value)
