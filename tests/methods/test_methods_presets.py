"""The presets of methods: each is read, calibrated and certified without data."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedveil.experiment.certify import certify_config
from fedveil.experiment.config_files import load_config
from fedveil.experiment.presets import presets

METHODS = (
    "dp-fedavg",
    "ladp-fl",
    "aldp-fl",
    "noisy-fedavg",
    "noisy-fedprox",
    "nbafl",
    "time-varying-dp",
    "dpa-ldp",
    "sensitive-dp",
    "adapldp",
    "ldp-fed",
    "gfl-aldpa",
    "adap-dp-fl",
    "dp-fedsam",
    "blur-lus",
    "fed-addp",
    "fed-dpa",
    "fed-smp",
)
COMPOSED = ("blur-lus", "fed-dpa", "fed-smp")
"""Methods whose published form is proven by composition, beside what it claims."""
PRESETS = [path for name, path in presets().items() if name.partition("/")[0] in METHODS]


def test_every_method_has_presets() -> None:
    assert {path.parent.name for path in PRESETS} == set(METHODS)


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_presets_calibrate_and_say_what_is_proven(path: Path) -> None:
    sized = ["data.partition.examples_per_client=7242"] if path.stem == "femnist-cnn" else []  # else only its files tell
    config = load_config(path, sized)
    assert config.method.name == path.parent.name
    statement = certify_config(config)
    own, epsilon = statement.own.proven.epsilon, config.privacy.epsilon
    if getattr(config.method, "variant", "proven") == "proven":
        assert epsilon is not None
        assert own == pytest.approx(epsilon, rel=1e-3)
        assert own <= epsilon
    elif path.parent.name.startswith("noisy"):
        assert own < math.inf
    else:
        if config.method.name == "adap-dp-fl":  # whose published form adapts to what has left already
            assert own == pytest.approx(epsilon, rel=1e-3)
        else:
            assert math.isinf(own) is (config.method.name not in COMPOSED)
        assert any(v.claimed is not None for v in statement.views)


OWN = {"ladp-fl": "fashion-mnist", "aldp-fl": "fashion-mnist", "noisy-fedavg": "mnist", "noisy-fedprox": "mnist"}
OWN |= {"fedglp-adp": "fashion-mnist", "fedanc": "fashion-mnist"}


@pytest.mark.parametrize("method", OWN)
def test_each_paper_s_method_has_a_proven_preset_that_can_learn(method: str) -> None:
    config = load_config(presets()[f"{method}/{OWN[method]}-proven"])
    statement = certify_config(config)
    assert math.isfinite(statement.own.proven.epsilon)
    assert statement.own.proven.delta * config.data.partition["clients"] < 1
    assert statement.learnability is not None
    assert statement.learnability.verdict != "no"
